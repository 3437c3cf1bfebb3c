"""Records a run on GPUs for the site: ``python -m docs_build.recording.gpu REPORT``.

``REPORT`` is the text or JSON file of ``python -m spec_tools.gpu``. The command changes two records:

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
from spec_tests.harness.accounting import KINDS, kind_of_proof, verdict
from spec_tools.gpu import report as reports

BACKEND = "cuda-nccl"
Report = dict[str, Any]
Outcomes = dict[str, dict[str, str | None]]  # of the tests of each requirement


def hardware_of(report: Report) -> str:
    """The devices in words, which are the key of a run: ``8 x NVIDIA H100 80GB HBM3``."""
    names = Counter(device["name"] for device in report["hardware"]["devices"])
    return ", ".join(f"{number} x {name}" for name, number in sorted(names.items()))


def run_of(report: Report) -> dict[str, Any]:
    """The part of a report that the site shows.

    Raises:
        ValueError: the report has no results of a GPU.
    """
    about = report["about"]
    if about["device"] != "cuda" or not report["hardware"]:
        raise ValueError(f"the report is of device {about['device']!r}, so it has no results of a GPU")
    stages = {
        name: [job["word"], job["seconds"]]
        for name, job in report["jobs"].items()
        if name.split("/")[0] not in ("suite", "races")
    }
    return {
        "date": report["date"][:10],
        "minifsdp": about["minifsdp"],
        "commit": about["commit"],
        "hardware": report["hardware"],
        "stages": stages,
        "tests": _tests(report),
        **{stage: list(reports.findings(report, stage)) for stage in ("collectives", "steps", "races")},
    }


def _tests(report: Report) -> dict[str, dict[str, Any]]:
    """Numbers of tests by file; a file is complete if its process was not ended early."""
    tests: dict[str, dict[str, Any]] = {}
    for name, test in reports.tests(report).items():
        file = name.partition("::")[0].removeprefix("spec_tests/")
        word = report["jobs"].get(f"suite/{file}", {}).get("word")
        numbers = tests.setdefault(file, {"passed": 0, "failed": 0, "complete": word in ("passed", "failed")})
        if test["outcome"] != "skipped":
            numbers[test["outcome"]] += 1
    return tests


def add_run(record: dict[str, Any], report: Report) -> dict[str, Any]:
    """The record with this run. An earlier run on the same hardware is replaced, a later one stays."""
    key, run = hardware_of(report), run_of(report)
    known = record["runs"].get(key)
    return record if known and known["date"] > run["date"] else {"runs": record["runs"] | {key: run}}


def outcomes_of(report: Report) -> Outcomes:
    """The outcomes of the tests of each requirement, with the kind of evidence, unless it is the behaviour."""
    found: Outcomes = {}
    for name, test in reports.tests(report).items():
        is_plain = test["outcome"] != "passed" or test["kind"] == KINDS[0]
        for row in test["rows"]:
            found.setdefault(row, {})[name] = test["outcome"] if is_plain else f"passed ({test['kind']})"
    return found


def add_requirements(record: dict[str, Any], report: Report) -> dict[str, Any]:
    """The record of requirements with the results of this report on `BACKEND`. Unknown IDs are left out."""
    outcomes = outcomes_of(report)
    words = {name: verdict(tests) for name, tests in outcomes.items()}
    earlier = sum(row["results"].get(BACKEND) == "proven" for row in record["rows"].values())
    if not outcomes or earlier > list(words.values()).count("proven"):
        return record
    versions = ", ".join(f"{name} {version}" for name, version in report["hardware"]["versions"].items())
    run = {"date": report["date"][:10], "machine": f"{hardware_of(report)}, {versions}"}
    by_test = results.joined({name: {BACKEND: word} for tests in outcomes.values() for name, word in tests.items()})
    rows = {}
    for name, row in record["rows"].items():
        kinds = {backend: kind for backend, kind in row["kinds"].items() if backend != BACKEND}
        if words.get(name) == "proven":
            kinds[BACKEND] = kind_of_proof(outcomes[name])
        tests = {test: _without(known) | by_test.get(test, {}) for test, known in row["tests"].items()}
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
    proven = [verdict(tests) for tests in outcomes_of(report).values()].count("proven")
    print(f"{hardware_of(report)}, {report['date'][:10]}: {proven} requirements proven. Runs: {len(record['runs'])}")


if __name__ == "__main__":
    main(sys.argv[1])
