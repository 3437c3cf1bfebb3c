"""Manual finalization: the program decides when the gradients of several backwards are reduced.

A pipeline schedule splits each backward of a stage, and reduces the gradients in an action of its own. This program has
one stage and two micro-batches::

    stage.set_manual_backward_finalization(True)
    stage.set_requires_gradient_sync(False)
    for batch in micro_batches:
        loss(stage(batch)).backward()                # the gradients are kept, the units stay unsharded
    stage.set_requires_gradient_sync(True)
    handle = stage.finalize_backward(async_op=True)  # issues a reduction for each unit
    other_stage.forward()                            # computes at the same time
    handle.wait()                                    # the gradients are complete, all units are idle

Without this case, only the hooks of a backward issue reductions. A schedule that splits backwards computes the
gradients of weights by ``autograd.grad``, which calls none of these hooks. They would never be reduced.

`ManualFinalization` is a base class of `FSDPModule`. While an iteration is manual, a `Manual` keeps it open at the end
of each backward.

*In torch:* since 2.15, functions of the same names in ``_fully_shard.py``. There, ``wait()`` only waits. Here, it also
completes the last reduction, because at most one is in flight.

Spec: NEW-25, PROG-84.
"""

from typing import Any

from minifsdp.checks.arguments import SWITCH, require
from minifsdp.engine.backward_hooks import NOT_IN_BACKWARD
from minifsdp.engine.hooks import IterationState
from minifsdp.engine.messages import message
from minifsdp.engine.root import RootState


class Manual:
    """Keeps the iteration of a root open until the program ends it.

    Args:
        iteration: the iteration of the root. Its extension points hold this object.

    Attributes:
        iteration: as given.
        unfinished: the handle of a reduction that the program must wait for before the next forward.
    """

    def __init__(self, iteration: IterationState) -> None:
        self.iteration = iteration
        self.unfinished: GradientReductionHandle | None = None
        iteration.points.backward_ends.append(self.backward_ends)
        iteration.points.forward_begins.append(self.check_finished)

    def remove(self) -> None:
        """The end of the next backward ends the iteration again."""
        self.unfinished = None
        self.iteration.points.backward_ends.remove(self.backward_ends)
        self.iteration.points.forward_begins.remove(self.check_finished)

    def backward_ends(self) -> bool:
        """Keeps the iteration open. After an error in it, forgets the handle of before."""
        if not self.iteration.is_open:
            self.unfinished = None
        self.iteration.keep_open()
        return True

    def check_finished(self) -> None:
        """Raises an error if the program did not wait for a handle. After an error in an iteration, forgets it."""
        if self.iteration.is_open and self.unfinished is not None:
            raise RuntimeError(message("reduction-unfinished"))
        self.unfinished = None


def manual_of(iteration: IterationState) -> Manual | None:
    """The object that keeps an iteration open; ``None`` if the end of its backward ends it."""
    owners = [
        getattr(function, "__self__", None)
        for function in iteration.points.backward_ends
    ]
    return next((owner for owner in owners if isinstance(owner, Manual)), None)


def reduce_all(iteration: IterationState) -> None:
    """Issues the reductions that are left, outside of a backward. Call `finish` afterwards."""
    iteration.in_backward = True
    for observer in iteration.observers:
        observer.backward_begins(NOT_IN_BACKWARD)
    iteration.reduce_overdue()
    # The program may read parameters before it calls `finish`.
    iteration.in_backward = False
    iteration.is_open = True


def finish(iteration: IterationState) -> None:
    """Ends the iteration outside of a backward."""
    iteration.in_backward = True
    iteration.reduce_overdue()
    iteration.end_iteration()
    iteration.leave_backward()


class GradientReductionHandle:
    """The handle that ``finalize_backward(async_op=True)`` returns (NEW-25)."""

    def __init__(self) -> None:
        self._manual: Manual | None = None

    def wait(self) -> None:
        """Waits for the reductions. Afterwards the gradients are complete. A second call has no effect.

        Raises:
            RuntimeError: if ``reset_iter_state`` was called in between.
        """
        manual = self._manual
        self._manual = None
        if manual is None:
            return
        if manual.unfinished is not self or not manual.iteration.is_open:
            raise RuntimeError(message("reduction-reset"))
        manual.unfinished = None
        finish(manual.iteration)


class ManualFinalization:
    """The methods of a module of ``fully_shard`` for manual finalization."""

    def set_manual_backward_finalization(self: Any, enabled: bool) -> None:
        """Sets whether only `finalize_backward` ends an iteration (NEW-25). Call it on the root, before a forward.

        Raises:
            RuntimeError: if the module is not the root, or the iteration has begun with the other choice.
        """
        require(SWITCH, "set_manual_backward_finalization", enabled=enabled)
        iteration = self._as_root("set_manual_backward_finalization").iteration
        manual = manual_of(iteration)
        if enabled == (manual is not None):
            return
        if iteration.in_backward or iteration.is_open:
            raise RuntimeError(message("manual-changed"))
        if manual is not None:
            manual.remove()
        else:
            Manual(iteration)

    def finalize_backward(
        self: Any, *, async_op: bool = False
    ) -> GradientReductionHandle | None:
        """Reduces the gradients that backwards have left, and ends the iteration (NEW-25). Call it on the root.

        Args:
            async_op: whether to return a handle immediately. Call its ``wait()`` before the gradients are used, and
                before the next forward.

        Raises:
            RuntimeError: if the module is not the root, a forward or a backward is running, the iteration is not
                manual, the handle of an earlier call was not waited for, or a gradient is not all-reduced.
        """
        handle = GradientReductionHandle()
        if self._get_fsdp_state().root_state is not None:
            manual = handle._manual = _checked(self._as_root("finalize_backward"))
            reduce_all(manual.iteration)
            manual.unfinished = handle
        if async_op:
            return handle
        handle.wait()
        return None


def _checked(root_state: RootState) -> Manual:
    manual = manual_of(root_state.iteration)
    if manual is None:
        raise RuntimeError(message("not-manual"))
    manual.check_finished()
    if root_state.is_busy:
        raise RuntimeError(message("finalized-early"))
    for unit in root_state.units:
        leaves = unit.layout.has_unreduced and unit.policy.reduces
        if any(
            plan.partial is not None
            or (leaves and plan.mesh.replicate is not None and not plan.all_reduces)
            for plan in unit.plans
        ):
            raise RuntimeError(message("finalized-partial", unit=unit.name))
    return manual
