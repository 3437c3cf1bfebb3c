"""The prediction of the next unit, tested with units that only have a name."""

from __future__ import annotations

from typing import Any

import pytest

from minifsdp.engine.schedule import Schedule


class Named:
    """A unit with only the attribute that a schedule uses."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def units(num: int) -> list[Any]:
    return [Named(str(index)) for index in range(num)]


def iterate(schedule: Schedule, *order: Any) -> None:
    """Runs one iteration in which the units run one after the other."""
    for unit in order:
        schedule.leave(unit)
    schedule.end_iteration()


@pytest.mark.pure
@pytest.mark.spec("PREF-08")
@pytest.mark.parametrize(
    ("left", "prefetched"),
    [
        ("abc", "ba-"),
        ("ca", "c-"),  # In this iteration, the second unit of the iteration before does not run.
        ("aba", "ba-"),
        ("aabb", "aa--"),  # A unit does not prefetch itself.
        ("abbb", "aaa-"),
    ],
)
def test_backward_prefetches_in_the_reverse_order_in_which_forwards_of_this_iteration_ended(
    left: str, prefetched: str
) -> None:
    by_name = dict(zip("abc", units(3), strict=True))
    schedule = Schedule(None)
    iterate(schedule, *by_name.values())
    for name in left:
        schedule.leave(by_name[name])
    found = [schedule.next_backward(by_name[name]) for name in reversed(left)]
    assert found == [by_name.get(name) for name in prefetched]
