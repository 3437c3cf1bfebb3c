"""Two pictures: bandwidth over size, and the step time of each contender, as SVG.

The elements and colours are those of the pictures on the site (``docs_build/drawing/plots.svg.jinja``).

Spec: KIT-18.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from docs_build.drawing.plots import Area
from docs_build.templates import PLOTS
from spec_tools.gpu.cards import find_card

__all__ = ["bandwidth", "steps"]

Finding = Mapping[str, Any]

AREA = Area(64, 104, 640, 260, 24)
LOOKS = {"all-gather": "flat", "reduce-scatter": "orig"}
WIDTH, LEFT, RIGHT, ROW, GAP = 760, 240, 40, 14, 48


def bandwidth(findings: Sequence[Finding]) -> str:
    """``busbw`` by size for the largest number of ranks. Empty if nothing was measured."""
    measured = [finding for finding in findings if any("busbw" in row for row in finding.get("rows", []))]
    num_ranks = max((finding["ranks"] for finding in measured), default=0)
    curves = {
        (finding["collective"], finding["dtype"]): sorted(
            (row["bytes"], row["busbw"]) for row in finding["rows"] if "busbw" in row
        )
        for finding in measured
        if finding["ranks"] == num_ranks
    }
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return ""
    card = None if measured[0]["shared"] else find_card(measured[0]["card"])
    ticks = _ticks(max([value for _, value in points] + [card.link if card else 0.0]))
    first, last = min(size for size, _ in points), max(size for size, _ in points)

    def place(size: float, value: float) -> tuple[float, float]:
        return math.log(size / first) / math.log(max(last / first, 2)), value / ticks[-1]

    title = f"busbw by size, {num_ranks} ranks, 1e9 bytes per second"
    if measured[0]["shared"]:
        title += "; ranks share a device, so no speed has a meaning"
    bottom = AREA.top + AREA.height
    texts = [(title, 8, 18, "head")]
    sizes = [1 << power for power in range(64) if first <= 1 << power <= last and power % 2 == 0]
    texts += [(_size(size), AREA.at(*place(size, 0))[0], bottom + 20, "soft mid") for size in sizes]
    levels = [(f"{tick:g}", AREA.at(0, tick / ticks[-1])[1]) for tick in ticks]
    drawn = []
    if card:
        label = f"{card.wire} of {card.name}: {card.link:g}"
        where = AREA.points([place(first, card.link), place(last, card.link)])
        drawn.append({"name": label, "label": label, "look": "other torch", "x": 8, "y": 80, "points": where})
    for number, ((collective, dtype), curve) in enumerate(curves.items()):
        label = f"{collective}, {dtype}"
        look = LOOKS.get(collective, "other") + (" torch" if dtype != "float32" else "")
        where = AREA.points([place(*point) for point in curve])
        x, y = 8 + 300 * (number % 2), 40 + 20 * (number // 2)
        drawn.append({"name": label, "label": label, "look": look, "x": x, "y": y, "points": where})
    return str(PLOTS.curves(title, "bandwidth", AREA, bottom + 32, levels, texts, drawn))


def steps(findings: Sequence[Finding]) -> str:
    """A panel for each model, number of ranks and precision, each with a scale of its own. Empty without figures."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        if "all ms" in finding:
            name = f"{finding['size']}, {finding['ranks']} ranks, {finding['precision']}: ms"
            groups.setdefault(name, []).append(finding)
    panels, y = [], 24
    for name, lines in groups.items():
        ticks = _ticks(max(line["ms, range"][1] for line in lines))
        bars = [
            {"name": line["contender"], "look": _look(line["contender"]), "median": line["ms"],
             "low": line["ms, range"][0], "high": line["ms, range"][1]}
            for line in lines
        ]  # fmt: skip
        panels.append(PLOTS.panel(name, bars, 8, y, LEFT, ROW, ticks, _scale(ticks[-1])))
        y += GAP + ROW * len(bars)
    title = "Time of a training step; the thin line is from the shortest to the longest group of steps"
    return _document(title, y, panels) if panels else ""


def _document(title: str, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" viewBox="0 0 {WIDTH} {height}">'
    text = f'<text class="head" x="8" y="16">{title}</text>'
    return f"{head}\n<title>{title}</title>\n{PLOTS.style()}\n{text}\n{''.join(map(str, parts))}\n</svg>"


def _look(contender: str) -> str:
    return ("func" if "fully_shard" in contender else "orig") + (" torch" if contender.startswith("torch") else "")


def _scale(highest: float) -> Callable[[float], float]:
    return lambda value: LEFT + (WIDTH - LEFT - RIGHT) * value / highest


def _ticks(highest: float) -> list[float]:
    """Four to ten ticks from 0 to the first one that is not below ``highest``."""
    power = 10.0 ** math.floor(math.log10(max(highest, 1e-6)))
    step = next(power * share for share in (0.2, 0.5, 1.0, 2.0) if highest <= 8 * power * share)
    return [step * number for number in range(math.ceil(highest / step) + 1)]


def _size(size: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size >> power} {unit}"
    return str(size)
