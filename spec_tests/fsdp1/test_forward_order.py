"""Which unit forward prefetches, tested with units that only have a name, a phase and a policy."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifsdp.engine.extension_points import ExtensionPoints
from minifsdp.engine.unit import Phase
from minifsdp.fsdp1.forward_order import ForwardOrder


class Named:
    """A unit with only the attributes that the order uses."""

    def __init__(self, name: str) -> None:
        self.name, self.phase = name, Phase.IDLE
        self.prefetched: tuple[Any, ...] | None = None

    def update_policy(self, *, prefetch_in_forward: tuple[Any, ...]) -> None:
        self.prefetched = prefetch_in_forward

    def __repr__(self) -> str:
        return self.name


def units(num: int) -> list[Any]:
    return [Named(str(index)) for index in range(num)]


class Root:
    """A root state with an order, and its iterations."""

    def __init__(self) -> None:
        self.points = ExtensionPoints()
        root_state: Any = SimpleNamespace(iteration=SimpleNamespace(points=self.points))
        self.order = ForwardOrder(root_state)

    def iterate(self, *order: Any) -> None:
        """Runs one iteration in which the units run one after the other."""
        for unit in order:
            self.order.enter(unit)
        assert [extend() for extend in self.points.backward_ends] == [False]


def recorded(*order: Any) -> Root:
    root = Root()
    root.iterate(*order)
    return root


def assert_silent(root: Root, *order: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        root.iterate(*order)


@pytest.mark.pure
@pytest.mark.spec("PREF-12")
def test_order_of_the_first_iteration_stays_permanently() -> None:
    a, b, c = units(3)
    root = recorded(a, b, c)
    with pytest.warns(UserWarning, match="runs where"):
        root.iterate(c, b, a)
    assert [a.prefetched, b.prefetched, c.prefetched] == [(b,), (c,), None]


@pytest.mark.pure
@pytest.mark.spec("PREF-12")
def test_iteration_without_units_is_not_the_first() -> None:
    a, b = units(2)
    root = recorded()
    root.iterate(a, b)
    assert a.prefetched == (b,)


@pytest.mark.pure
@pytest.mark.spec("PREF-12")
def test_an_evaluation_records_nothing() -> None:
    a, b, c = units(3)
    root = Root()
    with torch.no_grad():
        root.iterate(c, b, a)
    root.iterate(a, b, c)
    assert [a.prefetched, b.prefetched, c.prefetched] == [(b,), (c,), None]


@pytest.mark.pure
@pytest.mark.spec("PREF-12")
@pytest.mark.parametrize("phase", [Phase.PRE_BACKWARD, Phase.SUMMONED])
def test_a_forward_that_runs_again_in_backward_and_one_with_full_parameters_record_nothing(phase: Phase) -> None:
    a, b = units(2)
    b.phase = phase
    root = Root()
    root.order.enter(b)
    b.phase = Phase.IDLE
    root.iterate(a, b)
    assert [a.prefetched, b.prefetched] == [(b,), None]


@pytest.mark.pure
@pytest.mark.spec("PREF-12", "PREF-13")
@pytest.mark.parametrize(("calls", "expected"), [("aabb", {"a": "b"}), ("abac", {"a": "b", "b": "c"})])
def test_unit_called_twice_keeps_the_successor_of_its_first_call_without_warning(
    calls: str, expected: dict[str, str]
) -> None:
    by_name = dict(zip("abc", units(3), strict=True))
    order = [by_name[name] for name in calls]
    assert_silent(recorded(*order), *order)
    assert {name: unit.prefetched for name, unit in by_name.items() if unit.prefetched} == {
        name: (by_name[following],) for name, following in expected.items()
    }


@pytest.mark.pure
@pytest.mark.spec("PREF-13")
def test_units_in_another_order_give_one_warning_with_both_names() -> None:
    a, b, c = units(3)
    root = recorded(a, b, c)
    with pytest.warns(UserWarning, match="'1' runs where '0' was expected") as caught:
        root.iterate(b, a, c)
    assert_silent(root, c)
    assert len(caught) == 1
    assert "forward_prefetch off" in str(caught[0].message)


@pytest.mark.pure
@pytest.mark.spec("PREF-13")
@pytest.mark.parametrize("num_recorded", [1, 2])
def test_unit_missing_in_the_first_iteration_gives_a_warning_and_no_prefetch(num_recorded: int) -> None:
    *before, new = units(num_recorded + 1)
    root = recorded(*before)
    root.order.enter(before[0])
    expected = "none" if num_recorded == 1 else "1"
    with pytest.warns(UserWarning, match=f"'{num_recorded}' runs where '{expected}' was expected"):
        root.order.enter(new)
    assert new.prefetched is None


@pytest.mark.pure
@pytest.mark.spec("PREF-12")
@given(st.integers(1, 8), st.integers(1, 4))
def test_a_static_order_is_followed_in_every_iteration_without_a_warning(num: int, num_iterations: int) -> None:
    order = units(num)
    root = Root()
    for unit in order:
        root.order.enter(unit)
        assert unit.prefetched is None, "the first iteration only records"
    root.iterate()
    for _ in range(num_iterations):
        assert_silent(root, *order)
    assert [unit.prefetched for unit in order] == [*((unit,) for unit in order[1:]), None]
