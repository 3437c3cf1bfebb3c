"""``python -m spec_tests.faults``: runs all cells and prints them; with ``--record`` the documentation keeps them."""

from __future__ import annotations

import argparse
import json
import time
from datetime import UTC, datetime
from typing import Any

from spec_tests.faults.cells import ROOT, Outcome, every_cell, run_all
from spec_tests.faults.job import DOORS, FAULTS, SHARDINGS, STAGES, TIMEOUT

RECORD = ROOT / "docs" / "data" / "faults.json"


def table(outcomes: list[Outcome]) -> dict[str, dict[str, list[float | None]]]:
    """By stage and fault the seconds until all others had ended, of each kind of training; ``None`` if it is wrong."""
    rows: dict[str, dict[str, list[float | None]]] = {stage: {fault: [] for fault in FAULTS} for stage in STAGES}
    for outcome in outcomes:
        seconds = None if outcome.complaint else round(outcome.seconds, 1)
        rows[outcome.cell.stage][outcome.cell.fault].append(seconds)
    return rows


def cell_text(seconds: list[float | None]) -> str:
    """The span of the seconds, or that something is wrong."""
    known = [each for each in seconds if each is not None]
    if len(known) < len(seconds):
        return "WRONG"
    return f"{min(known):.1f} - {max(known):.1f}"


def main() -> int:
    """How many cells are not as they should be."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests.faults")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--at-once", type=int, default=6, help="cells that run at the same time")
    options = parser.parse_args()
    begun = time.monotonic()
    outcomes = run_all(every_cell(), options.at_once)
    rows = table(outcomes)
    print(f"{'seconds until all others had ended':24}" + "".join(f"{fault:>14}" for fault in FAULTS))
    for stage, of_stage in rows.items():
        print(f"{stage:34}" + "".join(f"{cell_text(seconds):>14}" for seconds in of_stage.values()))
    wrong = [outcome for outcome in outcomes if outcome.complaint]
    for outcome in wrong:
        print(f"\n{outcome.cell}: {outcome.complaint}")
    print(f"\n{len(outcomes)} cells, {len(wrong)} not as they should be, {time.monotonic() - begun:.0f} s")
    if options.record:
        told: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "timeout": TIMEOUT, "doors": DOORS}
        RECORD.write_text(json.dumps({**told, "shardings": SHARDINGS, "rows": rows}, indent=1) + "\n")
    return len(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
