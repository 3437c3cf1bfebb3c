"""The cost of the checks, permanent or of ``minifsdp.debug()``, as a table made from `RECORD` in the site build.

``python -m spec_tests.benchmarks.debug_cost --record`` measures and writes the record.
"""

from __future__ import annotations

import json
from typing import Any

from docs_build.order import ROOT

__all__ = ["RECORD", "table"]

RECORD = ROOT / "docs" / "data" / "debug-cost.json"

NAMES = {"ledger": "always enabled", "all": "all checks"}


def table() -> str:
    """A row for each check, in Markdown, and below the table the conditions of the measurement."""
    if not RECORD.exists():
        return "No run is recorded."
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    doors = record["doors"]
    heads = [f"{what}, `{door}`" for door in doors for what in ("step", "start")]
    lines = ["| check | " + " | ".join(heads) + " |", "|---|" + "--:|" * len(heads)]
    first, *_ = doors.values()
    for check in first["step"]:
        cells = [_cell(measured[what].get(check)) for measured in doors.values() for what in ("step", "start")]
        lines.append(f"| {NAMES.get(check, f'`{check}`')} | " + " | ".join(cells) + " |")
    off = [f"{measured[f'{what}_ms']:,.0f} ms" for measured in doors.values() for what in ("step", "start")]
    lines += ["| no check | " + " | ".join(off) + " |", "", f"{record['model']}; two ranks on gloo. Medians of"]
    lines += [f"{record['steps']} pairs of steps and {record['starts']} pairs of starts.", "", *record["circumstances"]]
    return "\n".join(lines)


def _cell(ratios: dict[str, Any] | None) -> str:
    if ratios is None:
        return ""
    # Old records have no interval.
    between = ratios.get("wall_interval")
    within = f", {between[0]:.3f} to {between[1]:.3f}" if between else ""
    return f"{ratios['wall']:.2f}{within} ({ratios['cpu']:.2f})"
