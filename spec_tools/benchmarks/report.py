"""Makes tables from the laps.

Each workload has one table with a line for each contender. The columns:

=================  =======================================================================================
``ms``             median time of a step on rank 0
``/ best torch``   median of the paired ratios to the fastest FSDP of torch in this workload, and quartiles
``/ peer``         the same, to the FSDP of torch that has the same features
``CPU ms``         median CPU time of a step, all threads of rank 0
``calls/unit``     Python functions entered in a step, above ``single``, divided by the number of units
``MiB asked``      bytes that rank 0 would send with textbook algorithms
``MiB inside``     hybrid only: the all-gathers and reduce-scatters of these, which stay in a shard group
``MiB between``    hybrid only: the others, which are sent between the groups
``MiB wired``      bytes that its sockets have sent
``rest MiB``       live tensors between two steps
``compute MiB``    maximum in forward and backward; for minifsdp, with the ratio to `minifsdp_tools`
``peak MiB``       the same for the whole step, including the optimizer
=================  =======================================================================================

The fastest FSDP of torch is the one with the lowest median. If several are equally fast, this choice favors torch a
little. The opposite choice would favor minifsdp.

`where_the_time_goes` shows the parts of a step for a few workloads: the wall-clock time of each part in milliseconds,
and how much of it the Python thread did not compute.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spec_tools.benchmarks.contenders import CONTENDERS
from spec_tools.benchmarks.race import PARTS, Outcome
from spec_tools.benchmarks.workloads import WORKLOADS

__all__ = [
    "TAKEN_APART",
    "Quartiles",
    "best_torch",
    "calls_per_unit",
    "paired",
    "parts",
    "table",
    "where_the_time_goes",
]

BY_NAME = {contender.name: contender for contender in CONTENDERS}
TIMES = ("", "ms", "/ best torch", "/ peer", "CPU ms", "calls/unit")
HEAD = (*TIMES, "MiB asked", "MiB wired", "rest MiB", "compute MiB", "peak MiB")
LINKS = ("MiB inside", "MiB between")
TAKEN_APART = ("tiny", "gpt", "gpt-bf16")


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of some numbers."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, numbers: Iterable[float]) -> Quartiles:
        """From at least one number."""
        values = list(numbers)
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}-{self.high:.2f}]"


def paired(mine: Outcome, other: Outcome) -> Quartiles:
    """The ratios of steps in the same round."""
    return Quartiles.of(a.wall / b.wall for a, b in zip(mine.laps, other.laps, strict=True))


def best_torch(outcomes: Sequence[Outcome]) -> Outcome:
    """The FSDP of torch with the lowest median."""
    theirs = [outcome for outcome in outcomes if outcome.contender.startswith("torch ")]
    return min(theirs, key=lambda outcome: statistics.median(lap.wall for lap in outcome.laps))


def calls_per_unit(workload: str, outcomes: Sequence[Outcome], mine: Outcome) -> float:
    """The number of Python calls that a unit adds to a step."""
    plain = next(outcome for outcome in outcomes if outcome.contender == "single")
    return (mine.calls - plain.calls) / WORKLOADS[workload].num_units


def table(workload: str, outcomes: Sequence[Outcome]) -> list[str]:
    """A Markdown table, from the outcomes of rank 0. It is also readable as plain text."""
    head, rows = HEAD, [_row(workload, outcomes, outcome) for outcome in outcomes]
    if WORKLOADS[workload].is_hybrid:
        head = _beside_asked(HEAD, LINKS)
        rows = [_beside_asked(row, _links(outcome)) for row, outcome in zip(rows, outcomes, strict=True)]
    return _lines(head, rows)


def parts(mine: Outcome) -> dict[str, dict[str, float]]:
    """Median milliseconds of each part of a step: ``wall``; ``waits``, in which the Python thread does not compute; and
    ``others``, CPU time of all other threads, which send and receive."""
    found = {}
    for part in PARTS:
        times = [getattr(lap, part) for lap in mine.laps]
        seconds = {
            "wall": [one.wall for one in times],
            "waits": [one.wall - one.thread for one in times],
            "others": [one.process - one.thread for one in times],
        }
        found[part] = {name: round(1000 * statistics.median(values), 2) for name, values in seconds.items()}
    return found


def where_the_time_goes(results: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """Parts of steps of `TAKEN_APART`, for the plain model, torch's fastest FSDP and minifsdp, from rank 0."""
    head = ["workload", "contender", *(word for part in PARTS for word in (part, "waits")), "other threads"]
    rows = []
    for workload in [name for name in TAKEN_APART if name in results]:
        best = best_torch(results[workload])
        for mine in results[workload]:
            if mine is best or mine.contender == "single" or mine.contender.startswith("minifsdp"):
                found = parts(mine)
                cells = [f"{found[part][what]:.1f}" for part in PARTS for what in ("wall", "waits")]
                others = sum(found[part]["others"] for part in PARTS)
                rows.append((f"`{workload}`", mine.contender, *cells, f"{others:.1f}"))
    return _lines(head, rows) if rows else []


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ("-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:]))
    return [_line(row, widths) for row in (head, rule, *rows)]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    return " | ".join(["| " + first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"


def _beside_asked(row: tuple[str, ...], cells: tuple[str, ...]) -> tuple[str, ...]:
    place = HEAD.index("MiB asked") + 1
    return row[:place] + cells + row[place:]


def _links(mine: Outcome) -> tuple[str, ...]:
    return f"{mine.inside / 2**20:.2f}", f"{(mine.asked - mine.inside) / 2**20:.2f}"


def _row(workload: str, outcomes: Sequence[Outcome], mine: Outcome) -> tuple[str, ...]:
    contender = BY_NAME[mine.contender]
    peer = next((outcome for outcome in outcomes if outcome.contender == contender.peer), None)
    return (
        mine.contender,
        f"{1000 * statistics.median(lap.wall for lap in mine.laps):.1f}",
        str(paired(mine, best_torch(outcomes))),
        "" if peer is None else str(paired(mine, peer)),
        f"{1000 * statistics.median(lap.whole.process for lap in mine.laps):.1f}",
        f"{calls_per_unit(workload, outcomes, mine):.0f}",
        f"{mine.asked / 2**20:.2f}",
        f"{mine.wired / 2**20:.2f}",
        f"{mine.between_steps / 2**20:.2f}",
        _beside_the_price(mine.computing, mine.priced_computing),
        _beside_the_price(mine.peak, mine.priced),
    )


def _beside_the_price(num_bytes: int, priced: int) -> str:
    return f"{num_bytes / 2**20:.2f}" + (f" ({num_bytes / priced:.2f})" if priced else "")
