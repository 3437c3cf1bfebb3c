"""Functions for ``fully_shard`` modules: other methods as forward, shared communication streams.

Worked example, text generation. ``model.generate(tokens)`` calls ``self(tokens)`` in a loop, and uses the parameters of
``model`` in between. After ``register_fsdp_forward_method(model, "generate")``, the parameters are all-gathered once
for the whole call.

*In torch:* ``_fully_shard.py`` has functions of the same names.

Spec: NEW-13, NEW-17.
"""

import functools
import types
from typing import Any

from torch import nn

from minifsdp.checks.arguments import METHOD_NAME, MODULE, MODULES, require
from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.messages import message
from minifsdp.engine.root import RootState
from minifsdp.fsdp2.fsdp_state import state_of
from minifsdp.fsdp2.module import listed


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method all-gather and reshard as ``forward`` does (NEW-13). Has no effect if ``module`` is not sharded.

    Args:
        module: a module that ``fully_shard`` was called on.
        method_name: the name of one of its methods, such as ``"generate"``. Every rank must call this method.

    Raises:
        ValueError: if ``module`` has no such method.
    """
    require(MODULE, "register_fsdp_forward_method", module=module)
    require(METHOD_NAME, "register_fsdp_forward_method", method_name=method_name)
    state = state_of(module)
    if state is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(
            message("no-such-method", type=type(module), method_name=method_name)
        )
    method = getattr(module, method_name)

    # The wrapped function of a method, so that its signature still begins with `self`.
    @functools.wraps(getattr(method, "__func__", method))
    def call_as_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        num_running = len(state.running)
        try:
            args, kwargs = state.pre_forward(self, args, kwargs)
            output = method(*args, **kwargs)
            return state.post_forward(self, args, kwargs, output)
        except BaseException:
            state.fail_calls(num_running)
            raise

    setattr(module, method_name, types.MethodType(call_as_forward, module))


def share_comm_ctx(modules: list[Any]) -> None:
    """Makes roots, such as pipeline stages, share communication streams, from now on (NEW-17).

    Args:
        modules: the roots, which ``fully_shard`` was called on. An empty list has no effect.

    Raises:
        ValueError: if a module is not an ``FSDPModule``.
    """
    require(MODULES, "share_comm_ctx", modules=modules)
    if states := [listed(module) for module in modules]:
        first = states[0].root_state
        comm_streams = (
            first.comm_streams if first is not None else CommStreams(states[0].device)
        )
        for state in states:
            state.shared_comm_streams = comm_streams
            if state.root_state is not None:
                _use_comm_streams(state.root_state, comm_streams)


def _use_comm_streams(root_state: RootState, comm_streams: CommStreams) -> None:
    """Makes the units of the root use these streams from now on."""
    before = root_state.comm_streams
    for comm_stream in (before.all_gather, before.reduce, before.all_reduce):
        comm_stream.join()
    root_state.comm_streams = comm_streams
    root_state.iteration.reducer.comm_streams = comm_streams
