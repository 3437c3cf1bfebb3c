"""One benchmark for each workload and contender.

pytest-benchmark wants to call a function and to time it here, in this process. But a step is taken by two other
processes, in a race with the steps of others, and what counts is what the clock of rank 0 has shown there. So the
benchmark is given a clock of its own, which stands still unless the benchmarked function turns it on, by what was
measured. All of pytest-benchmark (statistics, storage, comparison with an earlier run) then works on the very laps of
the race; nothing of this process is timed.

A clock is not asserted on: a busy machine is no defect. What is asserted are right losses, without which there is no
race (see ``race.py``), and the figures that any machine must find.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from spec_tests.benchmarks.contenders import CONTENDERS
from spec_tests.benchmarks.race import Outcome
from spec_tests.benchmarks.report import best_torch, calls_per_unit, paired, parts
from spec_tests.benchmarks.workloads import WORKLOADS

# Bytes that gloo writes beside what a collective sends, at most: 150 were counted.
AROUND_A_PIECE = 192

Race = Callable[[str], list[list[Outcome]]]


class RecordedClock:
    """Shows the time of a race that is over."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ahead: list[float] = []

    def __call__(self) -> float:
        return self.now

    def load(self, seconds: list[float]) -> None:
        """What the next turns will take."""
        self._ahead = list(reversed(seconds))

    def turn(self) -> None:
        """Goes on by the next lap."""
        self.now += self._ahead.pop()


CLOCK = RecordedClock()


def recorded_clock() -> float:
    """A function, because pytest-benchmark stores the name of its clock."""
    return CLOCK()


PAIRS = [
    pytest.param(workload, contender, id=f"{workload.name}-{contender.name.replace(' ', '-')}")
    for workload in WORKLOADS.values()
    for contender in CONTENDERS
    if contender.runs(workload)
]
OURS = [pair for pair in PAIRS if pair.values[1].peer is not None]  # type: ignore[attr-defined]


@pytest.mark.benchmark(timer=recorded_clock)
@pytest.mark.parametrize(("workload", "contender"), PAIRS)
def test_a_step(benchmark: Any, race: Race, workload: Any, contender: Any) -> None:
    by_rank = race(workload.name)
    mine, *others = (_of(outcomes, contender.name) for outcomes in by_rank)
    benchmark.group = workload.name
    benchmark.extra_info.update(_extra(workload.name, by_rank[0], mine))
    benchmark.extra_info["medians_of_other_ranks"] = [statistics.median(lap.wall for lap in r.laps) for r in others]
    CLOCK.load([lap.wall for lap in mine.laps])
    benchmark.pedantic(CLOCK.turn, rounds=len(mine.laps))


def _of(outcomes: list[Outcome], name: str) -> Outcome:
    return next(outcome for outcome in outcomes if outcome.contender == name)


def _extra(workload: str, outcomes: list[Outcome], mine: Outcome) -> dict[str, Any]:
    """Everything else that was measured, for the stored JSON."""
    rest = asdict(mine)
    del rest["laps"]
    best = best_torch(outcomes)
    return {
        **rest,
        "parts": parts(mine),
        "calls_per_unit": calls_per_unit(workload, outcomes, mine),
        "best_torch": best.contender,
        "ratio_to_best_torch": asdict(paired(mine, best)),
        "laps_of_best_torch": [lap.wall for lap in best.laps],
    }


@pytest.mark.parametrize(("workload", "contender"), OURS)
def test_ours_enters_fewer_python_functions_than_its_peer(race: Race, workload: Any, contender: Any) -> None:
    outcomes = race(workload.name)[0]
    assert _of(outcomes, contender.name).calls < _of(outcomes, contender.peer).calls


@pytest.mark.parametrize(("workload", "contender"), OURS)
def test_ours_sends_no_more_than_its_peer(race: Race, workload: Any, contender: Any) -> None:
    outcomes = race(workload.name)[0]
    ours, theirs = _of(outcomes, contender.name), _of(outcomes, contender.peer)
    assert ours.asked <= theirs.asked
    # Barriers and acknowledgements of gloo are in what the kernel has counted.
    assert ours.wired <= 1.01 * theirs.wired + 4096
    assert ours.wired <= 1.05 * ours.asked + AROUND_A_PIECE * sum(ours.collectives.values())


@pytest.mark.parametrize(("workload", "contender"), OURS)
def test_ours_needs_no_more_memory(race: Race, workload: Any, contender: Any) -> None:
    outcomes = race(workload.name)[0]
    ours, theirs = _of(outcomes, contender.name), _of(outcomes, contender.peer)
    # Between two steps nothing is on its way.
    assert ours.resting <= 1.001 * theirs.resting
    # What is in flight while the next unit computes takes no more than gloo's copies do where torch waits on the spot.
    # One activation more may be there at that moment.
    assert ours.computing <= 1.005 * theirs.computing
    assert ours.peak <= 1.005 * theirs.peak


@pytest.mark.parametrize(("workload", "contender"), OURS)
def test_ours_needs_what_the_calculator_says(race: Race, workload: Any, contender: Any) -> None:
    ours = _of(race(workload.name)[0], contender.name)
    assert ours.computing <= 1.02 * ours.priced_computing
    assert ours.peak <= 1.02 * ours.priced
