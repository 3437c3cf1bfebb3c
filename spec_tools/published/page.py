"""The tables of ``docs/tools/simulator-checked.md``, from ``docs/data/published-predictions.csv``.

The text of the page is written manually. The text between two marks is replaced by these tables, and a test compares
them.

Spec: CHECKED-05.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from spec_tools.published.compare import Line, Statistics
from spec_tools.published.setups import ASSUMED

__all__ = ["PAGE", "inserted", "tables"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tools" / "simulator-checked.md"
BEGIN, END = "<!-- predictions: begin -->", "<!-- predictions: end -->"
# The largest errors that count as good, in percent.
TIME_BOUND, MEMORY_BOUND = 15.0, 5.0


def tables(lines: Sequence[Line]) -> str:
    """All tables."""
    times = [line for line in lines if line.quantity and line.quantity != "memory_gib"]
    memory = [line for line in lines if line.quantity == "memory_gib"]
    mosaicml = [line for line in times if line.row.startswith("mosaicml")]
    others = [line for line in times if not line.row.startswith("mosaicml")]
    parts = [
        "### Summary",
        _summary(
            [
                ("time, all rows", times, TIME_BOUND),
                ("time, MosaicML", mosaicml, TIME_BOUND),
                ("time, other sources", others, TIME_BOUND),
                ("memory", memory, MEMORY_BOUND),
            ]
        ),
        "### Rows with a larger error",
        _table(line for line in [*times, *memory] if line.is_prediction and _is_far(line)),
        "### Time",
        "A row on which the constants were fitted has the mark *fitted*, and does not count above.",
        _table(times),
        "### Memory",
        _table(memory),
        "### Constants",
        _constants(times),
        "### Assumptions",
        _assumptions(lines),
        "### Rows without a prediction",
        _markdown(("row", "reason"), [(line.row, line.absent) for line in lines if line.absent]),
    ]
    return "\n\n".join(parts)


def inserted(text: str, lines: Sequence[Line]) -> str:
    """The text of the page with new tables.

    Raises:
        ValueError: if a mark is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} has no lines {BEGIN!r} and {END!r}, between which the tables belong")
    return f"{before}{BEGIN}\n\n{tables(lines)}\n\n{END}{after}"


def _is_far(line: Line) -> bool:
    bound = MEMORY_BOUND if line.quantity == "memory_gib" else TIME_BOUND
    return abs(line.error_percent or 0.0) > bound


def _summary(groups: Iterable[tuple[str, Sequence[Line], float]]) -> str:
    rows = []
    for name, lines, bound in groups:
        found = Statistics.of(lines, bound)
        rows.append((name, str(found.count), f"{found.median:.1f} %", f"{found.within:.0%} within {bound:.0f} %"))
    return _markdown(("quantity", "predicted rows", "median absolute error", "share"), rows)


def _table(lines: Iterable[Line]) -> str:
    rows = []
    for line in lines:
        unit = {"tokens_per_second": "tokens/s", "tflops": "TFLOP/s", "memory_gib": "GiB"}[line.quantity]
        error = f"{line.error_percent:+.1f} %" + (", fitted" if line.fitted else "")
        rows.append((line.row, f"{line.predicted:,.6g} {unit}", f"{line.measured:,.6g} {unit}", error))
    return _markdown(("row", "predicted", "measured", "error"), rows)


def _constants(lines: Iterable[Line]) -> str:
    found = dict.fromkeys((line.constants.replace("=", " "), line.fitted_on) for line in lines)
    return _markdown(("constants", "fitted on"), list(found))


def _assumptions(lines: Iterable[Line]) -> str:
    used = {name for line in lines for name in line.assumed.split("; ") if name}
    return "\n".join(f"* *{name}*: {text}" for name, text in ASSUMED.items() if name in used)


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
