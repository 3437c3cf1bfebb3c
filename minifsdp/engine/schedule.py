"""Prefetching: which unit is all-gathered next, from the recorded order.

An all-gather overlaps with compute only if it is issued early. For this, the engine must know the next unit. A model
does not declare the order of its units, so the engine *records* this order:

* Units **leave** forward in some order, 0 1 2 3. Backward runs in reverse, so when the gradient of unit 3's output is
  computed, the next unit to all-gather is unit 2, which left before unit 3. This order is recorded again in every
  iteration, so a model can take a different branch in each iteration.
* Units also **enter** forward in some order. When unit 0 enters, the next unit is 1, but only an earlier iteration can
  show this. So forward prefetch works from the second iteration on, in the order of the first iteration.

Worked example, a root R around 0 and 1::

    entered   R 0 1          next for forward:   R -> 0 -> 1 -> none
    left      0 1 R          next for backward:  R -> 1 -> 0 -> none

A unit whose module is called twice enters once, at the first call, and leaves twice: backward runs for both calls.

A schedule only returns the next unit. The caller decides whether to all-gather it. A wrong prediction costs time, but
the results stay correct.

*In torch:* ``_ExecOrderData`` in ``_exec_order_utils.py``; FSDP2 keeps ``post_forward_order``.

Spec: PREF-08, PREF-11, PREF-12, PREF-13.
"""

from enum import Enum, auto

from minifsdp.engine.messages import message, warn
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
    """The order in which the units of one root enter and leave forward.

    Args:
        backward_prefetch: when to prefetch the next unit in backward; ``None`` disables prefetching.
        forward_prefetch: whether to prefetch the next unit in forward.
    """

    def __init__(
        self,
        backward_prefetch: BackwardPrefetch | None = None,
        forward_prefetch: bool = False,
    ) -> None:
        self.backward_prefetch = backward_prefetch
        self.forward_prefetch = forward_prefetch
        self._first_order: list[Unit] = []
        self._entered: dict[Unit, int] = {}
        self._is_first_iteration = True
        self._left: list[Unit] = []
        self._left_at: dict[Unit, list[int]] = {}
        self._position = 0
        self._warned = False

    def enter(self, unit: Unit) -> None:
        """Called when a unit begins a forward that autograd records."""
        if self._is_first_iteration and unit not in self._entered:
            self._entered[unit] = len(self._first_order)
            self._first_order.append(unit)

    def leave(self, unit: Unit) -> None:
        """Called when a unit has finished a forward that autograd recorded."""
        self._left_at.setdefault(unit, []).append(len(self._left))
        self._left.append(unit)

    def next_forward(self, unit: Unit) -> Unit | None:
        """The unit that entered after ``unit`` in the first iteration; ``None`` until then, and for the last unit."""
        if self._is_first_iteration:
            return None
        position = self._entered.get(unit)
        # `_position` is the progress of this iteration in the first order. If a unit is new or enters ahead of this
        # position, a prefetch of another unit was unused. If a unit enters behind it, its module is called again.
        if (position is None or position > self._position) and not self._warned:
            self._warned = True
            expected = (
                self._first_order[self._position].name
                if self._position < len(self._first_order)
                else "none"
            )
            warn(message("changed-order", unit=unit.name, expected=expected))
        if position is None:
            return None
        self._position = max(self._position, position + 1)
        return (
            self._first_order[position + 1]
            if position + 1 < len(self._first_order)
            else None
        )

    def next_backward(self, unit: Unit) -> Unit | None:
        """The unit that left forward just before ``unit`` in this iteration; ``None`` if ``unit`` was the first.

        Call this method once for each use of ``unit`` in backward. Backward begins with the last use.
        """
        positions = self._left_at.get(unit)
        if not positions:
            return None
        position = positions.pop()
        while position and self._left[position - 1] is unit:
            # Skip a unit that ran twice in a row, because it is already unsharded.
            position -= 1
        return self._left[position - 1] if position else None

    def abandon_iteration(self) -> None:
        """Called when the iteration ended in an exception. Discards an order that is only partly recorded."""
        if self._is_first_iteration:
            self._first_order.clear()
            self._entered.clear()
        self.end_iteration()

    def end_iteration(self) -> None:
        """Called when backward is over."""
        if self._first_order:
            self._is_first_iteration = False
        self._left.clear()
        self._left_at.clear()
        self._position = 0
