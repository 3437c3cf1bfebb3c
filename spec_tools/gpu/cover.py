"""The order of the tests: each test adds a requirement that has no proof on CUDA yet, until none is left.

A *greedy cover* takes the test with the most missing requirements, then the one with the next most, and so on. Of two
tests with equally many, it takes the one on fewer ranks, and then the shorter one. Requirements come in this order:

1. those of tests that need a GPU, and those marked ``[cuda]``;
2. those about streams, because a CPU has none;
3. all others;
4. those that were proven with other code, see `spec_tools.gpu.code`.

Example: test ``a`` shows 1 and 2, ``b`` shows 2 and 3, ``c`` shows 3. The order is ``a``, ``c`` if ``c`` is shorter
than ``b``, and otherwise ``a``, ``b``. The test that is left over is another variant.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_tools.gpu.code import ROOT


@dataclass(frozen=True)
class Case:
    """A test or a task in the order of a run.

    Attributes:
        name: its name.
        rows: the requirements that it shows.
        num_ranks: the number of its ranks; 0 if it runs without ranks.
        seconds: how long it is expected to take.
        is_for_gpus: whether it needs a GPU.
    """

    name: str
    rows: tuple[str, ...] = ()
    num_ranks: int = 0
    seconds: float = 0.0
    is_for_gpus: bool = False

    @property
    def uses_device(self) -> bool:
        """Whether it shows something about the device. A test without ranks usually computes on the CPU."""
        return self.is_for_gpus or self.num_ranks > 0


def in_order(
    cases: Sequence[Case], proven: set[str], older: set[str], of_cuda: set[str]
) -> tuple[list[Case], list[Case]]:
    """The tests that each add a requirement, and the others, which are other variants.

    Args:
        cases: all tests.
        proven: requirements that need no test any more.
        older: those of them that were proven with other code.
        of_cuda: requirements that can only be shown completely on CUDA.
    """
    using = [case for case in cases if case.uses_device]
    of_gpus = [case for case in using if case.is_for_gpus]
    missing = rows_of(using) - proven
    chosen = list(_cover(of_gpus, missing, rows_of(of_gpus)))
    for wanted in (of_cuda, {row for row in missing if row.startswith("STREAM-")}, missing):
        chosen += _cover(using, missing, wanted)
    chosen += _cover(using, older - rows_of(chosen), older)
    taken = {case.name for case in chosen}
    others = [case for case in cases if case.name not in taken]
    return chosen, sorted(others, key=lambda case: (not case.is_for_gpus, not case.uses_device))


def rows_of(cases: Iterable[Case]) -> set[str]:
    """The requirements of these tests."""
    return {row for case in cases for row in case.rows}


def _cover(cases: Sequence[Case], missing: set[str], wanted: set[str]) -> Iterator[Case]:
    """Tests until no wanted requirement is missing. Removes their requirements from ``missing``."""
    heap = [(-len(case.rows), case.num_ranks, case.seconds, number) for number, case in enumerate(cases)]
    heapq.heapify(heap)
    while heap and wanted & missing:
        gain, _, _, number = heapq.heappop(heap)
        case = cases[number]
        new = missing.intersection(case.rows)
        if not new & wanted:
            continue
        if -gain > len(new):
            # Others that were chosen meanwhile show some of its requirements.
            heapq.heappush(heap, (-len(new), case.num_ranks, case.seconds, number))
            continue
        missing.difference_update(case.rows)
        yield case


def in_time(cases: Iterable[Case], until: float, clock: Callable[[], float] = time.time) -> Iterator[Case]:
    """The cases that are expected to end before ``until``; a later short one can take the place of a long one."""
    for case in cases:
        now = clock()
        if now >= until:
            return
        if now + case.seconds <= until:
            yield case


RECORD = ROOT / "docs" / "data" / "gpu.json"


def record() -> dict[str, Any]:
    """The record of earlier runs: a list of runs, and the requirements by ID."""
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


# The guesses until a run has measured them, in seconds: for a test by its number of ranks, and for a task by its stage.
GUESSES = {"0": 0.1, "1": 0.3, "2": 0.6, "4": 1.2, "hardware": 6.0, "collectives": 1.0, "steps": 15.0, "races": 5.0}


def known_seconds(record: Mapping[str, Any]) -> dict[str, float]:
    """The seconds of tests and tasks in earlier runs, and the median of the tests on each number of ranks."""
    found = dict(GUESSES)
    for run in record["runs"]:
        found |= run.get("seconds", {})
    return found | {row["test"]: row["seconds"] for row in record["rows"].values()}
