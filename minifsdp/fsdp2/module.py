"""``FSDPModule``: the methods that ``fully_shard`` adds to a module.

``fully_shard`` changes the module's class, for example ``Block``, to a subclass, ``class FSDPBlock(FSDPModule,
Block)``. The module keeps its own behavior and gains the methods of this file.

Most methods set an option of one unit or of all units in the module. Worked example, two micro-batches, one reduction::

    model.set_requires_gradient_sync(False)      # sets `reduces` to False on every unit
    loss(model(first)).backward()                # gradients stay unsharded and local to the rank
    model.set_requires_gradient_sync(True)
    loss(model(second)).backward()               # the sum is reduced

*In torch:* the class of the same name in ``_fully_shard.py``.

Spec: FS2-02, FS2-19, FS2-20, FS2-27, FS2-28, FS2-PREF, FS2-SYNC, NEW-06 to NEW-18, NEW-27 to NEW-29, NEW-33.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.distributed.fsdp as torch_fsdp

from minifsdp.cases.added_methods import AddedMethods
from minifsdp.cases.grad_dtypes import kept_grad_dtypes
from minifsdp.cases.hook_streams import on_stream
from minifsdp.cases.replaced_parameters import accept_changes
from minifsdp.cases.smaller_mesh import leave_smaller_mesh
from minifsdp.cases.unsupported_methods import without_methods
from minifsdp.checks.arguments import (
    FACTOR,
    FUNCTION,
    MODULES,
    RESHARD,
    SWITCH,
    require,
)
from minifsdp.engine.collectives import Scaling
from minifsdp.engine.lifetime import outside_inference_mode
from minifsdp.engine.messages import message, warn
from minifsdp.engine.reduce import ReducePlan
from minifsdp.engine.root import RootState
from minifsdp.engine.unit import State, Unit
from minifsdp.fsdp2.fsdp_state import ATTRIBUTE, FSDPState, state_of, states_for


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


# The base class has the methods of cases, see ``minifsdp/cases/added_methods.py``.
class FSDPModule(AddedMethods):
    """A module on which ``fully_shard`` was called, never constructed directly. All ranks must set equal options."""

    # The name in PyTorch's registry, see ``cases/torch_registry.py``.
    _name_of_call = "fully_shard"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Creates a module of the original class, so ``model[:2]`` of a sharded ``Sequential`` is not sharded."""
        # `sharded_class` creates a class with the base classes `FSDPModule` and the original class.
        return cls.__bases__[1](*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Raises an error, because shards and hooks cannot be copied individually (NEW-22)."""
        raise AssertionError(message("copy-of-fully-shard"))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises an error, because process groups and hooks cannot be pickled (PROG-03)."""
        self.__deepcopy__({})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, whose hooks all-gather and reshard. After an exception, ends the unfinished calls."""
        state = self.__dict__[ATTRIBUTE]
        num_running = len(state.running)
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            state.fail_calls(num_running)
            raise

    # --- manual unshard and reshard ---

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gathers this module's unit, without inner units (FS2-19). All ranks of its mesh must call it.

        Args:
            async_op: whether to return a handle immediately. The module's forward waits for the all-gather itself.
        """
        handle = UnshardHandle()
        state = self._get_fsdp_state()
        if state.unit is not None:
            root_state = state.current_root_state()
            # As at the start of an iteration, the user may have replaced or modified the sharded parameters.
            accept_changes(state.unit.layout)
            root_state.comm_streams.all_gather.wait_compute()
            if state.unit.layout.is_stale():
                state.unit.reshard()
            state.unit.unshard()
            handle._unit = state.unit
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees the unsharded parameters of this module's unit, without inner units (FS2-19)."""
        if (unit := self._get_fsdp_state().unit) is not None:
            unit.reshard()
            leave_smaller_mesh(unit)

    def reset_iter_state(self) -> None:
        """Resets the state after an exception interrupted an iteration (NEW-15). Call it on the root module.

        Unreduced gradients are lost.

        Raises:
            RuntimeError: if the module is not the root of its tree.
        """
        root_state = self._as_root("reset_iter_state")
        self._get_fsdp_state().break_off()
        _discard_unreduced(root_state.units)

    # --- reduction ---

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Sets whether the next backward ends the iteration (NEW-07).

        If ``False``, the backward waits for reductions only on CPUs.
        """
        require(SWITCH, "set_is_last_backward", is_last_backward=is_last_backward)
        self._get_fsdp_state().current_root_state().iteration.is_last_backward = (
            is_last_backward
        )

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether backward reduces gradients. If ``False``, they stay unsharded and accumulate (FS2-SYNC-01).

        To drop gradients that are not reduced yet, call ``zero_grad()`` of the module. ``zero_grad()`` of an optimizer
        only clears ``.grad``, which is ``None`` in this case, and torch has no hook for this method.
        """
        require(
            SWITCH,
            "set_requires_gradient_sync",
            requires_gradient_sync=requires_gradient_sync,
        )
        _choose(self, recurse, reduces=requires_gradient_sync)
        self.set_requires_all_reduce(requires_gradient_sync, recurse=recurse)

    def set_requires_all_reduce(
        self, requires_all_reduce: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether backward all-reduces over replicas. If ``False``, reduced shards accumulate (NEW-08)."""
        require(
            SWITCH, "set_requires_all_reduce", requires_all_reduce=requires_all_reduce
        )
        for plan in _plans(self, recurse):
            plan.all_reduces = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sets the factor by which this module's gradients are divided, instead of the number of ranks (NEW-10)."""
        require(FACTOR, "set_gradient_divide_factor", factor=factor)
        for plan in _plans(self, recurse=False):
            plan.scaling = Scaling.of(factor, plan.dtype)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor` (NEW-10)."""
        warn(message("divide-factor-renamed"), DeprecationWarning)
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None
    ) -> None:
        """Calls ``hook(reduced)`` with the unit's reduced gradient, 1-D, before it is added to ``.grad`` (NEW-09).

        Args:
            hook: the function. It can modify the tensor in place.
            stream: the stream to call it on. Not allowed with replicas, because the all-reduce already has a stream.

        Raises:
            ValueError: if ``stream`` is given and the mesh is (replicate, shard).
        """
        require(FUNCTION, "set_all_reduce_hook", hook=hook)
        for plan in _plans(self, recurse=False):
            if stream is not None and plan.mesh.replicate is not None:
                raise ValueError(message("hook-stream"))
            plan.after_reduction = hook if stream is None else on_stream(hook, stream)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether parameters without a gradient on this rank are reduced as zeros (NEW-14)."""
        for unit in _units(self, recurse):
            unit.layout.reduces_unused = reduce_scatter_unused_params

    # --- memory ---

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, recurse: bool = True
    ) -> None:
        """Sets whether the unsharded parameters are freed after forward (NEW-06).

        Raises:
            ValueError: if the value is not a bool. Only `fully_shard` accepts a number of ranks, because it creates
                groups.
        """
        require(
            RESHARD,
            "set_reshard_after_forward",
            reshard_after_forward=reshard_after_forward,
        )
        for state in states_for(self, recurse):
            state.reshard_after_forward = reshard_after_forward
        for unit in _units(self, recurse):
            # Release the larger shards of this iteration. No other code would release them.
            leave_smaller_mesh(unit)
            unit.update_policy(reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether the unsharded parameters are freed after backward (NEW-06)."""
        require(
            SWITCH,
            "set_reshard_after_backward",
            reshard_after_backward=reshard_after_backward,
        )
        _choose(self, recurse, reshard_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Sets whether backward needs this unit's parameters. An embedding does not need them, for example (NEW-11)."""
        require(
            SWITCH, "set_unshard_in_backward", unshard_in_backward=unshard_in_backward
        )
        _choose(self, recurse=False, unshards_in_backward=unshard_in_backward)

    # --- prefetch ---

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets which modules to all-gather, in this order, when this module's forward begins (FS2-PREF-03).

        Raises:
            ValueError: if a module is not an ``FSDPModule``.
        """
        require(MODULES, "set_modules_to_forward_prefetch", modules=modules)
        _choose(self, recurse=False, prefetch_in_forward=_units_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Sets which modules to all-gather, in this order, when this module's backward begins (FS2-PREF-04).

        An empty list restores the default: the unit whose forward ended just before this one's.

        Raises:
            ValueError: if a module is not an ``FSDPModule``.
        """
        require(MODULES, "set_modules_to_backward_prefetch", modules=modules)
        _choose(self, recurse=False, prefetch_in_backward=_units_of(modules) or None)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Sets the event that the next iteration's all-gathers wait for, instead of the compute stream (NEW-12)."""
        self._get_fsdp_state().current_root_state().after_optimizer = event

    # --- overrides of nn.Module methods ---

    @outside_inference_mode
    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Applies ``to``, ``half`` or ``to_empty`` to the shards. The unit adapts at its next use (FS2-28)."""
        self.reshard()
        with kept_grad_dtypes(self.parameters()):  # type: ignore[attr-defined]
            return super()._apply(*args, **kwargs)  # type: ignore[misc]

    @outside_inference_mode
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The sharded parameters and the buffers. In inference mode, a ``DTensor`` cannot be detached."""
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clears gradients, including those of sharded parameters that are currently unsharded (FUZZ-04)."""
        root_state = self._get_fsdp_state().root_state
        if root_state is not None and not root_state.is_busy:
            # After `set_is_last_backward(False)`, a reduction in flight may still add to `.grad` later.
            root_state.iteration.reducer.finish_open()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        set_to_none = kwargs.get("set_to_none", args[0] if args else True)
        _discard_unreduced(units := _units(self, recurse=True))
        for parameter in (
            parameter for unit in units for parameter in unit.layout.local_parameters
        ):
            parameter.grad = (
                None
                if set_to_none or parameter.grad is None
                else parameter.grad.zero_()
            )

    def _as_root(self, call: str) -> RootState:
        state = self._get_fsdp_state()
        if state._is_root is False:
            raise RuntimeError(message("fsdp-root-only", call=call))
        return state.current_root_state()

    def _get_fsdp_state(self) -> FSDPState:
        state = state_of(self)  # type: ignore[arg-type]
        if state is None:
            raise AssertionError(message("not-sharded", type=type(self).__name__))
        return state


@functools.cache
def sharded_class(original: type[Any], base: type[Any]) -> type[Any]:
    """A subclass of ``base`` and ``original``, created once for each class."""
    # PyTorch's pipeline schedules check for torch's class. Last, so that no other class inherits its methods.
    # A program may have replaced torch's class by this one.
    others = (
        ()
        if torch_fsdp.FSDPModule is FSDPModule
        else (without_methods(torch_fsdp.FSDPModule, FSDPModule),)
    )
    # For example ``FSDPBlock``.
    return type(
        base.__name__.removesuffix("Module") + original.__name__,
        (base, original, *others),
        {},
    )


def _units(module: Any, recurse: bool) -> list[Unit]:
    return [
        state.unit for state in states_for(module, recurse) if state.unit is not None
    ]


def _plans(module: Any, recurse: bool) -> list[ReducePlan]:
    return [plan for unit in _units(module, recurse) for plan in unit.plans]


def _choose(module: Any, recurse: bool, **changes: Any) -> None:
    for unit in _units(module, recurse):
        unit.update_policy(**changes)


def _discard_unreduced(units: Iterable[Unit]) -> None:
    """Discards gradients that are not reduced, or not all-reduced over the replicas."""
    for unit in units:
        unit.layout.take_gradient(with_unreduced=True)
        for plan in unit.plans:
            plan.partial = None


def listed(module: Any) -> FSDPState:
    """The state of one module in a list that the user passed.

    Raises:
        ValueError: if ``fully_shard`` was not called on it.
    """
    state = state_of(module) if isinstance(module, torch.nn.Module) else None
    if state is None:
        raise ValueError(message("expects-fsdp-module", type=type(module).__name__))
    return state


def _units_of(modules: Iterable[Any]) -> tuple[Unit, ...]:
    return tuple(state.unit for state in map(listed, modules) if state.unit is not None)
