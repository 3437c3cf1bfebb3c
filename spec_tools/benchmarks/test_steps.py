"""One benchmark for each workload and contender.

pytest-benchmark calls a function and times it in this process. But a step runs in two other processes, in a race with
the steps of other contenders, and the result is the time on rank 0. So the benchmark uses a clock of its own. It only
advances when the benchmarked function runs, by the measured time of the next lap. So all features of pytest-benchmark
(statistics, storage, comparison with an earlier run) use the laps of the race, and nothing in this process is timed.

Tests do not assert on times, because they depend on the load of the machine. They assert on figures that must be the
same on any machine. The race itself checks the losses (see ``race.py``).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from spec_tools.benchmarks.contenders import CONTENDERS
from spec_tools.benchmarks.race import Outcome
from spec_tools.benchmarks.report import best_torch, calls_per_unit, paired, parts
from spec_tools.benchmarks.workloads import WORKLOADS

# Upper bound of the bytes that gloo sends in addition to the data of a collective; 150 were measured.
AROUND_A_PIECE = 192

Race = Callable[[str], list[list[Outcome]]]


class RecordedClock:
    """A clock that replays the times of a finished race."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ahead: list[float] = []

    def __call__(self) -> float:
        return self.now

    def load(self, seconds: list[float]) -> None:
        """Sets the times of the next turns."""
        self._ahead = list(reversed(seconds))

    def turn(self) -> None:
        """Advances by the next lap."""
        self.now += self._ahead.pop()


CLOCK = RecordedClock()


def recorded_clock() -> float:
    """The time of `CLOCK`. A function, because pytest-benchmark stores the name of its clock."""
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
    """All other measurements, for the stored JSON."""
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
def test_minifsdp_enters_fewer_python_functions_than_torch(race: Race, workload: Any, contender: Any) -> None:
    outcomes = race(workload.name)[0]
    assert _of(outcomes, contender.name).calls < _of(outcomes, contender.peer).calls


@pytest.mark.parametrize(("workload", "contender"), OURS)
def test_minifsdp_sends_no_more_bytes_than_torch(race: Race, workload: Any, contender: Any) -> None:
    outcomes = race(workload.name)[0]
    ours, theirs = _of(outcomes, contender.name), _of(outcomes, contender.peer)
    assert ours.asked <= theirs.asked
    # The counts of the kernel include barriers and acknowledgements of gloo.
    assert ours.wired <= 1.01 * theirs.wired + 4096
    assert ours.wired <= 1.05 * ours.asked + AROUND_A_PIECE * sum(ours.collectives.values())


@pytest.mark.parametrize(("workload", "contender"), OURS)
def test_minifsdp_needs_no_more_memory_than_torch(race: Race, workload: Any, contender: Any) -> None:
    outcomes = race(workload.name)[0]
    ours, theirs = _of(outcomes, contender.name), _of(outcomes, contender.peer)
    # No communication is in flight between two steps.
    assert ours.between_steps <= 1.001 * theirs.between_steps
    # Buffers in flight while the next unit computes need no more memory than gloo's copies when torch waits at once.
    # There may be one more activation at that moment.
    assert ours.computing <= 1.005 * theirs.computing
    assert ours.peak <= 1.005 * theirs.peak


@pytest.mark.parametrize(("workload", "contender"), OURS)
def test_minifsdp_stays_within_calculated_memory(race: Race, workload: Any, contender: Any) -> None:
    ours = _of(race(workload.name)[0], contender.name)
    assert ours.computing <= 1.02 * ours.priced_computing
    assert ours.peak <= 1.02 * ours.priced
