"""``forward_prefetch=True``: forward prefetches the next unit, in the order of the first iteration.

A model does not declare the order of its units. So the first iteration only records in which order the units enter
forward. At its end, the policy of each unit gets the next one as the unit to prefetch.

Worked example, a root R around 0 and 1::

    first iteration     records R 0 1
    later iterations    R prefetches 0, and 0 prefetches 1

A unit whose module is called twice enters once, at the first call. If a later iteration has another order, the results
stay correct, and a warning names the first unit that runs in another place.

*In torch:* ``_ExecOrderData`` in ``_exec_order_utils.py``.

Spec: PREF-11, PREF-12, PREF-13.
"""

from itertools import pairwise
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
        self._order: dict[Unit[Any], int] = {}
        self._is_first_iteration = True
        self._position = 0
        self._has_warned = False
        root_state.iteration.points.backward_ends.append(self._backward_ends)

    def enter(self, unit: Unit[Any]) -> None:
        """Called when a unit begins a forward. Only a forward that autograd records counts."""
        is_again = unit.phase in (Phase.PRE_BACKWARD, Phase.SUMMONED)
        if is_again or not torch.is_grad_enabled():
            return
        if self._is_first_iteration:
            self._order.setdefault(unit, len(self._order))
            return
        position = self._order.get(unit)
        is_other = position is None or position > self._position
        if is_other and not self._has_warned:
            self._has_warned = True
            names = [one.name for one in self._order]
            expected = [*names, "none"][self._position]
            warn(message("changed-order", unit=unit.name, expected=expected))
        if position is not None:
            self._position = max(self._position, position + 1)

    def _backward_ends(self) -> bool:
        self._position = 0
        if self._is_first_iteration and self._order:
            self._is_first_iteration = False
            for unit, next_one in pairwise(self._order):
                unit.update_policy(prefetch_in_forward=(next_one,))
        return False
