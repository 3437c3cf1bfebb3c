"""Checks that the intact engine gives no findings, and that each broken engine is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spec_tests.streams import engines
from spec_tests.streams.engines import Break, Outcome
from spec_tests.streams.programs import PROGRAMS
from spec_tools.stream_breaks.breaks import BREAKS, ROWS, SCHEDULES, unbroken
from spec_tools.stream_breaks.broken import failures, gathers, host, memory, reductions

Run = tuple[str, Break | None]
"""A program, and the engine that it runs on; ``None`` for the intact one."""


def execute(program: str, one: Break | None) -> Outcome:
    if one is None:
        return engines.run(program, num_schedules=SCHEDULES)
    with engines.broken(one) as folder:
        return engines.run(program, folder)


def rows_of(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.spec(row) for row, names in ROWS.items() if name in names]


def runs_of(item: Any) -> list[Run]:
    """The runs that a test of this file needs."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if "name" in params:
        one = BREAKS[params["name"]]
        return [(one.program, None), (one.program, one)]
    return [(params["program"], None)] if "program" in params else []


@pytest.fixture(scope="module")
def outcome_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str, Break | None], Outcome]]:
    """Returns the outcome of a run. Two threads start the runs ahead of the tests, in their order."""
    items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
    wanted = dict.fromkeys(run for item in items for run in runs_of(item))
    executor = ThreadPoolExecutor(2)
    futures = {run: executor.submit(execute, *run) for run in wanted}
    yield lambda program, one: futures[program, one].result()
    executor.shutdown(cancel_futures=True)


@pytest.mark.accelerator
@pytest.mark.simulated
@pytest.mark.spec("SIM-07")
@pytest.mark.parametrize("program", PROGRAMS)
def test_unchanged_engine_gives_no_error_and_no_race(program: str, outcome_of: Any) -> None:
    outcome = outcome_of(program, None)
    assert outcome.error is None
    assert outcome.races == []
    assert outcome.different == []


@pytest.mark.accelerator
@pytest.mark.simulated
@pytest.mark.spec("SIM-07")
@pytest.mark.parametrize("name", [pytest.param(name, marks=rows_of(name)) for name in BREAKS])
def test_each_broken_engine_is_found(name: str, outcome_of: Any) -> None:
    one = BREAKS[name]
    found = engines.findings(outcome_of(one.program, one), outcome_of(one.program, None))
    assert one.by in found, f"{one.what} {one.program} should notice by {one.by}, and notices: {found or 'nothing'}"


def test_each_stream_ordering_line_is_broken_by_some_mutant() -> None:
    assert unbroken() == []


def test_there_are_at_least_sixty_broken_engines_and_their_names_differ() -> None:
    assert {name for names in ROWS.values() for name in names} <= set(BREAKS)
    assert len(BREAKS) >= 60
    assert len(BREAKS) == sum(len(one.BREAKS) for one in (gathers, reductions, memory, host, failures))
