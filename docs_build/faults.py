"""The fault matrix as a table, made of `RECORD` while the site is built.

``python -m spec_tests.faults --record`` runs all cells and writes the record.
"""

from __future__ import annotations

import json

from docs_build.order import ROOT

__all__ = ["RECORD", "table"]

RECORD = ROOT / "docs" / "data" / "faults.json"


def table() -> str:
    """A row for each stage, a column for each fault, in Markdown; and under it what was run when."""
    if not RECORD.exists():
        return "No run is recorded."
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = record["rows"]
    faults = list(next(iter(rows.values())))
    lines = ["| the last rank ... at | " + " | ".join(faults) + " |", "|---|" + "--:|" * len(faults)]
    lines += [
        f"| {stage} | " + " | ".join(_cell(of_stage[fault]) for fault in faults) + " |"
        for stage, of_stage in rows.items()
    ]
    kinds = len(record["doors"]) * len(record["shardings"])
    ranks = " or ".join(str(number) for number in record["shardings"].values())
    num_cells = sum(len(cells) for of_stage in rows.values() for cells in of_stage.values())
    lines += ["", f"Recorded {record['date']} on a CPU with gloo: {num_cells} cells,"]
    lines += [f"each in {kinds} kinds of training (both doors, `FULL_SHARD` and hybrid), {ranks} ranks."]
    lines += [f"The groups' time-out is {record['timeout']:g} seconds."]
    return "\n".join(lines)


def _cell(seconds: list[float | None]) -> str:
    known = [each for each in seconds if each is not None]
    return f"{min(known):.1f} to {max(known):.1f}" if len(known) == len(seconds) else "**wrong**"
