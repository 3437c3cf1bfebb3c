"""The prediction of the next unit, tested with units that only have a name."""

from __future__ import annotations

from typing import Any

import pytest

from minifsdp.engine.schedule import Schedule


class Named:
    """A unit with only the attribute that a schedule uses."""

    def __init__(self, name: str) -> None:
        self.name = name


# The order in which forwards end, and what each unit prefetches in the reverse order.
ORDERS = {
    "abc": "ba-",
    "ca": "c-",  # In this iteration, the second unit of the iteration before does not run.
    "aba": "ba-",
    "aabb": "aa--",  # A unit does not prefetch itself.
    "abbb": "aaa-",
}


@pytest.mark.pure
@pytest.mark.spec("PREF-08")
def test_backward_prefetches_in_the_reverse_order_in_which_forwards_of_this_iteration_ended() -> None:
    units: dict[str, Any] = {name: Named(name) for name in "abc"}
    for left, prefetched in ORDERS.items():
        schedule = Schedule(None)
        for unit in units.values():
            schedule.leave(unit)
        schedule.end_iteration()
        for name in left:
            schedule.leave(units[name])
        found = [schedule.next_backward(units[name]) for name in reversed(left)]
        assert found == [units.get(name) for name in prefetched], left
