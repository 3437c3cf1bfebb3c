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
def test_next_unit_in_backward_is_the_unit_that_ended_its_forward_before() -> None:
    a, b, c = units(3)
    schedule = Schedule()
    for unit in (a, b, c):
        schedule.enter(unit)
        schedule.leave(unit)
    assert [schedule.next_backward(unit) for unit in (c, b, a)] == [b, a, None]


@pytest.mark.pure
@pytest.mark.spec("PREF-08")
def test_backward_order_is_the_reverse_of_forward_exit_and_not_of_forward_entry() -> None:
    a, b, root = units(3)
    schedule = Schedule()
    schedule.enter(root)
    for inner in (a, b):
        schedule.enter(inner)
        schedule.leave(inner)
    schedule.leave(root)
    assert [schedule.next_backward(unit) for unit in (root, b, a)] == [b, a, None]


@pytest.mark.pure
@pytest.mark.spec("PREF-08")
def test_prefetch_follows_the_branch_of_the_current_iteration() -> None:
    a, b, c = units(3)
    schedule = Schedule()
    iterate(schedule, a, b, c)
    for unit in (c, a):
        schedule.enter(unit)
        schedule.leave(unit)
    assert [schedule.next_backward(unit) for unit in (a, c)] == [c, None]
    assert schedule.next_backward(b) is None, "b did not run today"


@pytest.mark.pure
@pytest.mark.spec("PREF-08")
def test_unit_that_ran_twice_is_prefetched_for_both_uses_in_reverse_order() -> None:
    a, b = units(2)
    schedule = Schedule()
    for unit in (a, b, a):
        schedule.enter(unit)
        schedule.leave(unit)
    assert schedule.next_backward(a) is b
    assert schedule.next_backward(b) is a
    assert schedule.next_backward(a) is None


@pytest.mark.pure
@pytest.mark.spec("PREF-08")
def test_unit_run_twice_does_not_prefetch_the_same_unit() -> None:
    a, b = units(2)
    schedule = Schedule()
    for unit in (a, a, b, b):
        schedule.enter(unit)
        schedule.leave(unit)
    assert [schedule.next_backward(unit) for unit in (b, b, a, a)] == [a, a, None, None]


@pytest.mark.pure
@pytest.mark.spec("PREF-12")
def test_first_iteration_only_records_and_the_second_follows_its_order() -> None:
    a, b, c = units(3)
    schedule = Schedule()
    for unit in (a, b, c):
        schedule.enter(unit)
        assert schedule.next_forward(unit) is None
        schedule.leave(unit)
    schedule.end_iteration()
    followed = []
    for unit in (a, b, c):
        schedule.enter(unit)
        followed.append(schedule.next_forward(unit))
        schedule.leave(unit)
    assert followed == [b, c, None]


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
def test_unit_missing_in_the_first_iteration_gives_a_warning_and_no_prefetch() -> None:
    a, b, new = units(3)
    schedule = Schedule()
    iterate(schedule, a, b)
    assert schedule.next_forward(a) is b
    with pytest.warns(UserWarning, match="'2' runs where '1' was expected"):
        assert schedule.next_forward(new) is None


@pytest.mark.pure
@pytest.mark.spec("PREF-13")
def test_new_unit_after_the_last_recorded_unit_gives_a_warning() -> None:
    a, new = units(2)
    schedule = Schedule()
    iterate(schedule, a)
    assert schedule.next_forward(a) is None
    with pytest.warns(UserWarning, match="'1' runs where 'none' was expected"):
        assert schedule.next_forward(new) is None


@pytest.mark.pure
@pytest.mark.spec("PREF-08", "PREF-12")
@given(st.integers(1, 8), st.integers(1, 4))
def test_a_static_order_is_followed_in_every_iteration_without_a_warning(num: int, num_iterations: int) -> None:
    order = units(num)
    schedule = Schedule()
    iterate(schedule, *order)
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
