"""Functions for ``fully_shard`` modules: manual all-gathers, other methods as forward, shared communication streams.

``unshard`` issues the all-gather that otherwise the module's forward issues. A training step does not need it, because
the schedule prefetches automatically. Worked example, two blocks: while ``block0`` computes,
``block1.unshard(async_op=True)`` issues the all-gather of ``block1``. The forward of ``block1`` then only waits for it.

Another example, text generation. ``model.generate(tokens)`` calls ``self(tokens)`` in a loop, and uses the parameters
of ``model`` in between. After ``register_fsdp_forward_method(model, "generate")``, the parameters are all-gathered once
for the whole call.

*In torch:* ``_fully_shard.py`` has functions of the same names; ``FSDPParamGroup`` has ``unshard``.

Spec: FS2-19, FS2-20, NEW-13, NEW-17.
"""

import functools
import types
from typing import Any

from torch import nn

from minifsdp.arguments import METHOD_NAME, MODULE, MODULES, require
from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.messages import message
from minifsdp.engine.unit import State, Unit
from minifsdp.fsdp2.fsdp_state import FSDPState, state_of


class UnshardHandle:
    """The handle that ``unshard(async_op=True)`` returns (FS2-20)."""

    def __init__(self) -> None:
        self._unit: Unit | None = None

    def wait(self) -> None:
        """Waits for the all-gather and registers the unsharded parameters. You can call it twice, or never."""
        # After a reshard there is nothing to wait for.
        if self._unit is not None and self._unit.state is not State.SHARDED:
            self._unit.wait()
            self._unit.layout.use_unsharded_params()


def issue_all_gather(state: FSDPState) -> UnshardHandle:
    """Issues the all-gather of the unit. The forward of the module then only waits for it."""
    handle, unit = UnshardHandle(), state.unit
    if unit is not None:
        root_state = state.current_root_state()
        # As at the start of an iteration, the user may have replaced or modified the sharded parameters.
        unit.layout.accept_replacements()
        root_state.comm_streams.all_gather.wait_compute()
        if unit.layout.is_stale():
            unit.reshard()
        unit.unshard()
        handle._unit = unit
    return handle


def listed(module: Any) -> FSDPState:
    """The state of one module in a list that the user passed.

    Raises:
        ValueError: if ``fully_shard`` was not called on it.
    """
    state = state_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise ValueError(message("expects-fsdp-module", type=type(module).__name__))
    return state


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
        raise ValueError(message("no-such-method", type=type(module), method_name=method_name))
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
        comm_streams = first.comm_streams if first is not None else CommStreams(states[0].device)
        for state in states:
            state.shared_comm_streams = comm_streams
            if state.root_state is not None:
                state.root_state.use_comm_streams(comm_streams)
