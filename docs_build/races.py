"""The benchmarks as pictures, drawn from `RECORD` while the site is built.

``python -m spec_tests.benchmarks --record`` writes the record and the tables of the page. Pictures without data in the
record are left out. This module computes the positions, ``races.svg.jinja`` the appearance. Colours are those of the
timelines, one for each kind of FSDP. minifsdp's lines are solid, torch's are pale or dashed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from docs_build import pictures
from docs_build.order import ROOT

__all__ = ["RECORD", "figure"]

RECORD = ROOT / "docs" / "data" / "benchmarks.json"

_TEMPLATES = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True)
_TEMPLATES.filters["px"] = "{:.1f}".format
_SHAPES: Any = _TEMPLATES.get_template("races.svg.jinja").module

# In pixels.
WIDTH = 840
ROW, PANEL_GAP, LEFT, RIGHT = 14, 46, 128, 24
MEMORY_LEFT, MEMORY_TOP, MEMORY_HEIGHT = 48, 40, 220

Ratio = dict[str, float]


def figure(name: str, caption: str) -> str:
    """A picture with its caption; empty if the record has no data for it.

    Args:
        name: ``ratios``, or ``memory`` and the kind of FSDP, as in ``memory flat``.
        caption: the text below it.
    """
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    what, _, kind = name.partition(" ")
    picture = _ratios(record.get("ratios", {})) if what == "ratios" else _memory(record.get("memory", {}), kind)
    if not picture:
        return ""
    facts = [fact.removeprefix("* ") for fact in record["circumstances"]]
    return pictures.figure(picture, caption, f"{facts[0].capitalize()}; {facts[1]}.")


def _ratios(by_workload: Mapping[str, Mapping[str, Ratio]]) -> str:
    """Panels in two columns."""
    if not by_workload:
        return ""
    highest = max(ratio["high"] for ratios in by_workload.values() for ratio in ratios.values())
    ticks = [number / 2 for number in range(math.ceil(2 * highest) + 1)]
    column = WIDTH // 2
    height = PANEL_GAP + ROW * max(map(len, by_workload.values()))
    panels = [
        {"workload": workload, "x": 8 + column * (number % 2), "y": height * (number // 2), "bars": _bars(ratios)}
        for number, (workload, ratios) in enumerate(by_workload.items())
    ]

    def place(ratio: float) -> float:
        return LEFT + (column - LEFT - RIGHT) * ratio / ticks[-1]

    whole = height * math.ceil(len(panels) / 2)
    title = "Time of a step, divided by the time of torch's fastest FSDP"
    return str(_SHAPES.ratios(title, panels, WIDTH, whole, LEFT, ROW, ticks, place))


def _bars(ratios: Mapping[str, Ratio]) -> list[dict[str, Any]]:
    return [{"name": name, "look": _look(name), "ratio": _words(ratio), **ratio} for name, ratio in ratios.items()]


def _words(ratio: Ratio) -> str:
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}-{ratio['high']:.2f}]"


def _look(contender: str) -> str:
    library, kind = contender.split()[0], contender.split()[-1]
    known = {"flat": "flat", "orig": "orig", "FSDP2": "func"}
    return known.get(kind, "other") + (" torch" if library == "torch" else "")


def _memory(curves: Mapping[str, list[list[float]]], kind: str) -> str:
    """The curves of one kind of FSDP, torch's and minifsdp's."""
    shown = {name: curve for name, curve in curves.items() if name.split()[-1] == kind}
    if not shown:
        return ""
    highest = max(size for curve in shown.values() for _, size in curve)
    step = 10.0 ** math.floor(math.log10(highest)) / 2
    ticks = [step * number for number in range(math.ceil(highest / step) + 1)]
    bottom = MEMORY_TOP + MEMORY_HEIGHT

    def level(size: float) -> float:
        return bottom - MEMORY_HEIGHT * size / ticks[-1]

    def place(moment: float) -> float:
        return MEMORY_LEFT + (WIDTH - 16 - MEMORY_LEFT) * moment

    drawn = [
        {
            "name": name,
            "look": _look(name),
            "peak": max(size for _, size in curve),
            "points": " ".join(f"{place(moment):.1f},{level(size):.1f}" for moment, size in curve),
        }
        for name, curve in shown.items()
    ]
    title, labels = f"Live tensors during a step, {kind}", [f"{tick:g}" for tick in ticks]
    height = bottom + 28
    marks = list(zip(labels, map(level, ticks), strict=True))
    return str(_SHAPES.memory(title, drawn, WIDTH, height, MEMORY_LEFT, MEMORY_TOP, bottom, marks))
