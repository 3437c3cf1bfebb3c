"""The record: the requirements that detected each mutant, the mutants of each requirement, and those of each function.

``docs/data/mutants.json``::

    {
      "mutants": {"hybrid-divides-by-the-shards-only": {"what": "...", "place": "ReducePlan.mean",
                                                        "red": {"HYB-05": "spec_tests/...::test_..."}, "blind": []}},
      "rows": {"HYB-05": ["hybrid-divides-by-the-shards-only"]},
      "functions": {"ReducePlan.mean": ["HYB-05"]}
    }

Each *blind* entry is a finding: a requirement that claims more than its tests check. During a run, results are written
to ``build/mutants.jsonl``. Each line has a digest of the mutant and of the file that it changes. Lines with an outdated
digest are ignored.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from spec_tests.harness.accounting import ROOT
from spec_tools.mutants.mutant import Mutant, broken
from spec_tools.mutants.runner import Result, files_of

__all__ = ["LINES", "RECORD", "append", "noticed_before", "read_lines", "write"]

LINES = ROOT / "build" / "mutants.jsonl"
RECORD = ROOT / "docs" / "data" / "mutants.json"


def _digest(mutant: Mutant) -> str:
    change = broken(mutant)
    tests = "".join((ROOT / path).read_text() for path in files_of(mutant.row_list))
    return hashlib.sha256(f"{mutant}{change.text}{tests}".encode()).hexdigest()[:16]


def append(mutant: Mutant, result: Result, path: pathlib.Path = LINES) -> None:
    """Appends the result of a mutant, so that an interrupted run can continue."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lines:
        lines.write(json.dumps({"digest": _digest(mutant), **json.loads(result.as_line())}) + "\n")


def read_lines(mutants: Mapping[str, Mutant], path: pathlib.Path = LINES) -> dict[str, Result]:
    """The results that are valid for the current mutants, package and tests, by name of the mutant."""
    known = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        fields = json.loads(line)
        digest = fields.pop("digest")
        mutant = mutants.get(fields["name"])
        if mutant is not None and _digest(mutant) == digest:
            known[mutant.name] = Result(**fields)
    return known


def write(mutants: Mapping[str, Mutant], results: Iterable[Result], path: pathlib.Path = RECORD) -> dict[str, Any]:
    """Adds results to the record, and removes mutants that are no longer in the catalogue."""
    earlier = json.loads(path.read_text())["mutants"] if path.exists() else {}
    found = {name: entry for name, entry in earlier.items() if name in mutants}
    for result in results:
        one = mutants[result.name]
        found[one.name] = {"what": one.what, "place": one.edit.place, "red": result.red, "blind": result.blind}
    rows: dict[str, list[str]] = {}
    functions: dict[str, set[str]] = {}
    for name, entry in sorted(found.items()):
        for row in entry["red"]:
            rows.setdefault(row, []).append(name)
        functions.setdefault(entry["place"], set()).update(entry["red"])
    record = {
        "mutants": dict(sorted(found.items())),
        "rows": dict(sorted(rows.items())),
        "functions": {place: sorted(names) for place, names in sorted(functions.items())},
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return record


def noticed_before(path: pathlib.Path = RECORD) -> list[str]:
    """The mutants that all of their requirements detected when the record was written."""
    return [name for name, entry in json.loads(path.read_text())["mutants"].items() if not entry["blind"]]
