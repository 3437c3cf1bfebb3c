"""The cost of an FSDP as the work grows: plots and a table, drawn from `RECORD` while the site is built.

``python -m spec_tests.benchmarks.growth --record`` measures and writes the record. Both axes of a plot are logarithmic:
a cost that grows with the work is a slanted line, a constant cost is a horizontal one. The colours are those of the
timelines, one for each kind of FSDP; minifsdp's lines are solid, torch's are dashed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from docs_build import pictures
from docs_build.order import ROOT

__all__ = ["RECORD", "calls", "calls_by_ranks", "calls_for_a_parameter", "figure", "large", "overhead"]

RECORD = ROOT / "docs" / "data" / "growth.json"
AXES = {"units": "units", "ranks": "ranks", "parameters": "parameters in a unit"}
COSTS = {
    "calls": "Python calls for each unit and step",
    "overhead": "In addition to the plain model, for each unit and step, microseconds",
    "step": "A step, ms",
    "first": "The first step, ms",
    "construct": "Construction, ms",
    "state_dict": "state_dict(), ms",
}
KINDS = {"flat": "flat", "orig": "orig", "FSDP2": "func"}
# The point of that axis whose value the text mentions.
UNITS = 48
LEFT, TOP, WIDTH, HEIGHT = 64, 70, 560, 240

_STYLE = """
.growth{font:13px ui-sans-serif,system-ui,sans-serif;
--flat:#234f9b;--orig:#8f4d05;--func:#5c3296;--ink:#22272e;--soft:#667080;--line:#d9dee5}
[data-md-color-scheme=slate] .growth{
--flat:#9cc0f8;--orig:#f6bd72;--func:#cbaaf5;--ink:#e4e8ee;--soft:#98a2b0;--line:#343b45}
.growth text{fill:var(--ink)} .growth .soft{fill:var(--soft)} .growth .grid{stroke:var(--line)}
.growth .end{text-anchor:end} .growth .mid{text-anchor:middle}
.growth .curve{fill:none;stroke-width:2} .growth .torch{stroke-dasharray:5 4}
.growth .flat{stroke:var(--flat)} .growth .orig{stroke:var(--orig)} .growth .func{stroke:var(--func)}
"""


def _load() -> Any:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def figure(name: str, caption: str) -> str:
    """A plot with its caption; empty if the record is older than the plot.

    Args:
        name: the cost and the growing quantity, as in ``calls units``.
        caption: the text below it.

    Raises:
        KeyError: there is no plot with that name.
    """
    if not RECORD.exists():
        return "<p>No run is recorded.</p>"
    cost, axis = name.split()
    record, title = _load(), f"{COSTS[cost]}, by {AXES[axis]}"
    if not all(cost in point for points in record[axis].values() for point in points):
        return ""
    curves = {who: [point[cost] for point in points] for who, points in record[axis].items()}
    picture = _plot(title, record["axes"][axis], curves)
    facts = [fact.removeprefix("* ") for fact in record["circumstances"]]
    return pictures.figure(picture, caption, f"{facts[0].capitalize()}, on the fake backend; {facts[1]}.")


def _plot(title: str, values: Sequence[int], curves: dict[str, list[float]]) -> str:
    ticks = _ticks([cost for costs in curves.values() for cost in costs])
    across = [LEFT + WIDTH * share for share in _shares(values, values[0], values[-1])]
    heights = [TOP + HEIGHT * (1 - share) for share in _shares(ticks, ticks[0], ticks[-1])]
    parts = [f'<text x="8" y="18">{title}</text>', *_legend(curves)]
    for tick, y in zip(ticks, heights, strict=True):
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{LEFT + WIDTH}"/>')
        parts.append(f'<text class="soft end" x="{LEFT - 8}" y="{y + 4:.1f}">{tick:g}</text>')
    for value, x in zip(values, across, strict=True):
        parts.append(f'<text class="soft mid" x="{x:.1f}" y="{TOP + HEIGHT + 20}">{value}</text>')
    for who, costs in curves.items():
        shares = _shares(costs, ticks[0], ticks[-1])
        places = " ".join(f"{x:.1f},{TOP + HEIGHT * (1 - share):.1f}" for x, share in zip(across, shares, strict=True))
        parts.append(f'<polyline class="curve {_look(who)}" points="{places}"><title>{who}</title></polyline>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="growth" role="img" '
        f'viewBox="0 0 {LEFT + WIDTH + 24} {TOP + HEIGHT + 32}">'
        f"<title>{title}</title><style>{_STYLE}</style>{''.join(parts)}</svg>"
    )


def _legend(curves: dict[str, list[float]]) -> list[str]:
    parts = []
    for number, who in enumerate(curves):
        x, y = 8 + 200 * (number % 3), 36 + 18 * (number // 3)
        parts.append(f'<path class="curve {_look(who)}" d="M{x} {y - 4}h28"/><text x="{x + 36}" y="{y}">{who}</text>')
    return parts


def _look(who: str) -> str:
    library, kind = who.split()[0], who.split()[-1]
    return KINDS[kind] + (" torch" if library == "torch" else "")


def _ticks(costs: Sequence[float]) -> list[float]:
    """1, 3, 10, 30 and so on, from the last below all costs up to the first above them."""
    steps = [base * 10.0**power for power in range(-3, 7) for base in (1, 3)]
    low = max(step for step in steps if step <= min(costs))
    high = min(step for step in steps if step >= max(costs) and step > low)
    return [step for step in steps if low <= step <= high]


def _shares(values: Sequence[float], low: float, high: float) -> list[float]:
    """The positions of values between two others, on a logarithmic scale: 10 is in the middle between 1 and 100."""
    return [math.log(value / low) / math.log(high / low) for value in values]


def calls(library: str) -> str:
    """Python calls for a unit of two parameters, forward and backward: minimum and maximum of a library's kinds."""
    record = _load()
    point = record["axes"]["units"].index(UNITS)
    found = [points[point]["calls"] for who, points in record["units"].items() if who.split()[0] == library]
    return f"{min(found):.0f} to {max(found):.0f}"


def overhead(library: str) -> str:
    """Microseconds more than the plain model for that unit: flat, original, `fully_shard`."""
    record = _load()
    point = record["axes"]["units"].index(UNITS)
    found = [points[point].get("overhead") for who, points in record["units"].items() if who.split()[0] == library]
    return " / ".join("not recorded" if one is None else f"{one:.0f}" for one in found)


def calls_by_ranks(who: str) -> str:
    """Python calls of one contender, with the smallest and with the largest number of ranks."""
    first, *_, last = _load()["ranks"][who]
    return f"{first['calls']:.0f} to {last['calls']:.0f}"


def calls_for_a_parameter(who: str) -> str:
    """The cost of one more parameter in a unit."""
    record = _load()
    (fewest, *_, most), (first, *_, last) = record["axes"]["parameters"], record["parameters"][who]
    return f"{(last['calls'] - first['calls']) / (most - fewest):.0f}"


def large() -> str:
    """The model of 7 billion parameters, as a Markdown table."""
    if not RECORD.exists():
        return "No run is recorded."
    lines = ["| | seconds | MiB kept | MiB at most |", "|---|--:|--:|--:|"]
    for who, row in _load()["large"].items():
        lines.append(f"| {who} | {row['seconds']:.1f} | {row['stored']:.1f} | {row['peak']:.0f} |")
    return "\n".join(lines)
