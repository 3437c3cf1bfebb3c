"""Predicts the published rows, and compares.

Two constants of a card cannot be known from its data sheet: the share of the peak that large matrix products reach
(`Card.efficiency`), and how much computation slows down next to communication (`Card.slowdown`). They are fitted, for
each generation of card and software, on its rows with 8 GPUs, or 32 for H200. All other rows are predicted. No constant
belongs to a row.

The fit minimizes the mean of ``|log(predicted / measured)|``. It is a mean of absolute values, so a single row that the
model does not describe does not move the constants.

Worked example, MPT 7b on 8 A100 with 80 GB: 4,641 tokens per second are measured. A prediction of 4,780 is 3.0 percent
too fast.

Spec: CHECKED-01 to CHECKED-05.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

from minifsdp_tools.simulate.recording import Recording
from minifsdp_tools.simulate.replay import replay
from minifsdp_tools.simulate.setup import Setup
from spec_tools.published.setups import Absent, Case, case_of, parts_of
from spec_tools.published.table import Row

__all__ = ["FILE", "Line", "Prediction", "Statistics", "compare", "fit", "load", "predict", "save"]

FILE = Path(__file__).resolve().parents[2] / "docs" / "data" / "published-predictions.csv"
GIB = 2**30
SLOWDOWNS = (0.0, 0.1, 0.2, 0.3, 0.4)
# The bounds of the search for the efficiency, and the number of its steps. With 8 bits, products reach more.
EFFICIENCIES, STEPS = (0.2, 2.0), 14


@dataclass(frozen=True)
class Constants:
    """The fitted constants of a generation.

    Attributes:
        efficiency, slowdown: see `minifsdp_tools.simulate.machine.Card`.
        fitted_on: the names of the rows.
    """

    efficiency: float
    slowdown: float
    fitted_on: tuple[str, ...]


@dataclass(frozen=True)
class Prediction:
    """The prediction of the simulator for a row.

    Attributes:
        seconds: of an optimizer step.
        tokens_per_second: of one GPU.
        tflops: TFLOP/s of one GPU, with recomputed operations.
        memory_gib: the peak of allocated memory, with blocks that communication streams still use.
        exposed: the share of the step in which computation waits for communication.
    """

    seconds: float
    tokens_per_second: float
    tflops: float
    memory_gib: float
    exposed: float


@dataclass(frozen=True)
class Line:
    """A line of the file: a predicted quantity of a row, or the reason why there is none.

    Attributes:
        row: the name of the row in ``published.csv``.
        quantity: the column of ``published.csv`` that is predicted.
        predicted, measured: its values.
        error_percent: ``100 * (predicted / measured - 1)``.
        fitted: whether the generation's constants were fitted on this row.
        constants: the fitted constants.
        fitted_on: the rows on which they were fitted.
        network: bytes per second of a rank within a machine, and of a machine.
        assumed: names of `spec_tools.published.setups.ASSUMED`.
        absent: the reason why nothing is predicted.
    """

    row: str
    quantity: str = ""
    predicted: float | None = None
    measured: float | None = None
    error_percent: float | None = None
    fitted: str = ""
    constants: str = ""
    fitted_on: str = ""
    network: str = ""
    assumed: str = ""
    absent: str = ""

    @property
    def is_prediction(self) -> bool:
        """Whether the line counts in the statistics: it has a prediction that was not fitted on its row."""
        return self.error_percent is not None and not self.fitted


def predict(case: Case, constants: Constants, recordings: Mapping[Setup, Recording]) -> Prediction:
    """The simulated step of a row."""
    card = replace(case.card, efficiency=constants.efficiency, slowdown=constants.slowdown)
    seconds = operations = exposed = 0.0
    peaks = []
    for setup, weight in parts_of(case.setup):
        result = replay(recordings[setup], card, case.network)
        seconds += weight * result.seconds
        operations += weight * result.seconds * result.hfu * card.matmul
        exposed += weight * result.exposed_seconds
        peaks.append(result.peak_held)
    tokens = case.setup.micro_batch * (case.setup.sequence or 0) * case.setup.accumulation
    return Prediction(
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        tflops=operations / seconds / 1e12,
        memory_gib=_peak(case.setup, *peaks[-2:]) / GIB,
        exposed=exposed / seconds,
    )


def _peak(setup: Setup, few: int, more: int) -> float:
    """The peak with all blocks; that of one micro-batch is the same as that of the following ones."""
    (_, weight_of_few), (_, weight_of_more) = parts_of(replace(setup, accumulation=min(setup.accumulation, 2)))
    return weight_of_few * few + weight_of_more * more


# ---- fit ------------------------------------------------------------------------------------------------------------


def fit(cases: Sequence[Case], recordings: Mapping[Setup, Recording]) -> Constants:
    """The constants with the smallest mean error on the given rows, which belong to one generation.

    One row cannot determine two constants. Then the slowdown is 0.
    """
    slowdowns = SLOWDOWNS if len(cases) > 1 else (0.0,)
    names = tuple(case.row.row for case in cases)
    found = [_best_efficiency(cases, recordings, slowdown) for slowdown in slowdowns]
    _, efficiency, slowdown = min(found)
    return Constants(round(efficiency, 3), slowdown, names)


def _best_efficiency(
    cases: Sequence[Case], recordings: Mapping[Setup, Recording], slowdown: float
) -> tuple[float, float, float]:
    """The smallest error, and its efficiency. The error has one minimum, so each step removes a third of the range."""
    low, high = EFFICIENCIES
    for _ in range(STEPS):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if _error(cases, recordings, left, slowdown) < _error(cases, recordings, right, slowdown):
            high = right
        else:
            low = left
    middle = (low + high) / 2
    return _error(cases, recordings, middle, slowdown), middle, slowdown


def _error(cases: Sequence[Case], recordings: Mapping[Setup, Recording], efficiency: float, slowdown: float) -> float:
    total = 0.0
    for case in cases:
        measured = case.row.tokens_per_second
        assert measured is not None
        predicted = predict(case, Constants(efficiency, slowdown, ()), recordings).tokens_per_second
        total += abs(math.log(predicted / measured))
    return total / len(cases)


# ---- comparison -----------------------------------------------------------------------------------------------------


def compare(rows: Iterable[Row], recordings: Mapping[Setup, Recording]) -> list[Line]:
    """A line for each quantity of each row."""
    rows = list(rows)
    found = {row.row: case_of(row) for row in rows}
    cases = [case for case in found.values() if isinstance(case, Case)]
    fitted: dict[str, list[Case]] = {}
    for case in cases:
        if case.is_fitted:
            fitted.setdefault(case.generation, []).append(case)
    constants = {generation: fit(chosen, recordings) for generation, chosen in fitted.items()}
    lines: list[Line] = []
    for row in rows:
        one = found[row.row]
        if isinstance(one, Absent):
            lines.append(Line(row.row, absent=one.reason))
        else:
            lines += lines_of(one, constants[one.generation], recordings)
    return lines


def lines_of(case: Case, constants: Constants, recordings: Mapping[Setup, Recording]) -> list[Line]:
    """The lines of a row: its time, and its memory if the source states it."""
    prediction = predict(case, constants, recordings)
    common = Line(
        row=case.row.row,
        constants=f"efficiency={constants.efficiency} slowdown={constants.slowdown}",
        fitted_on="; ".join(constants.fitted_on),
        network=f"{case.network.within:.0f} {case.network.between:.0f}",
        assumed="; ".join(case.assumed),
    )
    lines = []
    for quantity in ("tokens_per_second", "tflops", "memory_gib"):
        measured = getattr(case.row, quantity)
        if measured is None:
            continue
        # The error is that of the digits in the file.
        predicted = float(f"{getattr(prediction, quantity):.5g}")
        is_time_of_fit = quantity != "memory_gib" and case.row.row in constants.fitted_on
        lines.append(
            replace(
                common,
                quantity=quantity,
                predicted=predicted,
                measured=measured,
                error_percent=round(error_percent(predicted, measured), 2),
                fitted="yes" if is_time_of_fit else "",
            )
        )
    return lines


def error_percent(predicted: float, measured: float) -> float:
    """How much larger the prediction is, in percent."""
    return 100 * (predicted / measured - 1)


@dataclass(frozen=True)
class Statistics:
    """The errors of predicted lines.

    Attributes:
        count: the number of lines.
        median: the median of the absolute errors, in percent.
        within: the share of lines whose absolute error is at most the bound.
    """

    count: int
    median: float
    within: float

    @classmethod
    def of(cls, lines: Iterable[Line], bound: float) -> Statistics:
        """The statistics of the predictions among the lines; fitted lines do not count."""
        errors = [abs(line.error_percent) for line in lines if line.is_prediction and line.error_percent is not None]
        return cls(len(errors), median(errors), sum(error <= bound for error in errors) / len(errors))


# ---- file -----------------------------------------------------------------------------------------------------------


def save(lines: Iterable[Line], path: Path = FILE) -> None:
    """Writes the file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = [field.name for field in fields(Line)]
        writer.writerow(names)
        for line in lines:
            values = [getattr(line, name) for name in names]
            writer.writerow(["" if value is None else value for value in values])


def load(path: Path = FILE) -> list[Line]:
    """Reads the file."""
    numbers = {"predicted", "measured", "error_percent"}
    lines = []
    with path.open(encoding="utf-8", newline="") as file:
        for cells in csv.DictReader(file):
            values = {
                name: (float(text) if text else None) if name in numbers else text for name, text in cells.items()
            }
            lines.append(Line(**values))  # type: ignore[arg-type]
    return lines
