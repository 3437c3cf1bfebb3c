"""Records the figures as a section of a page: date, machine and versions of the run, and the tables.

The data of the page's pictures (see ``docs_build/drawing/races.py``) is recorded at the same time, in a separate file.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import minifsdp
from spec_tools.benchmarks.race import Outcome
from spec_tools.benchmarks.report import TAKEN_APART, best_torch, paired, parts, table, where_the_time_goes
from spec_tools.benchmarks.workloads import NODES, WORKLOADS

__all__ = ["DATA", "PAGE", "circumstances", "for_pictures", "record", "sections"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
DATA = PAGE.parent / "data" / "benchmarks.json"
CURVES_OF = "gpt"
BEGIN, END = "<!-- recorded: begin -->\n", "<!-- recorded: end -->\n"


def circumstances(seconds: float) -> list[str]:
    """The machine, the versions and other facts about the run, one line each.

    Args:
        seconds: duration of the run.
    """
    one, _, fifteen = os.getloadavg()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    today = datetime.now(UTC).date()
    return [
        f"* recorded {today}, in {seconds / 60:.1f} minutes",
        f"* {_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}; no GPU used",
        f"* load average at the end {one:.1f}, over the last 15 minutes {fifteen:.1f}. Each rank has one "
        "thread and causes a load of about 1; the rest of the load comes from other programs",
        f"* torch {torch.__version__}, Python {platform.python_version()}, minifsdp {minifsdp.__version__}; gloo",
    ]


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def sections(results: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """A heading and a table for each workload, and the parts of a step for some, from the outcomes of rank 0."""
    lines: list[str] = []
    for name, outcomes in results.items():
        workload = WORKLOADS[name]
        extras = [workload.strategy]
        if workload.is_hybrid:
            extras.append(f"{workload.num_ranks} ranks, {NODES} groups of {workload.num_ranks // NODES}")
        if workload.prefetch:
            extras.append("each unit prefetches the next unit in forward")
        if workload.bf16:
            extras.append("bfloat16")
        if workload.accumulate > 1:
            extras.append(f"{workload.accumulate} micro-batches, `no_sync` in all but the last")
        distance = max(outcome.difference for outcome in outcomes)
        lines += [
            f"### `{name}`: {workload.about}; {', '.join(extras)}",
            "",
            f"{len(outcomes[0].laps)} rounds. Largest relative difference of a loss to one process: {distance:.0e}.",
            "",
            *table(name, outcomes),
            "",
        ]
    apart = where_the_time_goes(results)
    return [*lines, "### Where the time goes", "", *apart, ""] if apart else lines


def for_pictures(results: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """The ratios to torch's fastest FSDP in all workloads, parts of a step, and memory over a step of one, in MiB."""
    return {
        "ratios": {name: _ratios(outcomes) for name, outcomes in results.items()},
        "parts": {
            name: {mine.contender: parts(mine) for mine in results[name]} for name in TAKEN_APART if name in results
        },
        "memory": {outcome.contender: _curve(outcome) for outcome in results.get(CURVES_OF, [])},
    }


def _ratios(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    best = best_torch(outcomes)
    quartiles = {outcome.contender: asdict(paired(outcome, best)) for outcome in outcomes}
    return {name: {which: round(ratio, 3) for which, ratio in three.items()} for name, three in quartiles.items()}


def _curve(outcome: Outcome) -> list[list[float]]:
    return [[round(moment, 4), round(size / 2**20, 2)] for moment, size in outcome.curve]


def record(results: Mapping[str, Sequence[Outcome]], seconds: float, page: Path = PAGE, data: Path = DATA) -> None:
    """Replaces the figures on the page and the data of its pictures.

    Raises:
        ValueError: the page has no section for the figures.
    """
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN.strip()!r} and {END.strip()!r} to write the figures between")
    reported = circumstances(seconds)
    lines = [*reported, "", *sections(results)]
    page.write_text(before + begin + "\n" + "\n".join(lines) + "\n" + end + after)
    data.write_text(json.dumps({"circumstances": reported, **for_pictures(results)}) + "\n")
