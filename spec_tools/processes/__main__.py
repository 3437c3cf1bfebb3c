"""Breaks trainings in many ways, and prints what happened.

    python -m spec_tools.processes faults      each fault of a rank at each stage of a training
    python -m spec_tools.processes restarts    faults of a rank under torchrun
    python -m spec_tools.processes kills       kill -9 at 50 moments of a save, for each API
    python -m spec_tools.processes soak        2,000 steps with each API

With ``--record`` it also writes the rows to ``docs/data``, for the documentation. The exit status is the number of rows
with a problem.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

PROGRAMS = ("faults", "restarts", "kills", "soak")


def row_of(case: Any, resume: Callable[[Any, Path], Any]) -> dict[str, Any]:
    """Runs a case of ``restarts`` or ``kills``, and describes it."""
    row, begun = asdict(case), time.monotonic()
    if moment := row["moment"] if isinstance(row["moment"], dict) else {}:
        row |= {"moment": moment["name"], "rank": moment["victim"]}
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = resume(case, Path(folder))
        except AssertionError as error:
            row["problem"] = str(error)[-3000:]
        else:
            row |= {"resumed from": result} if moment else {"seconds": round(time.monotonic() - begun)}
    return row


def main() -> int:
    # Imported here, because ranks import this module too, as the main module of their parent.
    from spec_tools.benchmarks.page import circumstances
    from spec_tools.processes import kills, matrix, soak
    from spec_tools.processes.ranks import ROOT

    # The cases, what runs one of them, and how many run at the same time.
    programs: dict[str, tuple[Iterable[Any], Callable[[Any], dict[str, Any]], int]] = {
        "faults": (matrix.cells(), matrix.run, 6),
        "restarts": (kills.restarts(), lambda case: row_of(case, kills.restart), 2),
        "kills": (kills.kills(), lambda case: row_of(case, kills.resume), 3),
        "soak": (soak.APIS, soak.run, 1),
    }
    parser = argparse.ArgumentParser(prog="python -m spec_tools.processes")
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--record", action="store_true", help="write docs/data/PROGRAM.json")
    options = parser.parse_args()
    cases, run, at_once = programs[options.program]
    begun, rows = time.monotonic(), []
    with ThreadPoolExecutor(at_once) as threads:
        for row in threads.map(run, cases):
            print(row, flush=True)
            rows.append(row)
    if options.record:
        head = json.dumps({"circumstances": circumstances(time.monotonic() - begun)}, indent=1)[:-2]
        lines = ",\n  ".join(map(json.dumps, rows))
        (ROOT / "docs" / "data" / f"{options.program}.json").write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')
    return sum("problem" in row for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
