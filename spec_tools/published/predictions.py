"""Predicts the published rows, and compares: ``docs/data/published-predictions.csv``.

Two constants of a card cannot be known from its data sheet: the share of the peak that large matrix products reach
(`Card.efficiency`), and how much computation slows down next to communication (`Card.slowdown`). They are fitted, for
each generation of card and software, on its rows with 8 GPUs, or 32 for H200. All other rows are predicted. No constant
belongs to a row.

The fit minimizes the mean of ``|log(predicted / measured)|``. It is a mean of absolute values, so a single row that the
model does not describe does not move the constants.

Worked example, MPT 7b on 8 A100 with 80 GB: 4,641 tokens per second are measured. A prediction of 4,780 is 3.0 percent
too fast.

Spec: CHECKED-01 to CHECKED-03.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from minifsdp_tools.simulate.recording import Recording
from minifsdp_tools.simulate.replay import replay
from minifsdp_tools.simulate.setup import Setup
from spec_tools.published.setups import Case, case_of, parts_of
from spec_tools.published.table import Row

__all__ = ["FILE", "QUANTITIES", "Constants", "fit", "lines_of", "load", "predict", "save"]

FILE = Path(__file__).resolve().parents[2] / "docs" / "data" / "published-predictions.csv"
COLUMNS = (
    "row",
    "quantity",
    "predicted",
    "measured",
    "error_percent",
    "fitted",
    "constants",
    "fitted_on",
    "network",
    "absent",
)
QUANTITIES = ("tokens_per_second", "tflops", "memory_gib")
SLOWDOWNS = (0.0, 0.1, 0.2, 0.3, 0.4)
# The bounds of the search for the efficiency, and the number of its steps. With 8 bits, products reach more.
EFFICIENCIES, STEPS = (0.2, 2.0), 14

Recordings = Mapping[Setup, Recording]
Line = dict[str, str]


class Constants(NamedTuple):
    """The fitted constants of a generation, see `minifsdp_tools.simulate.machine.Card`."""

    efficiency: float
    slowdown: float


def predict(case: Case, constants: Constants, recordings: Recordings) -> dict[str, float]:
    """The `QUANTITIES` of the simulated step of a row, and its seconds.

    ``tflops`` counts recomputed operations. ``memory_gib`` is the peak of allocated memory, with blocks that
    communication streams still use.
    """
    card = replace(case.card, efficiency=constants.efficiency, slowdown=constants.slowdown)
    seconds = operations = 0.0
    peaks = {}
    for setup, weight in parts_of(case.setup):
        result = replay(recordings[setup], card, case.network)
        seconds += weight * result.seconds
        operations += weight * result.seconds * result.hfu * card.matmul
        peaks[setup] = result.peak_held
    # The peak of two micro-batches is that of all following ones.
    few = replace(case.setup, accumulation=min(case.setup.accumulation, 2))
    peak = sum(weight * peaks[setup] for setup, weight in parts_of(few))
    tokens = case.setup.micro_batch * (case.setup.sequence or 0) * case.setup.accumulation
    return {
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tflops": operations / seconds / 1e12,
        "memory_gib": peak / 2**30,
    }


def fit(cases: Sequence[Case], recordings: Recordings) -> Constants:
    """The constants with the smallest mean error on the given rows, which belong to one generation.

    One row cannot determine two constants. Then the slowdown is 0.
    """

    def error(constants: Constants) -> float:
        ratios = (
            predict(case, constants, recordings)["tokens_per_second"] / (case.row.tokens_per_second or 0)
            for case in cases
        )
        return mean(abs(math.log(ratio)) for ratio in ratios)

    found = []
    for slowdown in SLOWDOWNS if len(cases) > 1 else (0.0,):
        low, high = EFFICIENCIES
        # The error has one minimum, so each step removes a third of the range.
        for _ in range(STEPS):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            if error(Constants(left, slowdown)) < error(Constants(right, slowdown)):
                high = right
            else:
                low = left
        found.append(Constants((low + high) / 2, slowdown))
    best = min(found, key=error)
    return Constants(round(best.efficiency, 3), best.slowdown)


def lines_of(rows: Sequence[Row], recordings: Recordings) -> Iterator[Line]:
    """A line for each quantity of each row, with its prediction or the reason why there is none."""
    found = {row.row: case_of(row) for row in rows}
    fitted: dict[str, list[Case]] = {}
    for case in found.values():
        if isinstance(case, Case) and case.is_fitted:
            fitted.setdefault(case.generation, []).append(case)
    constants = {generation: fit(cases, recordings) for generation, cases in fitted.items()}
    for name, case in found.items():
        if isinstance(case, str):
            yield {"row": name, "absent": case}
        else:
            names = [one.row.row for one in fitted[case.generation]]
            for line in _lines(case, constants[case.generation], recordings):
                yield {**line, "fitted_on": "; ".join(names)}


def _lines(case: Case, constants: Constants, recordings: Recordings) -> Iterator[Line]:
    prediction = predict(case, constants, recordings)
    for quantity in QUANTITIES:
        measured = getattr(case.row, quantity)
        if measured is None:
            continue
        # The error is that of the digits in the file.
        predicted = float(f"{prediction[quantity]:.5g}")
        yield {
            "row": case.row.row,
            "quantity": quantity,
            "predicted": str(predicted),
            "measured": str(measured),
            "error_percent": str(round(100 * (predicted / measured - 1), 2)),
            "fitted": "yes" if case.is_fitted and quantity != "memory_gib" else "",
            "constants": f"efficiency={constants.efficiency} slowdown={constants.slowdown}",
            "network": f"{case.network.within:.0f} {case.network.between:.0f}",
        }


def save(lines: Sequence[Line]) -> None:
    """Writes the file."""
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def load() -> list[Line]:
    """Reads the file."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
