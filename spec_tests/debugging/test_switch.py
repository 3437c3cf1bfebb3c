"""Switching checks on and off. A check that is off has no effect."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import minifsdp
from minifsdp.checks.rank_checks import RankChecks
from minifsdp.debugging import switch
from minifsdp.debugging.attach import attached
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.hooks import IterationState
from minifsdp.engine.per_param import PerParameterLayout
from minifsdp.engine.root import RootState
from minifsdp.engine.unit import Unit
from minifsdp.fsdp1.wrapper import Wrapper
from minifsdp.fsdp2 import fully_shard
from minifsdp.fsdp2.fsdp_state import FSDPState
from spec_tests.costs.count_calls import calls_by_file
from spec_tests.debugging.faults import said
from spec_tests.harness import ranks
from spec_tests.harness.checkout import is_of_package
from spec_tests.models.apis import Api, all_apis
from spec_tests.models.running import batch, iterate
from spec_tests.models.values import assert_same, full_values

ALL = {"weights", "values", "order", "meta", "memory"}
CLASSES = (RootState, IterationState, Unit, FlatLayout, PerParameterLayout, Wrapper, FSDPState, nn.Module)


def on() -> set[str]:
    return set(switch._running)


@pytest.mark.pure
@pytest.mark.spec("DEBUG-01")
def test_debug_checks_stay_on_until_the_last_call_ends() -> None:
    everything = minifsdp.debug()
    assert on() == ALL
    everything.off()
    everything.off()
    assert on() == set()
    with minifsdp.debug("values", "order"):
        inner = minifsdp.debug("values")
        with minifsdp.debug("meta", "values"):
            assert on() == {"values", "order", "meta"}
        assert on() == {"values", "order"}
    assert on() == {"values"}
    inner.off()
    assert on() == set()


class Observed:
    """A class with a method that checks observe."""

    def method(self) -> None:
        """Does nothing."""


@pytest.mark.pure
@pytest.mark.spec("DEBUG-01", "DEBUG-03")
def test_a_check_that_ends_first_leaves_the_later_one_on() -> None:
    original, seen = Observed.method, list[str]()
    first, second = (attached(Observed, "method", lambda *_, name=name: seen.append(name)) for name in "ab")
    first.__enter__()
    with second:
        first.__exit__(None, None, None)
        Observed().method()
    assert seen == ["b"]
    assert Observed.method is original


@pytest.mark.pure
@pytest.mark.spec("DEBUG-01")
def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"\['nans'\]; the available checks are weights, values, order, meta, memory"):
        minifsdp.debug("order", "nans")
    assert on() == set()


@pytest.mark.pure
@pytest.mark.spec("DEBUG-02")
@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", ALL), ("", set()), ("0", set()), ("values", {"values"}), (" values, order ", {"values", "order"})],
)
def test_environment_selects_debug_checks(text: str, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIFSDP_DEBUG", text)
    made: list[switch.Debugging] = []
    monkeypatch.setattr(switch, "debug", lambda *checks: made.append(minifsdp.debug(*checks)))
    switch.from_environment()
    found = on()
    for one in made:
        one.off()
    assert found == expected


@pytest.mark.pure
@pytest.mark.spec("DEBUG-02")
def test_the_environment_is_read_when_the_package_is_imported() -> None:
    program = "import minifsdp; from minifsdp.debugging import switch; print(*switch._running)"
    environment = {**os.environ, "MINIFSDP_DEBUG": "order,meta"}
    reported = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert reported.stdout.split() == ["order", "meta"]


@pytest.mark.pure
@pytest.mark.spec("DEBUG-03")
@pytest.mark.parametrize("leaves_early", [False, True])
def test_switched_off_debug_mode_restores_all_classes(leaves_early: bool) -> None:
    before = everything_of_classes()
    look = fully_shard.compare_while_debugging
    first, second = minifsdp.debug("weights", "values"), minifsdp.debug()
    assert everything_of_classes() != before
    assert RankChecks.is_strict
    for one in (first, second) if leaves_early else (second, first):
        one.off()
    assert everything_of_classes() == before
    assert fully_shard.compare_while_debugging is look
    assert not RankChecks.is_strict


def everything_of_classes() -> list[dict[str, int]]:
    return [{name: id(value) for name, value in vars(one).items() if callable(value)} for one in CLASSES]


@pytest.mark.spec("DEBUG-03")
@all_apis
@ranks(2)
def test_debug_mode_adds_no_calls_to_steps_after_it_ends(api: Api) -> None:
    model = api.shard()
    iterate(model)
    iterate(model)

    def calls() -> dict[str, int]:
        found = calls_by_file(lambda: iterate(model))
        return {path: number for path, number in found.items() if is_of_package(path)}

    before = calls()
    with minifsdp.debug("values", "order"):
        iterate(model)
        during = calls()
    # Checks shift the position of later collectives. Ranks compare a collective once at each new position.
    iterate(model)
    iterate(model)
    assert calls() == before
    assert sum(during.values()) > sum(before.values())


@pytest.mark.spec("DEBUG-11")
@all_apis
@ranks(2)
def test_healthy_model_prints_nothing_and_keeps_its_values(api: Api) -> None:
    found: list[Any] = []
    for checks in (False, True):
        with said() as texts, minifsdp.debug() if checks else contextlib.nullcontext():
            model = api.shard()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            losses = [iterate(model, step, optimizer) for step in range(3)]
            found.append((losses, full_values(model)))
        assert texts == []
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1], bitwise=True)


@pytest.mark.spec("DEBUG-10")
@pytest.mark.parametrize("check", ["weights", "meta"])
@all_apis
@ranks(2)
def test_late_debug_check_warns_once(api: Api, check: str) -> None:
    model = api.shard()
    with minifsdp.debug(check):
        with said() as texts:
            iterate(model)
        assert len(texts) == 1
        assert f"the check '{check}' was turned on after these units" in texts[0]
        assert "'the root'" in texts[0]
        assert "'blocks.3'" in texts[0]
        with said() as texts:
            iterate(model)
            api.shard()(batch())
        assert texts == []
