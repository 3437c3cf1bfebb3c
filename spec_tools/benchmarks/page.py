"""The report: tables for the terminal and the pages, and the records that the pages read.

=============================  ===============================================
``docs/benchmarks.md``         tables of steps, between two marks
``docs/data/benchmarks.json``  the ratios and peaks of that page
``docs/data/debug-cost.json``  steps and starts with checks
``docs/data/optimizer.json``   optimizers
=============================  ===============================================

The columns of a table of steps:

=================  =======================================================================================
``ms``             median time of a step on rank 0
``/ best torch``   divided by the median of the fastest FSDP of torch in this workload, and quartiles
``/ peer``         divided by the median of the FSDP of torch that has the same features
``CPU ms``         mean CPU time of a step, all threads of rank 0
``calls/unit``     Python functions entered in a step, above ``single``, divided by the number of units
``MiB asked``      bytes that rank 0 would send with textbook algorithms
``MiB inside``     the all-gathers and reduce-scatters of these; a hybrid strategy sends the others between groups
``MiB wired``      bytes that its sockets have sent
``rest MiB``       live tensors between two steps
``peak MiB``       maximum in a step
=================  =======================================================================================
"""

from __future__ import annotations

import itertools
import json
import os
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import minifsdp
from spec_tools.benchmarks.checks import APIS
from spec_tools.benchmarks.contenders import CONTENDERS
from spec_tools.benchmarks.optimizers import MODEL
from spec_tools.benchmarks.workloads import WORKLOADS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
DATA = PAGE.parent / "data"
PEAKS_OF = "gpt"
BEGIN, END = "<!-- recorded: begin -->\n", "<!-- recorded: end -->\n"
HEAD = (
    "",
    "ms",
    "/ best torch",
    "/ peer",
    "CPU ms",
    "calls/unit",
    "MiB asked",
    "MiB inside",
    "MiB wired",
    "rest MiB",
    "peak MiB",
)

Results = dict[str, Any]  # the JSON of pytest-benchmark
ByContender = dict[str, dict[str, Any]]


def circumstances(seconds: float) -> list[str]:
    """The machine, the versions and other facts about a run of this duration, one line each."""
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


def _steps(results: Results) -> dict[str, ByContender]:
    """The benchmarks of steps by workload and contender, without workloads of which only a part was measured."""
    found: dict[str, ByContender] = {}
    for one in results["benchmarks"]:
        if one["group"] in WORKLOADS:
            found.setdefault(one["group"], {})[one["extra_info"]["contender"]] = one
    return {name: steps for name, steps in found.items() if all(of in steps for of in _taking_part(name))}


def _taking_part(workload: str) -> list[str]:
    return [name for name, contender in CONTENDERS.items() if contender.runs(WORKLOADS[workload])]


def ratios(found: ByContender) -> dict[str, dict[str, float]]:
    """Median and quartiles of each contender of a workload, divided by the median of torch's fastest FSDP."""
    best = min(one["stats"]["median"] for name, one in found.items() if name.startswith("torch "))
    quartiles = {"low": "q1", "median": "median", "high": "q3"}
    return {
        name: {kind: round(one["stats"][of] / best, 3) for kind, of in quartiles.items()} for name, one in found.items()
    }


def sections(results: Results) -> list[str]:
    """A heading and a Markdown table for each workload."""
    lines = []
    for name, found in _steps(results).items():
        workload = WORKLOADS[name]
        difference = max(one["extra_info"]["difference"] for one in found.values())
        rounds = next(iter(found.values()))["stats"]["rounds"]
        lines += [
            f"### `{name}`: {workload.about}; {', '.join(workload.settings())}",
            "",
            f"{rounds} steps. Largest relative difference of a loss to one process: {difference:.0e}.",
            "",
            *(f"| {' | '.join(cells)} |" for cells in _rows(name, found)),
            "",
        ]
    return lines


def _rows(workload: str, found: ByContender) -> Iterator[tuple[str, ...]]:
    yield HEAD
    yield ("---", *("--:" for _ in HEAD[1:]))
    of_torch = ratios(found)
    for name, one in found.items():
        extra, median = one["extra_info"], one["stats"]["median"]
        calls = (extra["calls"] - found["single"]["extra_info"]["calls"]) / WORKLOADS[workload].num_units
        peer = CONTENDERS[name].peer
        yield (
            name,
            f"{1000 * median:.1f}",
            "{median:.2f} [{low:.2f}-{high:.2f}]".format(**of_torch[name]),
            f"{median / found[peer]['stats']['median']:.2f}" if peer else "",
            f"{1000 * extra['cpu']:.1f}",
            f"{calls:.0f}",
            *(f"{extra[kind] / 2**20:.2f}" for kind in ("asked", "inside", "wired", "between_steps", "peak")),
        )


def checks(results: Results) -> dict[str, Any]:
    """For each API, ratios of times with and without a check, and milliseconds without any."""
    found: dict[str, Any] = {api: {} for api in APIS}
    for what, api in itertools.product(("step", "start"), APIS):
        group = [one for one in results["benchmarks"] if one["group"] == f"{what}, {api}"]
        measured = {one["extra_info"]["check"]: one for one in group}
        off = measured.pop("off")
        ratios = {}
        if "no ledger" in measured:
            ratios["ledger"] = _ratio(off, measured.pop("no ledger"))
        off_on_meta = measured.pop("off, meta", off)
        for check, one in measured.items():
            ratios[check] = _ratio(one, off_on_meta if check == "meta" else off)
        found[api] |= {what: ratios, f"{what}_ms": round(1000 * off["stats"]["median"], 1)}
    return found


def _ratio(one: dict[str, Any], without: dict[str, Any]) -> dict[str, Any]:
    wall = {name: round(one["stats"][name] / without["stats"]["median"], 3) for name in ("q1", "median", "q3")}
    cpu = round(one["extra_info"]["cpu"] / without["extra_info"]["cpu"], 3)
    return {"wall": wall["median"], "wall_interval": [wall["q1"], wall["q3"]], "cpu": cpu}


def optimizers(results: Results) -> dict[str, Any]:
    """Milliseconds of wall-clock time and of CPU time, by contender and action."""
    found: dict[str, Any] = {}
    for one in results["benchmarks"]:
        if one["group"] == "optimizer":
            extra = one["extra_info"]
            times = {"wall": one["stats"]["median"], "cpu": extra["cpu"]}
            of_contender = found.setdefault(extra["contender"], {})
            of_contender[extra["action"]] = {clock: round(1000 * value, 2) for clock, value in times.items()}
    return found


def record(results: Results, seconds: float, page: Path = PAGE, data: Path = DATA) -> None:
    """Replaces the tables on the page, and writes the records.

    Raises:
        ValueError: some workloads were not measured, or the page has no marks for the tables.
    """
    steps = _steps(results)
    if steps.keys() != WORKLOADS.keys():
        raise ValueError("only a run of all benchmarks is recorded")
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN.strip()!r} and {END.strip()!r} to write the tables between")
    facts = circumstances(seconds)
    page.write_text(before + begin + "\n" + "\n".join([*facts, "", *sections(results)]) + "\n" + end + after)
    # Pages show the highest point of a curve.
    peaks = {name: [[0.0, round(one["extra_info"]["peak"] / 2**20, 2)]] for name, one in steps[PEAKS_OF].items()}
    records = {
        "benchmarks": {"ratios": {name: ratios(found) for name, found in steps.items()}, "memory": peaks},
        "debug-cost": {"model": WORKLOADS["gpt"].about, "steps": 30, "starts": 5, "apis": checks(results)},
        "optimizer": {"model": MODEL, "rounds": 25, "contenders": optimizers(results)},
    }
    for name, found in records.items():
        (data / f"{name}.json").write_text(json.dumps({"circumstances": facts, **found}, indent=1) + "\n")
