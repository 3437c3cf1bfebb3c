"""The recorded figures: when, where and with what they were measured, and the tables, as a part of a page."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

import minifsdp
from spec_tests.benchmarks.race import Outcome
from spec_tests.benchmarks.report import table
from spec_tests.benchmarks.workloads import NODES, WORKLOADS

__all__ = ["PAGE", "circumstances", "record", "sections"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- recorded: begin -->\n", "<!-- recorded: end -->\n"


def circumstances(seconds: float) -> list[str]:
    """Where and with what, one line each.

    Args:
        seconds: that the run took.
    """
    one, _, fifteen = os.getloadavg()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    today = datetime.now(UTC).date()
    return [
        f"* recorded {today}, in {seconds / 60:.1f} minutes",
        f"* {_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}; no GPU used",
        f"* load average at the end {one:.1f}, over the last 15 minutes {fifteen:.1f}: ranks of one thread each make "
        "about as much as there are of them, what is above that was somebody else",
        f"* torch {torch.__version__}, Python {platform.python_version()}, minifsdp {minifsdp.__version__}; gloo",
    ]


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def sections(results: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """A heading and a table for each workload; of rank 0's outcomes."""
    lines: list[str] = []
    for name, outcomes in results.items():
        workload = WORKLOADS[name]
        extras = [workload.strategy]
        if workload.is_hybrid:
            extras.append(f"{workload.num_ranks} ranks, {NODES} groups of {workload.num_ranks // NODES}")
        if workload.prefetch:
            extras.append("each unit told in forward which one comes next")
        if workload.bf16:
            extras.append("bfloat16")
        if workload.accumulate > 1:
            extras.append(f"{workload.accumulate} micro-batches, `no_sync` but for the last")
        distance = max(outcome.difference for outcome in outcomes)
        lines += [
            f"### `{name}`: {workload.about}; {', '.join(extras)}",
            "",
            f"{len(outcomes[0].laps)} rounds. Largest relative distance of a loss from one process: {distance:.0e}.",
            "",
            *table(name, outcomes),
            "",
        ]
    return lines


def record(results: Mapping[str, Sequence[Outcome]], seconds: float, page: Path = PAGE) -> None:
    """Replaces the figures on the page.

    Raises:
        ValueError: the page has no place for them.
    """
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN.strip()!r} and {END.strip()!r} to write the figures between")
    lines = [*circumstances(seconds), "", *sections(results)]
    page.write_text(before + begin + "\n" + "\n".join(lines) + "\n" + end + after)
