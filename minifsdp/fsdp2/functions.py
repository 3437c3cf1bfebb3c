"""Two functions for modules of ``fully_shard``: other methods as forward, and shared communication streams.

Worked example, text generation. ``model.generate(tokens)`` calls ``self(tokens)`` in a loop, and uses the parameters of
``model`` in between. After ``register_fsdp_forward_method(model, "generate")`` the parameters are all-gathered once for
the whole call.

*In torch:* the functions of the same names in ``_fully_shard.py``.

Spec: NEW-13, NEW-17.
"""

import functools
import types
from typing import Any

from torch import nn

from minifsdp.arguments import METHOD_NAME, MODULE, MODULES, require
from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.messages import message
from minifsdp.fsdp2.fsdp_state import state_of
from minifsdp.fsdp2.module import FSDPModule, listed


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes another method all-gather and reshard as ``forward`` does (NEW-13). No effect if ``module`` is not sharded.

    Raises:
        ValueError: if ``module`` has no such method.
    """
    require(MODULE, "register_fsdp_forward_method", module=module)
    require(METHOD_NAME, "register_fsdp_forward_method", method_name=method_name)
    state = state_of(module)
    if state is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(message("no-such-method", type=type(module), method_name=method_name))
    method = getattr(module, method_name)

    @functools.wraps(method)
    def call_as_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        num_running = len(state.running)
        try:
            args, kwargs = state.before_forward(self, args, kwargs)
            output = method(*args, **kwargs)
            return state.after_forward(self, args, kwargs, output)
        except BaseException:
            state.fail_calls(num_running)
            raise

    setattr(module, method_name, types.MethodType(call_as_forward, module))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Makes several roots, e.g. pipeline stages, share communication streams (NEW-17). Call before the first forward.

    Raises:
        ValueError: if a module is not an ``FSDPModule``.
    """
    require(MODULES, "share_comm_ctx", modules=modules)
    states = [listed(module) for module in modules]
    if states:
        comm_streams = CommStreams(states[0].device)
        for state in states:
            state.shared_comm_streams = comm_streams
