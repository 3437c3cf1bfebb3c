"""Records the requirements that a run on GPUs has shown: ``python -m docs_build.recording.gpu REPORT``.

``REPORT`` is the text or JSON file of ``python -m spec_tools.gpu``. ``docs/data/gpu.json`` gets the run, and for each
requirement the test, its outcome, the kind of evidence, the digest of its code and the run. Results of other
requirements stay. ``docs/data/spec-results.json`` gets the same outcomes for ``cuda-nccl``.

A requirement is proven on CUDA if one variant of one of its tests passed there, and the last result of it is no
failure. On CPUs, all variants of a test must pass.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from docs_build.reading.text import table
from docs_build.recording import results
from docs_build.recording.results import KINDS
from spec_tools.gpu.code import digest_of
from spec_tools.gpu.cover import RECORD, record

BACKEND = "cuda-nccl"
KEPT = ("test", "outcome", "kind", "evidence", "code", "seconds")


def run_of(report: dict[str, Any]) -> dict[str, Any]:
    """The hardware and versions of a report, its numbers of tests, and the seconds that a later plan uses.

    Raises:
        ValueError: the report has no results of a GPU.
    """
    device, hardware = report["about"]["device"], report["hardware"]
    if device != "cuda" or not hardware:
        raise ValueError(f"the report is of device {device!r}, so it has no results of a GPU")
    devices = Counter(device["name"] for device in hardware["devices"])
    tests = [one for one in report["results"].values() if "rows" in one and "table" not in one]
    seconds: dict[str, list[float]] = {}
    for one in tests:
        number = one["evidence"].partition(" ")[0]
        seconds.setdefault(number if number.isdigit() else "0", []).append(one["seconds"])
    outcomes = Counter(one["outcome"] == "passed" for one in tests)
    return {
        "date": report["date"][:10],
        "hardware": ", ".join(f"{number} x {name}" for name, number in sorted(devices.items())),
        "num_gpus": len(hardware["devices"]),
        "versions": hardware["versions"],
        "commit": report["about"]["commit"],
        "minutes": round(sum(one["seconds"] for one in report["results"].values()) / 60),
        "passed": outcomes[True],
        "failed": outcomes[False],
        "start_up": report["start_up"],
        "seconds": {number: round(statistics.median(some), 3) for number, some in seconds.items()},
    }


def add_report(earlier: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """The record with a report. A weaker result of the same code does not replace a stronger one."""
    from spec_tools.gpu.report import weight  # only here, because the site is built without pytest

    run, runs = run_of(report), [*earlier["runs"]]
    # The report of a run that was continued contains the earlier part.
    same = ("date", "hardware", "versions", "commit")
    found = (number for number, one in enumerate(runs) if all(one[name] == run[name] for name in same))
    number = next(found, len(runs))
    runs[number : number + 1] = [run]
    rows = dict(earlier["rows"])
    for row, result in report["requirements"].items():
        known = rows.get(row)
        if known and known["code"] == result["code"] and weight(known) > weight(result):
            continue
        rows[row] = {name: result[name] for name in KEPT} | {"run": number}
    return {"runs": runs, "rows": dict(sorted(rows.items()))}


def older(known: dict[str, Any]) -> set[str]:
    """The requirements whose result is of other code, see `spec_tools.gpu.code`."""
    return {row for row, one in known["rows"].items() if one["code"] != digest_of(one["test"])}


def kinds_of_evidence(known: dict[str, Any], num_rows: int) -> list[list[object]]:
    """For each kind of evidence: the proven requirements, those of each kind of proof, and those that are open."""
    passed = [one for one in known["rows"].values() if one["outcome"] == "passed"]
    found = []
    for evidence in sorted({one["evidence"] for one in passed}):
        kinds = Counter(one["kind"] for one in passed if one["evidence"] == evidence)
        found.append(
            [f"`{BACKEND}`: {evidence}", kinds.total(), *(kinds[kind] for kind in KINDS), num_rows - kinds.total()]
        )
    return found


def table_of_evidence() -> str:
    """The requirements of the record by kind of evidence, with those that are older."""
    known = record()
    is_older = older(known)
    rows = []
    for evidence in sorted({one["evidence"] for one in known["rows"].values()}):
        some = {row: one for row, one in known["rows"].items() if one["evidence"] == evidence}
        passed = sum(one["outcome"] == "passed" for one in some.values())
        rows.append([evidence, passed, len(some) - passed, len(some.keys() & is_older)])
    return table(["evidence", "passed", "not passed", "older"], rows) if rows else "No requirement is recorded yet."


def sentences() -> dict[str, str]:
    """The sentences and numbers that all pages give about the runs on GPUs."""
    known = record()
    runs, rows = known["runs"], known["rows"].values()
    most = max(run["num_gpus"] for run in runs)
    several = "no machine with several" if most == 1 else f"a machine with {most}"
    passed = sum(one["outcome"] == "passed" for one in rows)
    hardware = [re.sub(r"^1 x NVIDIA (\S+).*", r"an \1", run["hardware"]) for run in runs]
    return {
        "where": f"minifsdp has run on single GPUs, and on {several}.",
        "minutes": f"{sum(run['minutes'] for run in runs)} minutes",
        "tests": " and ".join(f"{run['passed']:,} tests on {one}" for run, one in zip(runs, hardware, strict=True)),
        "requirements": f"{passed} requirements" if passed else "no requirement",
    }


def add_requirements(record_of_all: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The record of all backends with the results on `BACKEND`."""
    if not known["rows"]:
        return record_of_all
    last = known["runs"][-1]
    machine = ", ".join([last["hardware"], *(f"{name} {version}" for name, version in last["versions"].items())])
    rows = {name: _row(row, known["rows"].get(name)) for name, row in record_of_all["rows"].items()}
    return results.merged(record_of_all, {BACKEND: {"date": last["date"], "machine": machine}}, rows)


def _row(row: dict[str, Any], result: dict[str, Any] | None) -> dict[str, Any]:
    tests: dict[str, dict[str, str]] = {test: {} for test in row["tests"]}
    if result is None:
        return {"results": {BACKEND: "unproven"}, "kinds": {}, "tests": tests}
    has_passed = result["outcome"] == "passed"
    outcome = "failed" if not has_passed else "passed" if result["kind"] == KINDS[0] else f"passed ({result['kind']})"
    return {
        "results": {BACKEND: "proven" if has_passed else "failed"},
        "kinds": {BACKEND: result["kind"]} if has_passed else {},
        "tests": tests | {result["test"].partition("[")[0]: {BACKEND: outcome}},
    }


def save(known: dict[str, Any]) -> None:
    """Writes the record, with a run or a requirement on each line."""
    runs = ",\n".join(map(json.dumps, known["runs"]))
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in known["rows"].items())
    RECORD.write_text(f'{{"runs": [\n{runs}\n],\n"rows": {{\n{rows}\n}}}}\n')


if __name__ == "__main__":
    from spec_tools.gpu.report import read

    added = add_report(record(), read(Path(sys.argv[1])))
    save(added)
    results.save_record(add_requirements(results.recorded(), added))
