"""Training steps on the ranks of a machine, which the step simulator also predicts, from a recorded run.

The page "Checked against published measurements" shows it.

Worked example, 95 ms predicted and 100 ms measured: an error of -5 %, within `AIM`.
"""

from __future__ import annotations

from typing import Any

from docs_build.reading.text import table
from docs_build.recording.records import of_record

NAME = "predicted-steps"
AIM = 10.0  # percent


def _error(row: dict[str, Any]) -> float:
    return 100 * float(row["predicted"] / row["measured"] - 1)


@of_record(NAME)
def summary(record: Any) -> str:
    """For each number of ranks, how many predictions are within `AIM`, and the largest errors."""
    said = []
    for ranks in sorted({row["num_ranks"] for row in record["rows"]}):
        errors = [_error(row) for row in record["rows"] if row["num_ranks"] == ranks]
        num_within = sum(abs(error) <= AIM for error in errors)
        said.append(
            f"With {ranks} ranks, {num_within} of {len(errors)} predictions are within {AIM:g} %. The errors are "
            f"{min(errors):+.1f} to {max(errors):+.1f} %."
        )
    return " ".join(said)


@of_record(NAME)
def steps(record: Any) -> str:
    """A row for each model, number of ranks and strategy, as Markdown."""
    rows = []
    for row in record["rows"]:
        predicted, measured, fastest, slowest = (
            f"{1e3 * row[kind]:.0f}" for kind in ("predicted", "measured", "fastest", "slowest")
        )
        times = [f"{predicted} ms", f"{measured} ms ({fastest} to {slowest})"]
        rows.append(
            [f"`{row['workload']}`", str(row["num_ranks"]), f"`{row['strategy']}`", *times, f"{_error(row):+.1f} %"]
        )
    heads = ["model", "ranks", "strategy", "predicted", "measured", "error"]
    repeats = f"{record['rounds']} rounds with {record['repeats']} steps each"
    about = (
        f"{record['date']}, {record['machine']}; medians of {repeats}. In brackets: the fastest and the slowest round."
    )
    return f"{table(heads, rows, 'lrlrrr')}\n\n{about}"
