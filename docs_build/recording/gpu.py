"""Records the requirements that a run on GPUs has proven: ``python -m docs_build.recording.gpu REPORT``.

``REPORT`` is the text or JSON file of ``python -m spec_tools.gpu``. ``docs/data/spec-results.json`` gets the results of
the requirements on ``cuda-nccl``, with the date and the hardware. They replace earlier results, except if those prove
more requirements.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from docs_build.recording import results
from spec_tests.harness.accounting import KINDS, kind_of_proof, verdict
from spec_tools.gpu import report as reports

BACKEND = "cuda-nccl"


def outcomes_of(report: dict[str, Any]) -> dict[str, dict[str, str | None]]:
    """The outcomes of the tests of each requirement, with the kind of evidence, unless it is the behaviour."""
    found: dict[str, dict[str, str | None]] = {}
    for name, test in reports.tests(report).items():
        is_plain = test["outcome"] != "passed" or test["kind"] == KINDS[0]
        for row in test["rows"]:
            found.setdefault(row, {})[name] = test["outcome"] if is_plain else f"passed ({test['kind']})"
    return found


def add_requirements(record: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """The record with the results of this report on `BACKEND`. Unknown requirements are left out.

    Raises:
        ValueError: the report has no results of a GPU.
    """
    device, hardware = report["about"]["device"], report["hardware"]
    if device != "cuda" or not hardware:
        raise ValueError(f"the report is of device {device!r}, so it has no results of a GPU")
    outcomes = outcomes_of(report)
    words = {name: verdict(tests) for name, tests in outcomes.items()}
    earlier = sum(row["results"].get(BACKEND) == "proven" for row in record["rows"].values())
    if not outcomes or earlier > list(words.values()).count("proven"):
        return record
    devices = Counter(device["name"] for device in hardware["devices"])
    machine = [f"{number} x {name}" for name, number in sorted(devices.items())]
    machine += [f"{name} {version}" for name, version in hardware["versions"].items()]
    by_test = results.joined({name: {BACKEND: word} for tests in outcomes.values() for name, word in tests.items()})
    rows = {
        name: {
            "results": {BACKEND: words.get(name, "unproven")},
            "kinds": {BACKEND: kind_of_proof(outcomes[name])} if words.get(name) == "proven" else {},
            "tests": {test: by_test.get(test, {}) for test in row["tests"]},
        }
        for name, row in record["rows"].items()
    }
    return results.merged(record, {BACKEND: {"date": report["date"][:10], "machine": ", ".join(machine)}}, rows)


if __name__ == "__main__":
    results.save_record(add_requirements(results.recorded(), reports.read(Path(sys.argv[1]))))
