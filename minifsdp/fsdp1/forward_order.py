"""``forward_prefetch=True``: forward prefetches the next unit, in the order of the first iteration.

A model does not declare the order of its units. So the first iteration only records in which order the units enter
forward. It ends with its first backward. Later, each unit prefetches the one that entered after it.

Worked example, a root R around 0 and 1::

    first iteration     records R 0 1
    later iterations    R prefetches 0, and 0 prefetches 1

A unit whose module is called twice enters once, at the first call. If a later iteration has another order, the results
stay correct, and a warning names the first unit that runs in another place.

*In torch:* ``_ExecOrderData`` in ``_exec_order_utils.py``.

Spec: PREF-11, PREF-12, PREF-13.
"""

from typing import Any

import torch

from minifsdp.engine.messages import message, warn
from minifsdp.engine.root import RootState
from minifsdp.engine.unit import Phase, Unit


class ForwardOrder:
    """The order in which the units of one root enter forward.

    Args:
        root_state: the root of the units.
    """

    def __init__(self, root_state: RootState) -> None:
        self._units = root_state.units
        # The units in this order, and the position of each.
        self._order: list[Unit[Any]] = []
        self._positions: dict[Unit[Any], int] = {}
        self._is_first_iteration = True
        self._position = 0
        self._has_warned = False
        points = root_state.iteration.points
        points.forward_begins.append(self._forward_begins)
        points.backward_ends.append(self._backward_ends)

    def enter(self, unit: Unit[Any]) -> None:
        """Called before a forward of a unit: chooses the unit that it prefetches.

        Only a forward that autograd records has a position in the order, and prefetches.
        """
        is_again = unit.phase in (Phase.PRE_BACKWARD, Phase.SUMMONED)
        is_counted = not is_again and torch.is_grad_enabled()
        following = self._next(unit) if is_counted else ()
        if unit.policy.prefetch_in_forward != following:
            unit.update_policy(prefetch_in_forward=following)

    def _next(self, unit: Unit[Any]) -> tuple[Unit[Any], ...]:
        if self._is_first_iteration:
            if unit not in self._positions:
                self._positions[unit] = len(self._order)
                self._order.append(unit)
            return ()
        position = self._positions.get(unit)
        is_other = position is None or position > self._position
        if is_other and not self._has_warned:
            self._has_warned = True
            expected = [*(one.name for one in self._order), "none"][self._position]
            warn(message("changed-order", unit=unit.name, expected=expected))
        if position is None:
            return ()
        self._position = max(self._position, position + 1)
        return tuple(self._order[position + 1 : position + 2])

    def _forward_begins(self) -> None:
        if not any(unit.uses.awaits_backward for unit in self._units):
            # The last iteration has ended, or an exception has ended it. Then its order is incomplete.
            self._position = 0
            if self._is_first_iteration:
                self._order.clear()
                self._positions.clear()

    def _backward_ends(self) -> bool:
        if self._order:
            self._is_first_iteration = False
        self._position = 0
        return False
