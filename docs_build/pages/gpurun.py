"""Tables about the runs on GPUs, from ``docs/data/gpu.json``, which has a run for each hardware.

``python -m docs_build.recording.gpu`` adds a run from a report of ``python -m spec_tools.gpu``. The run on one H200 is
the first. It was made from the reports and logs of three runs, and the pages describe it in words. Runs before
2026-11-29 have a line of the race hunt for each seed, later ones a line for each configuration.
"""

from collections.abc import Mapping
from typing import Any

from docs_build.reading.text import table
from docs_build.recording.records import load

FIRST = "1 x NVIDIA H200"
STEPS = ("ms", "host ms", "tokens/s", "TFLOP/s", "peak GiB", "syncs", "mallocs")
BAD = ("failed", "crashed", "hung")


def runs() -> dict[str, Any]:
    """All runs by hardware, the newest first."""
    return dict(sorted(load("gpu")["runs"].items(), key=lambda item: item[1]["date"], reverse=True))


def machine(hardware: str = FIRST) -> str:
    """The date, the GPUs and the versions, as one line."""
    record = runs()[hardware]
    versions = ", ".join(f"{name} {version}" for name, version in record["hardware"]["versions"].items())
    return f"{record['date']}, {hardware.replace('1 x ', 'one ')}, {versions}"


def num_passed(hardware: str = FIRST) -> int:
    """The number of tests that passed on the GPUs."""
    return sum(file["passed"] for file in runs()[hardware]["tests"].values())


def steps(hardware: str = FIRST) -> str:
    """Times and memory of training steps, as Markdown."""
    lines = runs()[hardware]["steps"]
    several = {line["ranks"] for line in lines} != {1}
    rows = [
        (
            ", ".join(filter(None, [line["size"], line.get("precision"), several and f"{line['ranks']} ranks"])),
            line.get("contender", ""),
            *(line.get(name, "") for name in STEPS),
        )
        for line in lines
    ]
    return table(["model", "trainer", *STEPS], rows, "llr")


def races(hardware: str = FIRST) -> str:
    """The configurations of the race hunt, as Markdown."""
    by_name: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for line in runs()[hardware]["races"]:
        if line.get("seed", 0) >= 0 or "text" in line:  # seed -1 is the reference
            by_name.setdefault((line["configuration"], line["ranks"]), []).append(line)
    is_pair = {ranks for _, ranks in by_name} <= {2}
    rows = [
        (
            name if is_pair else f"{name}, {ranks} ranks",
            sum(line.get("seeds", "seed" in line) for line in lines),
            sum(line.get("delays", 0) for line in lines),
            sum("text" in line for line in lines),  # only a failure has a text
        )
        for (name, ranks), lines in by_name.items()
    ]
    return table(["configuration, 2 ranks" if is_pair else "configuration", "seeds", "delays", "different"], rows, "lr")


def suite(hardware: str = FIRST) -> str:
    """The test files that ran, as Markdown."""
    rows = [
        (f"`{name}`", file["passed"], file["failed"] or "", "yes" if file["complete"] else "in part")
        for name, file in sorted(runs()[hardware]["tests"].items())
    ]
    return table(["file", "passed", "failed", "complete"], rows, "lrrl")


def all_runs() -> str:
    """A row for each hardware, as Markdown."""
    rows = []
    for hardware, run in runs().items():
        passed = num_passed(hardware)
        failed = sum(file["failed"] for file in run["tests"].values())
        stages = [name for name, (word, _) in run["stages"].items() if word in BAD]
        rows.append(
            [hardware, run["date"], run["hardware"]["versions"]["torch"], passed, failed or "", ", ".join(stages)]
        )
    return table(["hardware", "date", "torch", "tests passed", "failed", "other checks that failed"], rows, "lllrrl")


def others() -> str:
    """A section for each run that the page does not describe in words, as Markdown."""
    shown = []
    for hardware in runs():
        if hardware != FIRST:
            parts = [f"### {hardware}", f"{machine(hardware)}.", steps(hardware), races(hardware), suite(hardware)]
            shown.append("\n\n".join(parts))
    return "\n\n".join(shown)
