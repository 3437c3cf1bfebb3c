"""``FSDPModule``: the methods that a sharded module has beside its own.

``fully_shard`` changes a module's class to one that is a subclass of both, ``class FSDPBlock(FSDPModule, Block)``. So
the module stays what it was, and learns the methods of this page.

Most of them set a switch on the unit, or on all units below. Worked example, two micro-batches, one reduction::

    model.set_requires_gradient_sync(False)      # switches `reduces` off on every unit
    loss(model(first)).backward()                # gradients stay whole, and stay here
    model.set_requires_gradient_sync(True)
    loss(model(second)).backward()               # the sum is reduced

*In torch:* the class of the same name in ``_fully_shard.py``.

Spec: FS2-02, FS2-19, FS2-20, FS2-27, FS2-28, FS2-PREF, FS2-SYNC, NEW-06 to NEW-18.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn

from minifsdp.engine.collectives import Scaling
from minifsdp.engine.lanes import Lanes
from minifsdp.engine.messages import message, warn
from minifsdp.engine.reduce import ReducePlan
from minifsdp.engine.unit import Unit
from minifsdp.fsdp2.by_hand import HandledState, UnshardHandle
from minifsdp.fsdp2.fsdp_state import FSDPState, state_of, states_in
from minifsdp.fsdp2.reshard import choose_reshard


class FSDPModuleState(HandledState):
    """What one call of ``fully_shard`` has made, of modules that have become `FSDPModule`."""

    def __init__(self, modules: list[nn.Module], *rest: Any) -> None:
        super().__init__(modules, *rest)
        for one in modules:
            one.__class__ = _class_for(type(one))


_classes: dict[type, type] = {}


def _class_for(original: type) -> type:
    """A class that is ``original`` and an ``FSDPModule``; one for each original."""
    if original not in _classes:
        _classes[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
    return _classes[original]


class FSDPModule:
    """A module on which ``fully_shard`` was called. It cannot be made by hand."""

    # Where the original class stands among the bases of the new one.
    _original_class_index = 2

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a module of the original class: ``model[:2]`` of a sharded ``Sequential`` is a plain one."""
        return cls.__mro__[cls._original_class_index](*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuses: shards and hooks cannot be copied one by one (NEW-22)."""
        raise AssertionError(message("copy-of-fully-shard"))

    # --- by hand ---

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's own group, not those inside it (FS2-19). All ranks of its mesh must call it.

        Args:
            async_op: return at once, with a handle to wait on; a forward waits by itself.
        """
        state = _state(self)
        state.unshard()
        if async_op:
            return state
        state.wait()
        return None

    def reshard(self) -> None:
        """Frees the full parameters of this module's own group (FS2-19)."""
        _state(self).reshard()

    def reset_iter_state(self) -> None:
        """Ends an iteration that was broken off by an exception (NEW-15). To be called on the root.

        Gradients that wait for their reduction are lost.

        Raises:
            RuntimeError: the module is not the root of its tree.
        """
        state = _state(self)
        if state.tree is not None and not state.is_tree_root:
            raise RuntimeError(message("reset-root-only"))
        state.break_off()
        state.drop_gradients()

    # --- reduction ---

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward ends the iteration; if not, it does not wait for its reductions (NEW-07)."""
        _state(self).current_tree().cycle.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients, or keeps them whole for a later one (FS2-SYNC-01)."""
        _choose(self, recurse, reduces=requires_gradient_sync)
        self.set_requires_all_reduce(requires_gradient_sync, recurse=recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward sums over replicas, or keeps this copy's sum for a later one (NEW-08)."""
        for plan in _plans(self, recurse):
            plan.all_reduces = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What this module's gradients are divided by, in place of the number of ranks (NEW-10)."""
        for plan in _plans(self, recurse=False):
            plan.scaling = Scaling.by(factor, plan.dtype)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor` (NEW-10)."""
        warn(message("divide-factor-renamed"), FutureWarning)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether only sums travel (NEW-10). Here they always do: the division is a step of its own."""

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Calls ``hook(reduced)`` with this group's reduced gradient, 1-D, before parameters see it (NEW-09).

        Args:
            hook: may change the tensor in place.
            stream: an accelerator's stream to call it on; not with replicas, whose all-reduce has a lane already.

        Raises:
            ValueError: a stream together with a (replicate, shard) mesh.
        """
        for plan in _plans(self, recurse=False):
            if stream is not None and plan.mesh.replicate is not None:
                raise ValueError(message("hook-stream"))
            plan.after, plan.after_lane = hook, stream

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether parameters that got no gradient on this rank count as zeros (NEW-14)."""
        for unit in _units(self, recurse):
            unit.layout.reduces_unused = reduce_scatter_unused_params

    # --- memory ---

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether forward frees the full parameters (NEW-06).

        Raises:
            ValueError: not a bool; a number of ranks can be chosen in `fully_shard` only, since it makes groups.
        """
        for state in _states(self, recurse):
            state.reshard_after_forward = reshard_after_forward
            if state.unit is not None:
                choose_reshard(state.unit, reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether backward frees the full parameters (NEW-06)."""
        _choose(self, recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs this group's parameters; an embedding's, for one, it does not (NEW-11)."""
        _choose(self, recurse=False, gathers_in_backward=unshard_in_backward)

    # --- prefetch ---

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Which groups to gather, in this order, when this module's forward begins (FS2-PREF-03).

        Raises:
            ValueError: one of them is no ``FSDPModule``.
        """
        _choose(self, recurse=False, ahead_in_forward=_units_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Which groups to gather, in this order, when this module's backward begins (FS2-PREF-04).

        An empty list brings the default back: the group whose forward ended before this one's.

        Raises:
            ValueError: one of them is no ``FSDPModule``.
        """
        _choose(self, recurse=False, ahead_in_backward=_units_of(modules) or None)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """What the next iteration's gathers wait for, in place of all that was given to the compute stream (NEW-12)."""
        _state(self).current_tree().after_optimizer = event

    # --- for special hardware ---

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Not offered (NEW-18)."""
        raise _not_offered("set_custom_all_gather", "the gather of engine/collectives.py")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Not offered (NEW-18)."""
        raise _not_offered("set_custom_reduce_scatter", "set_all_reduce_hook to look at reduced gradients")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Not offered (NEW-18); switching it off is."""
        if enable:
            raise _not_offered("set_allocate_memory_from_process_group_for_comm", "PyTorch's own allocator")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Not offered (NEW-18)."""
        raise _not_offered("set_symm_mem_for_comm", "PyTorch's own allocator")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> NoReturn:
        """Not offered (NEW-18)."""
        raise _not_offered("set_separate_reduce_scatter_group", "one group; reductions have a lane of their own")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> NoReturn:
        """Not offered (NEW-18)."""
        raise _not_offered("set_reduce_scatter_max_input_buffers", "the one reduction in flight that there is")

    # --- what modules are asked by nn.Module itself ---

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``to``, ``half``, ``to_empty`` and the like act on the shards; a unit adapts when next used (FS2-28)."""
        _state(self).reshard()
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients, also those of sharded parameters that full ones stand in for (FUZZ-04)."""
        tree = _state(self).tree
        if tree is not None and not tree.is_busy:
            # After `set_is_last_backward(False)` a reduction may still be in flight, and add to `.grad` later.
            tree.cycle.reducer.settle()
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for unit in _units(self, recurse=True):
            # Gradients that wait for their reduction, or for their all-reduce.
            unit.layout.take_gradient(with_unreduced=True)
            for plan in unit.plans:
                plan.partial = None
        for parameter in (p for unit in _units(self, recurse=True) for p in unit.layout.local_parameters()):
            parameter.grad = None if set_to_none or parameter.grad is None else torch.zeros_like(parameter.grad)

    def _get_fsdp_state(self) -> FSDPModuleState:
        return _state(self)


def _state(module: Any) -> FSDPModuleState:
    state = state_of(module)
    if not isinstance(state, FSDPModuleState):
        raise AssertionError(message("not-sharded", type=type(module).__name__))
    return state


def _states(module: Any, recurse: bool) -> list[FSDPState]:
    return [state for _, state in states_in(module)] if recurse else [_state(module)]


def _units(module: Any, recurse: bool) -> list[Unit]:
    return [state.unit for state in _states(module, recurse) if state.unit is not None]


def _plans(module: Any, recurse: bool) -> list[ReducePlan]:
    return [plan for unit in _units(module, recurse) for plan in unit.plans]


def _choose(module: Any, recurse: bool, **changes: Any) -> None:
    for unit in _units(module, recurse):
        unit.choose(**changes)


def _listed(module: Any) -> FSDPModuleState:
    """The state of one of the modules that the user has put on a list."""
    if not isinstance(module, FSDPModule):
        raise ValueError(message("expects-fsdp-module", type=type(module).__name__))
    return _state(module)


def _units_of(modules: Iterable[Any]) -> tuple[Unit, ...]:
    return tuple(state.unit for state in map(_listed, modules) if state.unit is not None)


def _not_offered(what: str, instead: str) -> NotImplementedError:
    return NotImplementedError(message("not-offered", what=what, instead=instead))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Lets another method of ``module`` gather and free as ``forward`` does (NEW-13). No effect on other modules.

    Raises:
        ValueError: there is no such method.
    """
    state = state_of(module)
    if state is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(message("no-such-method", type=type(module), method_name=method_name))
    method = getattr(module, method_name)

    @functools.wraps(method)
    def call_as_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # `_calls_itself` in fsdp_state.py looks for this name on the stack.
        args, kwargs = state.before_forward(self, args, kwargs)
        output = method(*args, **kwargs)
        return state.after_forward(self, args, kwargs, output)

    setattr(module, method_name, types.MethodType(call_as_forward, module))


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Lets several roots, stages of a pipeline say, share their lanes (NEW-17). To be called before the first forward.

    Raises:
        ValueError: one of them is no ``FSDPModule``.
    """
    states = [_listed(module) for module in modules]
    if states:
        lanes = Lanes(states[0].device)
        for state in states:
            state.shared_lanes = lanes
