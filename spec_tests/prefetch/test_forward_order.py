"""Which unit forward prefetches, tested with units that only have a name, a phase and a policy.

A warning that a test does not expect is an error.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minifsdp.engine.extension_points import ExtensionPoints
from minifsdp.engine.unit import Phase, UnitPolicy, Uses
from minifsdp.fsdp1.forward_order import ForwardOrder


class Named:
    """A unit with only the attributes that the order uses."""

    def __init__(self, name: str) -> None:
        self.name, self.phase, self.uses = name, Phase.IDLE, Uses()
        self.policy = UnitPolicy(reshard_after_forward=True)

    def update_policy(self, **changes: Any) -> None:
        self.policy = replace(self.policy, **changes)

    def __repr__(self) -> str:
        return self.name


def units(num: int) -> list[Any]:
    return [Named(str(index)) for index in range(num)]


class Root:
    """A root state with an order, and its iterations."""

    def __init__(self) -> None:
        self.points, self.units = ExtensionPoints(), list[Any]()
        root_state: Any = SimpleNamespace(units=self.units, iteration=SimpleNamespace(points=self.points))
        self.order = ForwardOrder(root_state)

    def forward(self, *order: Any) -> list[Any]:
        """Runs the units one after the other. Returns the unit that each of them prefetches, or None."""
        for extend in self.points.forward_begins:
            extend()
        found = []
        for unit in order:
            self.order.enter(unit)
            found.append(next(iter(unit.policy.prefetch_in_forward or ()), None))
            unit.uses.awaits_backward = torch.is_grad_enabled()
            self.units.append(unit)
        return found

    def backward(self) -> None:
        for unit in self.units:
            unit.uses.awaits_backward = False
        assert [extend() for extend in self.points.backward_ends] == [False]

    def fail(self) -> None:
        """An exception ends the iteration."""
        for unit in self.units:
            unit.uses.awaits_backward = False


def recorded(*order: Any) -> Root:
    root = Root()
    assert root.forward(*order) == [None] * len(order), "the first iteration only records"
    root.backward()
    return root


@pytest.mark.pure
@pytest.mark.spec("PREF-12")
def test_order_of_the_first_iteration_stays_permanently() -> None:
    a, b, c = units(3)
    root = recorded(a, b, c)
    with pytest.warns(UserWarning, match="runs where"):
        root.forward(c, b, a)
    root.backward()
    assert root.forward(a, b, c) == [b, c, None]


@pytest.mark.pure
@pytest.mark.spec("PREF-12")
def test_an_evaluation_records_and_prefetches_nothing() -> None:
    a, b = units(2)
    root = Root()
    with torch.no_grad():
        root.forward(b, a)
    root.forward(a, b)
    root.backward()
    with torch.no_grad():
        assert root.forward(b, a) == [None, None]
    assert root.forward(a, b) == [b, None]


@pytest.mark.pure
@pytest.mark.spec("PREF-12")
@pytest.mark.parametrize("phase", [Phase.PRE_BACKWARD, Phase.SUMMONED])
def test_a_forward_that_runs_again_in_backward_and_one_with_full_parameters_record_nothing(phase: Phase) -> None:
    a, b = units(2)
    root = Root()
    b.phase = phase
    root.forward(b)
    root.fail()
    b.phase = Phase.IDLE
    root.forward(a, b)
    root.backward()
    assert root.forward(a, b) == [b, None]


@pytest.mark.pure
@pytest.mark.spec("PREF-12", "PREF-13")
def test_an_iteration_that_an_exception_ends_leaves_no_order_and_no_position() -> None:
    a, b, c = units(3)
    root = Root()
    root.forward(c, a)
    root.fail()
    root.forward(a, b, c)
    root.backward()
    assert root.forward(a, b) == [b, c]
    root.fail()
    assert root.forward(a, b, c) == [b, c, None]


@pytest.mark.pure
@pytest.mark.spec("PREF-12", "PREF-13")
@pytest.mark.parametrize(("calls", "expected"), [("aabb", "bb--"), ("abac", "bcb-")])
def test_unit_called_twice_keeps_the_successor_of_its_first_call_without_warning(calls: str, expected: str) -> None:
    by_name = dict(zip("abc", units(3), strict=True))
    order = [by_name[name] for name in calls]
    assert recorded(*order).forward(*order) == [by_name.get(name) for name in expected]


@pytest.mark.pure
@pytest.mark.spec("PREF-13")
def test_units_in_another_order_give_one_warning_with_both_names() -> None:
    a, b, c = units(3)
    root = recorded(a, b, c)
    with pytest.warns(UserWarning, match="'1' runs where '0' was expected") as caught:
        assert root.forward(b, a, c) == [c, b, None]
    root.backward()
    assert root.forward(c) == [None]
    assert len(caught) == 1
    assert "forward_prefetch off" in str(caught[0].message)


@pytest.mark.pure
@pytest.mark.spec("PREF-13")
@pytest.mark.parametrize("num_recorded", [1, 2])
def test_unit_missing_in_the_first_iteration_gives_a_warning_and_no_prefetch(num_recorded: int) -> None:
    *before, new = units(num_recorded + 1)
    root = recorded(*before)
    assert root.forward(before[0]) == [None if num_recorded == 1 else before[1]]
    expected = "none" if num_recorded == 1 else "1"
    with pytest.warns(UserWarning, match=f"'{num_recorded}' runs where '{expected}' was expected"):
        assert root.forward(new) == [None]
