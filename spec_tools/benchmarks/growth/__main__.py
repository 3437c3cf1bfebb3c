"""``python -m spec_tools.benchmarks.growth``: measures and prints; ``--record`` records the measurements."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spec_tools.benchmarks.growth.llama import large
from spec_tools.benchmarks.growth.measure import count, measure
from spec_tools.benchmarks.growth.points import AXES, FSDPS, points_of
from spec_tools.benchmarks.page import circumstances

__all__ = ["run"]

RECORD = Path(__file__).resolve().parents[3] / "docs" / "data" / "growth.json"
PARTS = (*AXES, "large")
WHAT = {
    "calls": "Python calls for each unit and step",
    "overhead": "above the plain model, for each unit and step, us",
    "step": "a step, ms",
    "first": "the first step, ms",
    "construct": "construction, ms",
    "state_dict": "state_dict(), ms",
}


def run(parts: list[str], contenders: list[str]) -> dict[str, Any]:
    """The measurements by part and contender: one entry for each value of an axis, in its order."""
    with _fresh_processes() as pool:
        found: dict[str, Any] = {
            axis: {name: [_reported(pool, measure, name, point) for point in points_of(axis)] for name in contenders}
            for axis in AXES
            if axis in parts
        }
        if "large" in parts:
            found["large"] = {name: _reported(pool, large, name) for name in contenders}
    return found


def count_again(record: dict[str, Any]) -> None:
    """Replaces only the calls in a record."""
    with _fresh_processes() as pool:
        for axis in AXES:
            for name, points in record[axis].items():
                for kept, point in zip(points, points_of(axis), strict=True):
                    kept.update(_reported(pool, count, name, point))


def _fresh_processes() -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([measure.__module__, large.__module__])
    return ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1)


def _reported(pool: ProcessPoolExecutor, action: Callable[..., dict[str, float]], *given: Any) -> dict[str, float]:
    figures = {key: round(value, 3) for key, value in pool.submit(action, *given).result().items()}
    print(*given, figures, flush=True)
    return figures


def tables(found: dict[str, Any]) -> list[str]:
    """Tables with a row for each contender and a column for each value of an axis."""
    lines: list[str] = []
    for axis in [axis for axis in AXES if axis in found]:
        for key, what in WHAT.items():
            lines += ["", f"{what}; {axis}:", _line("", AXES[axis])]
            lines += [_line(name, [round(point[key], 1) for point in found[axis][name]]) for name in found[axis]]
    if "large" in found:
        lines += ["", "7 billion parameters on meta, for rank 0 of 64:", _line("", ("seconds", "MiB kept", "MiB peak"))]
        lines += [_line(name, [round(value, 1) for value in row.values()]) for name, row in found["large"].items()]
    return lines


def _line(name: str, cells: Any) -> str:
    return f"{name:18}" + "".join(f"{cell:>10}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m spec_tools.benchmarks.growth")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {','.join(PARTS)}")
    parser.add_argument("--contenders", default=",".join(FSDPS), help="names with commas between them")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}; not with part of the parts")
    parser.add_argument(
        "--calls", action="store_true", help=f"count only the calls in {RECORD.name} again; works on any machine"
    )
    asked = parser.parse_args()
    parts, contenders = asked.only.split(","), asked.contenders.split(",")
    if unknown := [*(set(parts) - set(PARTS)), *(set(contenders) - set(FSDPS))]:
        parser.error(f"there is no {', '.join(unknown)}")
    if asked.record and (len(parts), len(contenders)) != (len(PARTS), len(FSDPS)):
        parser.error("only a whole run is recorded")
    # Set before the fork server starts, so that its processes inherit it.
    os.environ["OMP_NUM_THREADS"] = "1"
    if asked.calls:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
        count_again(record)
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return
    begin = time.monotonic()
    found = run(parts, contenders)
    print("\n".join(tables(found)))
    if asked.record:
        # The facts of the race about two ranks, their load and gloo do not apply here.
        when, machine, _, versions = circumstances(time.monotonic() - begin)
        reported = [when, machine, versions.replace("; gloo", "; fake backend")]
        head = {"date": str(datetime.now(UTC).date()), "circumstances": reported}
        RECORD.write_text(json.dumps({**head, "axes": AXES, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
