"""Manual finalization: the program decides when the gradients of several backwards are reduced.

A pipeline schedule splits each backward of a stage, and reduces the gradients in an action of its own. Worked example,
one stage, two micro-batches::

    stage.set_manual_backward_finalization(True)
    stage.set_requires_gradient_sync(False)
    (forward and backward, twice)                    # the gradients are kept, the units stay unsharded
    stage.set_requires_gradient_sync(True)
    handle = stage.finalize_backward(async_op=True)  # issues a reduction for each unit
    (other stages compute)
    handle.wait()                                    # the gradients are complete, all units are idle

*In torch:* since 2.15, functions of the same names in ``_fully_shard.py``. There, ``wait()`` only waits. Here, it also
completes the last reduction, because at most one is in flight.

Spec: NEW-25, PROG-84.
"""

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


def issue_reductions(root_state: RootState) -> GradientReductionHandle:
    """Issues the reductions that backwards have left.

    Raises:
        RuntimeError: if the iteration cannot end now.
    """
    handle, iteration = GradientReductionHandle(), root_state.iteration
    _check_end(root_state)
    iteration.begin_finish()
    handle._iteration = iteration
    iteration.unfinished = handle
    return handle


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
