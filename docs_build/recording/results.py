"""The requirements of the spec, and the last results of their tests.

A test run writes ``build/spec-results.json``. ``python -m docs_build.recording.results`` makes a record of it in
``docs/data/``, with the date, the machine and the versions, so that a site can be built where no test has run.
"""

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any

from docs_build.reading.order import ROOT
from docs_build.recording.records import machine

SPEC = ROOT / "docs" / "spec.md"
FRESH = ROOT / "build" / "spec-results.json"
RECORD = ROOT / "docs" / "data" / "spec-results.json"
WHERE = {"cpu-gloo": "CPU, gloo", "simulated": "simulated accelerator", "cuda-nccl": "CUDA, NCCL"}
BACKENDS = tuple(WHERE)
ROW_ID = re.compile(r"\b(?:[A-Z][A-Z0-9]*-)+\d{2}\b")
KINDS = ("behaviour", "order only", "arithmetic", "text")
WORSE = ("passed", *(f"passed ({kind})" for kind in KINDS[1:]), "skipped", "not run", "failed")
LINE = re.compile(r"^\| ((?:[A-Z0-9]+-)+\d+) \| (.*) \|$")


@dataclass
class SpecRow:
    """One requirement.

    Attributes:
        id: for instance ``SHARD-04``.
        section: the heading above it.
        cells: the other cells of its line, the statement first.
        results: result on each backend: ``"proven"``, ``"failed"`` or ``"unproven"``.
        kinds: kind of evidence on each backend that has one; one of `KINDS`.
        tests: outcome on each backend, for each test of the requirement.
        is_recorded: whether the record contains it; a newer requirement is in no recorded run.
    """

    id: str
    section: str
    cells: list[str]
    results: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    tests: dict[str, dict[str, str]] = field(default_factory=dict)
    is_recorded: bool = True

    @property
    def needs_cuda(self) -> bool:
        """Whether it can only be tested completely on CUDA."""
        return any("[cuda]" in cell for cell in self.cells[1:])

    @property
    def statement(self) -> str:
        """The required behaviour."""
        return self.cells[0]


@cache
def recorded() -> dict[str, Any]:
    """The record."""
    return json.loads(RECORD.read_text())


@cache
def all_rows() -> dict[str, SpecRow]:
    """Every requirement of ``docs/spec.md`` by ID, in order."""
    rows: dict[str, SpecRow] = {}
    section = ""
    of_record = recorded()["rows"]
    for line in SPEC.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:].strip()
        found = LINE.match(line)
        if found:
            known = of_record.get(found[1], {})
            is_recorded = found[1] in of_record
            results = {backend: known.get("results", {}).get(backend, "unproven") for backend in BACKENDS}
            cells, kinds = found[2].split(" | "), known.get("kinds", {})
            rows[found[1]] = SpecRow(found[1], section, cells, results, kinds, known.get("tests", {}), is_recorded)
    return rows


def num_proven(backend: str) -> int:
    """The number of requirements that tests have shown on a backend."""
    return sum(row["results"].get(backend) == "proven" for row in recorded()["rows"].values())


def merged(earlier: dict[str, Any], runs: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """The record with new results of the backends in ``runs``. The results of other backends stay.

    Args:
        earlier: the record.
        runs: date and machine of each new run, by backend.
        rows: results, kinds of evidence, and outcomes of the tests of each requirement.
    """

    def with_others(new: dict[str, str], known: dict[str, str]) -> dict[str, str]:
        return new | {backend: word for backend, word in known.items() if backend not in runs}

    found = {}
    for name, row in rows.items():
        known = earlier["rows"].get(name, {"results": {}, "kinds": {}, "tests": {}})
        found[name] = {part: with_others(row[part], known[part]) for part in ("results", "kinds")}
        tests = joined(row["tests"]).items()
        found[name]["tests"] = {test: with_others(new, known["tests"].get(test, {})) for test, new in tests}
    return {"runs": earlier["runs"] | runs, "rows": found}


def joined(tests: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The variants of a test as one test; the worst of their outcomes counts."""
    joined: dict[str, dict[str, str]] = {}
    for name, outcomes in tests.items():
        one = joined.setdefault(name.partition("[")[0], {})
        for backend, outcome in outcomes.items():
            one[backend] = max(one.get(backend, outcome), outcome, key=WORSE.index)
    return joined


def css_class(outcome: str) -> str:
    """The suffix of a badge's class: ``passed``, ``not-run``, or ``part`` for a test that has ``passed (text)``."""
    return "part" if " (" in outcome else outcome.replace(" ", "-")


def write_record() -> None:
    """Writes the record from the last test run on this machine; results of other backends stay."""
    rows = json.loads(FRESH.read_text())
    when = datetime.fromtimestamp(FRESH.stat().st_mtime, UTC).strftime("%Y-%m-%d")
    backends = {b for row in rows.values() for outcomes in row["tests"].values() for b in outcomes}
    runs = {backend: {"date": when, "machine": machine()} for backend in sorted(backends)}
    save_record(merged(json.loads(RECORD.read_text()), runs, rows))


def save_record(record: dict[str, Any]) -> None:
    """Writes the record, with a requirement on each line, so that differences between two records are readable."""
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in record["rows"].items())
    RECORD.write_text(f'{{"runs": {json.dumps(record["runs"])},\n"rows": {{\n{rows}\n}}}}\n')


if __name__ == "__main__":
    write_record()
