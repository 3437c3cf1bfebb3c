"""Prefetching in backward: which unit is all-gathered next, from the recorded order.

An all-gather overlaps with compute only if it is issued early. For this, the engine must know the next unit. A model
does not declare the order of its units, so the engine *records* the order in which units **leave** forward: 0 1 2 3.
Backward runs in reverse. When the gradient of unit 3's output is computed, the next unit to all-gather is unit 2, which
left before unit 3. This order is recorded again in every iteration, so a model can take a different branch in each
iteration.

Worked example, a root R around 0 and 1::

    left      0 1 R          next for backward:  R -> 1 -> 0 -> none

A unit whose module is called twice leaves twice: backward runs for both calls.

A schedule only returns the next unit. The caller decides whether to all-gather it. A wrong prediction costs time, but
the results stay correct.

*In torch:* ``_ExecOrderData`` in ``_exec_order_utils.py``; FSDP2 keeps ``post_forward_order``.

Spec: PREF-08.
"""

from enum import Enum, auto

from minifsdp.engine.unit import Unit


class BackwardPrefetch(Enum):
    """When backward prefetches the parameters of the next unit.

    ``BACKWARD_PRE`` prefetches before the current unit's gradients are computed: most overlap, but two units are
    unsharded. ``BACKWARD_POST`` prefetches after they are computed and the current unit is resharded: less memory, less
    overlap. ``None`` disables prefetching: each unit is all-gathered when its own backward begins.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class Schedule:
    """The order in which the units of one root leave forward.

    Args:
        backward_prefetch: when to prefetch the next unit in backward; ``None`` disables prefetching.
    """

    def __init__(self, backward_prefetch: BackwardPrefetch | None) -> None:
        self.backward_prefetch = backward_prefetch
        self._left: list[Unit] = []
        self._left_at: dict[Unit, list[int]] = {}

    def leave(self, unit: Unit) -> None:
        """Called when a unit has finished a forward that autograd recorded."""
        self._left_at.setdefault(unit, []).append(len(self._left))
        self._left.append(unit)

    def next_backward(self, unit: Unit) -> Unit | None:
        """The unit that left forward just before ``unit`` in this iteration; ``None`` if ``unit`` was the first.

        Call this method once for each backward of ``unit``. Backward begins with the last forward.
        """
        positions = self._left_at.get(unit)
        if not positions:
            return None
        position = positions.pop()
        while position and self._left[position - 1] is unit:
            # Skip a unit that ran twice in a row, because it is already unsharded.
            position -= 1
        return self._left[position - 1] if position else None

    def end_iteration(self) -> None:
        """Called when the iteration is over, or has failed."""
        self._left.clear()
        self._left_at.clear()
