"""Records a run of the GPU kit for the site: ``python -m docs_build.recording.gpu REPORT``.

``REPORT`` is the Markdown or JSON file of ``python -m spec_tools.gpu``. The command changes two records:

* ``docs/data/gpu.json`` holds one run for each hardware, the newest. Its key is ``"8 x NVIDIA H100 80GB HBM3"``;
* ``docs/data/spec-results.json`` gets the results of the requirements on ``cuda-nccl``, with the date and the hardware.
  They replace earlier results, except if those prove more requirements.

A report of a run without a GPU is refused.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from docs_build.recording import results
from docs_build.recording.records import load, save
from spec_tools.gpu import report as reports

BACKEND = "cuda-nccl"
Report = dict[str, Any]


def hardware_of(report: Report) -> str:
    """The devices in words, which are the key of a run: ``8 x NVIDIA H100 80GB HBM3``."""
    names = Counter(device["name"] for device in report["hardware"]["devices"])
    return ", ".join(f"{number} x {name}" for name, number in sorted(names.items()))


def run_of(report: Report) -> dict[str, Any]:
    """The part of a report that the site shows.

    Raises:
        ValueError: the report has no results of a GPU.
    """
    if report["caution"] or report["device"] != "cuda" or not report["hardware"]:
        raise ValueError(f"the report is of device {report['device']!r}, so it has no results of a GPU")
    stages = {
        name: [chunk["word"], chunk["seconds"]]
        for name, chunk in report["chunks"].items()
        if name.split("/")[0] not in ("suite", "races", "control")
    }
    return {
        "date": report["date"][:10],
        "minifsdp": report["minifsdp"],
        "commit": report["commit"],
        "hardware": {name: value for name, value in report["hardware"].items() if name != "outcome"},
        "stages": stages,
        "tests": _tests(report),
        "control": [{name: line[name] for name in ("what", "verdict")} for line in report["control"]],
        **{name: report[name] for name in ("bandwidth", "steps", "races")},
    }


def _tests(report: Report) -> dict[str, dict[str, Any]]:
    """Numbers of tests by file; a file is complete if its process was not ended early."""
    tests: dict[str, dict[str, Any]] = {}
    for name, outcome in report["outcomes"].items():
        file = name.partition("::")[0].removeprefix("spec_tests/")
        word = report["chunks"].get(f"suite/{file}", {}).get("word")
        numbers = tests.setdefault(file, {"passed": 0, "failed": 0, "complete": word in ("passed", "failed")})
        if outcome != "skipped":
            numbers["failed" if outcome == "failed" else "passed"] += 1
    return tests


def add_run(record: dict[str, Any], report: Report) -> dict[str, Any]:
    """The record with this run. An earlier run on the same hardware is replaced, a later one stays."""
    key, run = hardware_of(report), run_of(report)
    known = record["runs"].get(key)
    return record if known and known["date"] > run["date"] else {"runs": record["runs"] | {key: run}}


def add_requirements(record: dict[str, Any], report: Report) -> dict[str, Any]:
    """The record of requirements with the results of this report on `BACKEND`. Unknown IDs are left out."""
    earlier = sum(row["results"].get(BACKEND) == "proven" for row in record["rows"].values())
    if not report["outcomes"] or earlier > len(report["rows"]["proven"]):
        return record
    words = {row: word for word, rows in report["rows"].items() for row in rows}
    versions = ", ".join(f"{name} {version}" for name, version in report["hardware"]["versions"].items())
    run = {"date": report["date"][:10], "machine": f"{hardware_of(report)}, {versions}"}
    outcomes = results.joined({name: {BACKEND: outcome} for name, outcome in report["outcomes"].items()})
    rows = {}
    for name, row in record["rows"].items():
        kinds = {backend: kind for backend, kind in row["kinds"].items() if backend != BACKEND}
        if words.get(name) == "proven":
            kinds[BACKEND] = report["kinds"][name]
        tests = {test: _without(known) | outcomes.get(test, {}) for test, known in row["tests"].items()}
        rows[name] = {
            "results": row["results"] | {BACKEND: words.get(name, "unproven")},
            "kinds": kinds,
            "tests": tests,
        }
    return {"runs": record["runs"] | {BACKEND: run}, "rows": rows}


def _without(outcomes: dict[str, str]) -> dict[str, str]:
    return {backend: outcome for backend, outcome in outcomes.items() if backend != BACKEND}


def main(path: str) -> None:
    """Changes both records, and prints their contents."""
    report = reports.read(Path(path))
    record = add_run(load("gpu") or {"runs": {}}, report)
    save("gpu", record, sort_keys=False)  # pages show the versions in the order of the report
    results.save_record(add_requirements(results.recorded(), report))
    proven = len(report["rows"]["proven"])
    print(f"{hardware_of(report)}, {report['date'][:10]}: {proven} requirements proven. Runs: {len(record['runs'])}")


if __name__ == "__main__":
    main(sys.argv[1])
