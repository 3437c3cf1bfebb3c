"""Who is gathered next: the recorded order.

A gather hides behind compute only if it is asked for early, and to ask early one must know who comes next. The
order of a model's units is not written anywhere; it is *observed*:

* units **leave** forward in some order, 0 1 2 3. Backward will meet them in reverse, so when the gradient of unit 3's
  output arrives, the next to gather is the one that left before it: 2. This order is recorded anew in every iteration,
  and a model that takes another branch today is followed today.
* units **enter** forward in some order, too. When unit 0 enters, the next would be 1, but that is only known from an
  earlier iteration. So forward prefetch works from the second iteration on, in the order of the first.

Worked example, a root R around 0 and 1::

    entered   R 0 1          next for forward:   R -> 0 -> 1 -> none
    left      0 1 R          next for backward:  R -> 1 -> 0 -> none

A unit whose module is called twice enters once, at the first time, and leaves twice: backward meets both uses.

A schedule answers questions and never calls a unit: what follows from the answer is decided elsewhere, and whatever a
wrong guess costs, it does not cost correctness.

*In torch:* ``_ExecOrderData`` in ``_exec_order_utils.py``; FSDP2 keeps ``post_forward_order``.

Spec: PREF-08, PREF-11, PREF-12, PREF-13.
"""

from enum import Enum, auto

from minifsdp.engine.messages import message, warn
from minifsdp.engine.unit import Unit


class BackwardPrefetch(Enum):
    """When backward asks for the parameters of the unit that comes next.

    ``BACKWARD_PRE`` asks before the current unit's gradients are computed: most overlap, and two units are held at
    once. ``BACKWARD_POST`` asks after they are computed and the current unit is freed: less memory, less overlap.
    ``None`` instead of a member asks only when the next unit's own backward begins.
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class Schedule:
    """The order in which the units of one tree enter and leave forward."""

    __slots__ = ("_entered", "_first_order", "_is_first_iteration", "_left", "_left_at", "_position", "_warned")

    def __init__(self) -> None:
        self._first_order: list[Unit] = []
        self._entered: dict[Unit, int] = {}
        self._is_first_iteration = True
        self._left: list[Unit] = []
        self._left_at: dict[Unit, list[int]] = {}
        self._position = 0
        self._warned = False

    def enter(self, unit: Unit) -> None:
        """A unit begins a forward that autograd records."""
        if self._is_first_iteration and unit not in self._entered:
            self._entered[unit] = len(self._first_order)
            self._first_order.append(unit)

    def leave(self, unit: Unit) -> None:
        """A unit has finished a forward that autograd recorded."""
        self._left_at.setdefault(unit, []).append(len(self._left))
        self._left.append(unit)

    def next_forward(self, unit: Unit) -> Unit | None:
        """Who entered after ``unit`` in the first iteration; ``None`` during that iteration, and after the last."""
        if self._is_first_iteration:
            return None
        position = self._entered.get(unit)
        self._notice_change(unit, position)
        if position is None or position + 1 >= len(self._first_order):
            return None
        return self._first_order[position + 1]

    def _notice_change(self, unit: Unit, position: int | None) -> None:
        # `_position` is how far this iteration has come in the first order. Entering ahead of it, or being new, means a
        # prefetch of another unit was in vain. Entering again, behind it, is a module that is called more than once.
        if (position is None or position > self._position) and not self._warned:
            self._warned = True
            expected = self._first_order[self._position].name if self._position < len(self._first_order) else "none"
            warn(message("changed-order", unit=unit.name, expected=expected))
        if position is not None:
            self._position = max(self._position, position + 1)

    def next_backward(self, unit: Unit) -> Unit | None:
        """Who left forward just before ``unit`` in this iteration; ``None`` if it was the first.

        To be asked once for each use of ``unit`` that backward comes to. It comes to the last one first.
        """
        positions = self._left_at.get(unit)
        if not positions:
            return None
        position = positions.pop()
        while position and self._left[position - 1] is unit:
            # Called twice in a row: it is gathered already.
            position -= 1
        return self._left[position - 1] if position else None

    def abandon_iteration(self) -> None:
        """The iteration ended in an exception; an order that was recorded only in part is not one to follow."""
        if self._is_first_iteration:
            self._first_order.clear()
            self._entered.clear()
        self.end_iteration()

    def end_iteration(self) -> None:
        """Backward is over."""
        if self._first_order:
            self._is_first_iteration = False
        self._left.clear()
        self._left_at.clear()
        self._position = 0
