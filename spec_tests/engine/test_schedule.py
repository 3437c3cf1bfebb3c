"""The prediction of the next unit, tested with units that only have a name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        schedule.enter(unit)
        schedule.leave(unit)
    schedule.end_iteration()


@pytest.mark.pure
@pytest.mark.spec("PREF-08")
@pytest.mark.parametrize(
    ("entered", "left", "prefetched"),
    [
        ("abc", "abc", "ba-"),
        ("cab", "abc", "ba-"),  # The last unit to end its forward is the root, which begins first.
        ("ca", "ca", "c-"),  # In this iteration, the second unit of the iteration before does not run.
        ("aba", "aba", "ba-"),
        ("aabb", "aabb", "aa--"),  # A unit does not prefetch itself.
        ("abbb", "abbb", "aaa-"),
    ],
)
def test_backward_prefetches_in_the_reverse_order_in_which_forwards_of_this_iteration_ended(
    entered: str, left: str, prefetched: str
) -> None:
    by_name = dict(zip("abc", units(3), strict=True))
    schedule = Schedule()
    iterate(schedule, *by_name.values())
    for name in entered:
        schedule.enter(by_name[name])
    for name in left:
        schedule.leave(by_name[name])
    found = [schedule.next_backward(by_name[name]) for name in reversed(left)]
    assert found == [by_name.get(name) for name in prefetched]


@pytest.mark.pure
@pytest.mark.spec("PREF-12")
def test_order_of_the_first_iteration_stays_permanently() -> None:
    a, b, c = units(3)
    schedule = Schedule()
    iterate(schedule, a, b, c)
    iterate(schedule, c, b, a)
    schedule.enter(a)
    assert schedule.next_forward(a) is b


@pytest.mark.pure
def test_iteration_without_units_is_not_the_first() -> None:
    a, b = units(2)
    schedule = Schedule()
    schedule.end_iteration()
    iterate(schedule, a, b)
    schedule.enter(a)
    assert schedule.next_forward(a) is b


def successors_without_warning(*calls: Any) -> list[Any]:
    """Records one iteration with these calls. Returns the next unit of each call in an equal iteration."""
    schedule = Schedule()
    iterate(schedule, *calls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return [schedule.next_forward(unit) for unit in calls]


@pytest.mark.pure
@pytest.mark.spec("PREF-12")
def test_unit_called_twice_keeps_the_successor_of_its_first_call_without_warning() -> None:
    a, b = units(2)
    assert successors_without_warning(a, a, b, b) == [b, b, None, None]


@pytest.mark.pure
@pytest.mark.spec("PREF-12", "PREF-13")
def test_unit_called_again_after_others_keeps_the_position_of_the_iteration() -> None:
    a, b, c = units(3)
    assert successors_without_warning(a, b, a, c) == [b, c, b, None]


@pytest.mark.pure
@pytest.mark.spec("PREF-13")
def test_units_in_another_order_give_one_warning_with_both_names() -> None:
    a, b, c = units(3)
    schedule = Schedule()
    iterate(schedule, a, b, c)
    with pytest.warns(UserWarning, match="'1' runs where '0' was expected") as caught:
        followed = [schedule.next_forward(unit) for unit in (b, a, c)]
    assert followed == [c, b, None]
    schedule.end_iteration()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.next_forward(c)
    assert len(caught) == 1
    assert "forward_prefetch off" in str(caught[0].message)


@pytest.mark.pure
@pytest.mark.spec("PREF-13")
@pytest.mark.parametrize("num_recorded", [1, 2])
def test_unit_missing_in_the_first_iteration_gives_a_warning_and_no_prefetch(num_recorded: int) -> None:
    *recorded, new = units(num_recorded + 1)
    schedule = Schedule()
    iterate(schedule, *recorded)
    assert schedule.next_forward(recorded[0]) is (None if num_recorded == 1 else recorded[1])
    expected = "none" if num_recorded == 1 else "1"
    with pytest.warns(UserWarning, match=f"'{num_recorded}' runs where '{expected}' was expected"):
        assert schedule.next_forward(new) is None


@pytest.mark.pure
@pytest.mark.spec("PREF-08", "PREF-12")
@given(st.integers(1, 8), st.integers(1, 4))
def test_a_static_order_is_followed_in_every_iteration_without_a_warning(num: int, num_iterations: int) -> None:
    order = units(num)
    schedule = Schedule()
    for unit in order:
        schedule.enter(unit)
        assert schedule.next_forward(unit) is None, "the first iteration only records"
        schedule.leave(unit)
    schedule.end_iteration()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(num_iterations):
            followed = []
            for unit in order:
                schedule.enter(unit)
                followed.append(schedule.next_forward(unit))
                schedule.leave(unit)
            assert followed == [*order[1:], None]
            assert [schedule.next_backward(unit) for unit in reversed(order)] == [*reversed(order[:-1]), None]
            schedule.end_iteration()
