"""The benchmarks as pictures, and the cost of an FSDP as the work grows.

``python -m spec_tools.benchmarks --record`` writes the record of the benchmarks, and ``python -m
spec_tools.benchmarks.growth --record`` that of growing work. Pictures without data in a record are left out. This
module computes the positions, and ``plots.svg.jinja`` defines the appearance. The colours are those of the timelines,
one for each kind of FSDP. minifsdp's lines are solid, torch's are pale or dashed.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from docs_build.drawing import pictures
from docs_build.recording.records import facts, of_record
from docs_build.templates import PLOTS

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
# Sizes of the bars, in pixels.
WIDTH, ROW, PANEL_GAP, LEFT, RIGHT = 840, 14, 46, 128, 24


class Area(NamedTuple):
    """The part of a picture with the curves, in pixels."""

    left: float
    top: float
    width: float
    height: float
    right: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        """A position in pixels, from fractions of the width and of the height, the latter from below."""
        return self.left + self.width * x, self.top + self.height * (1 - y)

    def points(self, shares: Sequence[tuple[float, float]]) -> str:
        """The positions of a curve."""
        return " ".join("{:.1f},{:.1f}".format(*self.at(x, y)) for x, y in shares)


GROWTH, MEMORY = Area(64, 70, 560, 240, 24), Area(48, 40, 776, 220, 16)


def _look(who: str) -> str:
    library, kind = who.split()[0], who.split()[-1]
    return KINDS.get(kind, "other") + (" torch" if library == "torch" else "")


def _curve(name: str, about: str, x: float, y: float, points: str) -> dict[str, Any]:
    """A curve, with the place of its legend."""
    return {"name": name, "label": name + about, "look": _look(name), "x": x, "y": y, "points": points}


# --- costs that grow: both axes are logarithmic, so a constant cost is a horizontal line ---


@of_record("growth")
def growth(record: Any, name: str, caption: str) -> str:
    """A plot with its caption; empty if the record is older than the plot.

    Args:
        record: of growing work.
        name: the cost and the growing quantity, as in ``calls units``.
        caption: the text below it.

    Raises:
        KeyError: there is no plot with that name.
    """
    cost, axis = name.split()
    title, values = f"{COSTS[cost]}, by {AXES[axis]}", record["axes"][axis]
    if not all(cost in point for points in record[axis].values() for point in points):
        return ""
    curves = {who: [point[cost] for point in points] for who, points in record[axis].items()}
    ticks = _ticks([number for costs in curves.values() for number in costs])
    across = _shares(values, values)
    bottom = GROWTH.top + GROWTH.height
    texts = [(title, 8, 18, "")]
    texts += [(value, GROWTH.at(x, 0)[0], bottom + 20, "soft mid") for value, x in zip(values, across, strict=True)]
    texts.append((f"{AXES[axis]} (both axes are logarithmic)", GROWTH.at(0.5, 0)[0], bottom + 40, "soft mid"))
    levels = [(f"{tick:g}", GROWTH.at(0, y)[1]) for tick, y in zip(ticks, _shares(ticks, ticks), strict=True)]
    drawn = []
    for number, (who, costs) in enumerate(curves.items()):
        points = GROWTH.points(list(zip(across, _shares(costs, ticks), strict=True)))
        drawn.append(_curve(who, "", 8 + 200 * (number % 3), 36 + 18 * (number // 3), points))
    picture = PLOTS.curves(title, "growth", GROWTH, bottom + 50, levels, texts, drawn)
    when, machine = facts(record)[:2]
    return pictures.figure(picture, caption, f"{when.capitalize()}, on the fake backend; {machine}.")


def _ticks(costs: Sequence[float]) -> list[float]:
    """Ticks at 1, 3, 10, 30 and so on, from the last one below all costs to the first one above them."""
    steps = [base * 10.0**power for power in range(-3, 7) for base in (1, 3)]
    low = max(step for step in steps if step <= min(costs))
    high = min(step for step in steps if step >= max(costs) and step > low)
    return [step for step in steps if low <= step <= high]


def _shares(values: Sequence[float], axis: Sequence[float]) -> list[float]:
    """The positions of values on a logarithmic axis: 10 is in the middle between 1 and 100."""
    return [math.log(value / axis[0]) / math.log(axis[-1] / axis[0]) for value in values]


# --- the benchmarks ---


@of_record("benchmarks")
def raced(record: Any, name: str, caption: str) -> str:
    """A picture with its caption; empty if the record has no data for it.

    Args:
        record: of the benchmarks.
        name: ``ratios``, or ``memory`` and the kind of FSDP, as in ``memory flat``.
        caption: the text below it.
    """
    what, _, kind = name.partition(" ")
    data = record.get(what, {})
    shown = {who: curve for who, curve in data.items() if what == "ratios" or who.split()[-1] == kind}
    if not shown:
        return ""
    picture = _ratios(shown) if what == "ratios" else _memory(shown, kind)
    when, machine = facts(record)[:2]
    return pictures.figure(picture, caption, f"{when.capitalize()}; {machine}.")


def _ratios(by_workload: dict[str, dict[str, dict[str, float]]]) -> str:
    """Panels in two columns."""
    highest = max(ratio["high"] for ratios in by_workload.values() for ratio in ratios.values())
    ticks = [number / 2 for number in range(math.ceil(2 * highest) + 1)]
    column, height = WIDTH // 2, PANEL_GAP + ROW * max(map(len, by_workload.values()))
    panels = [
        {
            "workload": workload,
            "x": 8 + column * (number % 2),
            "y": height * (number // 2),
            "bars": [{"name": name, "look": _look(name), **ratio} for name, ratio in ratios.items()],
        }
        for number, (workload, ratios) in enumerate(by_workload.items())
    ]

    def place(ratio: float) -> float:
        return LEFT + (column - LEFT - RIGHT) * ratio / ticks[-1]

    title = "Time of a step, divided by the time of torch's fastest FSDP"
    total = height * math.ceil(len(panels) / 2) + ROW
    return PLOTS.ratios(title, panels, WIDTH, total, LEFT, ROW, ticks, place)


def _memory(shown: dict[str, list[tuple[float, float]]], kind: str) -> str:
    """The curves of one kind of FSDP, torch's and minifsdp's."""
    highest = max(size for curve in shown.values() for _, size in curve)
    step = 10.0 ** math.floor(math.log10(highest)) / 2
    ticks = [step * number for number in range(math.ceil(highest / step) + 1)]
    bottom, right = MEMORY.top + MEMORY.height, MEMORY.left + MEMORY.width
    texts = [("MiB", 8, MEMORY.top - 12, "soft"), ("the step begins", MEMORY.left, bottom + 18, "soft")]
    drawn = []
    for number, (name, curve) in enumerate(shown.items()):
        most = f", at most {max(size for _, size in curve):.1f}"
        points = MEMORY.points([(moment, size / ticks[-1]) for moment, size in curve])
        drawn.append(_curve(name, most, MEMORY.left + 260 * number, 18, points))
    levels = [(f"{tick:g}", MEMORY.at(0, tick / ticks[-1])[1]) for tick in ticks]
    texts.append(("time within one step", MEMORY.at(0.5, 0)[0], bottom + 18, "soft mid"))
    texts.append(("and ends", right, bottom + 18, "soft end"))
    return PLOTS.curves(f"Live tensors during a step, {kind}", "memory", MEMORY, bottom + 28, levels, texts, drawn)
