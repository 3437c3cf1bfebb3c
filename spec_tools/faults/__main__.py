"""``python -m spec_tools.faults``: runs all cells and prints them. ``--record`` records them for the documentation.

A run takes a long time, so each outcome is written to ``build/faults.jsonl`` at once. If a recording is interrupted,
the next one continues with the cells that have not passed yet.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from spec_tools.benchmarks.page import circumstances
from spec_tools.faults.cells import ROOT, Cell, Outcome, every_cell, in_turns, run_all
from spec_tools.faults.job import FAULTS, STAGES, TIMEOUT

RECORD = ROOT / "docs" / "data" / "faults.json"
LINES = ROOT / "build" / "faults.jsonl"

# By kind of training, stage and fault.
Rows = dict[str, dict[str, dict[str, float | None]]]


def kind_of(cell: Cell) -> str:
    """The kind of training in words. With the store on rank 0 each victim is one kind; APIs and shardings alternate."""
    if cell.store == "of rank 0":
        return f"{cell.victim}, the store on rank 0"
    return f"{cell.victim}, {cell.api}, {cell.sharding}"


def rows_of(outcomes: Iterable[Outcome]) -> Rows:
    """The seconds until all other ranks had ended; ``None`` if the cell has a problem."""
    rows: Rows = {}
    for outcome in outcomes:
        cell, seconds = outcome.cell, None if outcome.problem else round(outcome.seconds, 1)
        rows.setdefault(kind_of(cell), {}).setdefault(cell.stage, {})[cell.fault] = seconds
    return rows


def rows_at(rows: Rows, stage: str) -> list[dict[str, float | None]]:
    """The entries of all kinds of training at a stage."""
    return [of_kind[stage] for of_kind in rows.values()]


def cell_text(seconds: list[float | None]) -> str:
    """The range of the seconds, or WRONG if a cell has a problem."""
    known = [each for each in seconds if each is not None]
    return f"{min(known):.1f} - {max(known):.1f}" if len(known) == len(seconds) else "WRONG"


def written(reported: dict[str, Any], rows: Rows) -> str:
    """The record as JSON, with one line for each kind and stage."""
    kinds = [
        f'"{kind}": {{\n' + ",\n".join(f"  {json.dumps(stage)}: {json.dumps(row)}" for stage, row in of_kind.items())
        for kind, of_kind in rows.items()
    ]
    return json.dumps(reported, indent=1)[:-2] + ',\n "rows": {\n ' + "\n },\n ".join(kinds) + "\n }\n }\n}\n"


def keep(outcome: Outcome) -> None:
    """Appends the outcome to the file."""
    with LINES.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def kept() -> dict[Cell, Outcome]:
    """The cells that passed before a recording was interrupted."""
    reported = [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []
    outcomes = [Outcome(Cell(**each["cell"]), each["seconds"], each["problem"]) for each in reported]
    return {outcome.cell: outcome for outcome in outcomes if not outcome.problem}


def main() -> int:
    """Runs the command. Returns the number of cells with a problem."""
    parser = argparse.ArgumentParser(prog="python -m spec_tools.faults")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--turns", action="store_true", help="half of the cells: the faulty rank alternates")
    parser.add_argument("--at-once", type=int, default=6, help="cells that run at the same time")
    options = parser.parse_args()
    begun = time.monotonic()
    LINES.parent.mkdir(exist_ok=True)
    good = kept() if options.record else {}
    chosen = [*(in_turns() if options.turns else every_cell())]
    remaining = [cell for cell in chosen if cell not in good]
    good |= {outcome.cell: outcome for outcome in run_all(remaining, options.at_once, keep)}
    outcomes = [good[cell] for cell in chosen]
    rows = rows_of(outcomes)
    print(f"{'seconds until all others had ended':24}" + "".join(f"{fault:>14}" for fault in FAULTS))
    for stage in STAGES:
        cells = [cell_text([row[fault] for row in rows_at(rows, stage) if fault in row]) for fault in FAULTS]
        print(f"{stage:34}" + "".join(f"{cell:>14}" for cell in cells))
    wrong = [outcome for outcome in outcomes if outcome.problem]
    for outcome in wrong:
        print(f"\n{outcome.cell}: {outcome.problem}")
    print(f"\n{len(outcomes)} cells, {len(wrong)} with a problem, {time.monotonic() - begun:.0f} s")
    if options.record:
        reported = {"circumstances": circumstances(time.monotonic() - begun), "timeout": TIMEOUT}
        RECORD.write_text(written(reported, rows))
        if not wrong:
            LINES.unlink()
    return len(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
