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

The case is a base class of `FSDPModule`. It calls `IterationState.begin_finish` and `IterationState.finish`, and sets
its attributes ``is_manual`` and ``unfinished``.

*In torch:* since 2.15, functions of the same names in ``_fully_shard.py``. There, ``wait()`` only waits. Here, it also
completes the last reduction, because at most one is in flight.

Spec: NEW-25, PROG-84.
"""

from typing import Any

from minifsdp.arguments import SWITCH, require
from minifsdp.engine.hooks import IterationState
from minifsdp.engine.messages import message
from minifsdp.engine.root import RootState


class GradientReductionHandle:
    """The handle that ``finalize_backward(async_op=True)`` returns (NEW-25)."""

    def __init__(self) -> None:
        self._iteration: IterationState | None = None

    def wait(self) -> None:
        """Waits for the reductions. Afterwards the gradients are complete. A second call has no effect.

        Raises:
            RuntimeError: if ``reset_iter_state`` was called in between.
        """
        iteration, self._iteration = self._iteration, None
        if iteration is None:
            return
        if iteration.unfinished is not self:
            raise RuntimeError(message("reduction-reset"))
        iteration.unfinished = None
        iteration.finish()


class ManualFinalization:
    """The methods of a module of ``fully_shard`` for manual finalization."""

    def set_manual_backward_finalization(self: Any, enabled: bool) -> None:
        """Sets whether only `finalize_backward` ends an iteration (NEW-25). Call it on the root, before a forward.

        Raises:
            RuntimeError: if the module is not the root, or the iteration has begun with the other choice.
        """
        require(SWITCH, "set_manual_backward_finalization", enabled=enabled)
        iteration = self._as_root("set_manual_backward_finalization").iteration
        if enabled != iteration.is_manual and (iteration.in_backward or iteration.is_open):
            raise RuntimeError(message("manual-changed"))
        iteration.is_manual = enabled

    def finalize_backward(self: Any, *, async_op: bool = False) -> GradientReductionHandle | None:
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
            root_state = self._as_root("finalize_backward")
            _check_end(root_state)
            root_state.iteration.begin_finish()
            handle._iteration = root_state.iteration
            root_state.iteration.unfinished = handle
        if async_op:
            return handle
        handle.wait()
        return None


def _check_end(root_state: RootState) -> None:
    if root_state.iteration.unfinished is not None:
        raise RuntimeError(message("reduction-unfinished"))
    if not root_state.iteration.is_manual:
        raise RuntimeError(message("not-manual"))
    if root_state.is_busy:
        raise RuntimeError(message("finalized-early"))
    for unit in root_state.units:
        leaves = unit.layout.has_unreduced and unit.policy.reduces
        for plan in unit.plans:
            stays_partial = leaves and plan.mesh.replicate is not None and not plan.all_reduces
            if stays_partial or plan.partial is not None:
                raise RuntimeError(message("finalized-partial", unit=unit.name))
