"""The records: the tests that noticed each break, and the reports of the programs. The documentation shows them.

``docs/data/mutants.json``::

    {"mutants": {"hybrid-divides-by-the-shards-only": {"what": "...", "place": "ReducePlan.mean",
                                                       "red": {"HYB-05": "spec_tests/...::test_..."}, "blind": []}}}

``docs/data/stream-breaks.json``::

    [{"name": "no-record-stream", "what": "...", "file": "engine/lifetime.py", "program": "flat_full",
      "by": "collision", "report": "RACE: ...", "replay": "7 of 8 schedules, ..."}]

Each *blind* entry is a finding: a requirement that claims more than its tests check.
"""

from __future__ import annotations

import json
from typing import Any

from spec_tests.harness.accounting import ROOT
from spec_tools.breaks.edits import BREAKS, Break, edited
from spec_tools.breaks.runner import Result

TESTS = ROOT / "docs" / "data" / "mutants.json"
PROGRAMS = ROOT / "docs" / "data" / "stream-breaks.json"


def add(one: Break, result: Result) -> None:
    """Adds a result to its record, and removes breaks that are no longer in the catalogue."""
    if one.program:
        known = {row["name"]: row for row in json.loads(PROGRAMS.read_text())}
        known[one.name] = _row_of_program(one, result)
        PROGRAMS.write_text(json.dumps([row for name, row in known.items() if name in BREAKS], indent=1) + "\n")
    else:
        known = json.loads(TESTS.read_text())["mutants"]
        known[one.name] = {"what": one.what, "place": one.place, "red": result.red, "blind": result.blind}
        mutants = {name: known[name] for name in sorted(known) if name in BREAKS}
        TESTS.write_text(json.dumps({"mutants": mutants}, indent=1) + "\n")


def _row_of_program(one: Break, result: Result) -> dict[str, Any]:
    return {
        "name": one.name,
        "what": one.what,
        "file": edited(one).path.relative_to(ROOT / "minifsdp").as_posix(),
        "program": one.program,
        "by": one.by,
        "report": result.red.get(one.by, "NOT FOUND").splitlines()[0],
        "replay": result.red.get("other bits", ""),
    }
