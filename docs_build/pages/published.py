"""The tables of the page "Checked against published measurements", from ``docs/data/published-predictions.csv``."""

import csv
from collections.abc import Callable
from statistics import median

from docs_build.reading.text import table
from docs_build.recording.records import DATA

Line = dict[str, str]
UNITS = {"tokens_per_second": "tokens/s", "tflops": "TFLOP/s", "memory_gib": "GiB"}


def _lines() -> list[Line]:
    with (DATA / "published-predictions.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def summary() -> str:
    """Errors of the predicted rows; rows of the fit do not count."""
    groups: dict[str, Callable[[Line], bool]] = {
        "time, all rows": lambda line: line["quantity"] != "memory_gib",
        "time, MosaicML": lambda line: line["row"].startswith("mosaicml"),
        "time, other sources": lambda line: line["quantity"] != "memory_gib" and not line["row"].startswith("mosaicml"),
        "memory": lambda line: line["quantity"] == "memory_gib",
    }
    rows = []
    for name, belongs in groups.items():
        predicted = [line for line in _lines() if line["quantity"] and not line["fitted"] and belongs(line)]
        errors = [abs(float(line["error_percent"])) for line in predicted]
        bound = 5 if name == "memory" else 15
        within = sum(error <= bound for error in errors) / len(errors)
        rows.append([name, len(errors), f"{median(errors):.1f} %", f"{within:.0%} within {bound} %"])
    return table(["quantity", "predicted rows", "median absolute error", "share"], rows, "lr")


def predictions() -> str:
    """A line for each predicted quantity."""
    rows = []
    for line in _lines():
        if line["quantity"]:
            predicted, measured = (
                f"{float(line[kind]):,.6g} {UNITS[line['quantity']]}" for kind in ("predicted", "measured")
            )
            fitted = ", fitted" if line["fitted"] else ""
            rows.append([line["row"], predicted, measured, f"{float(line['error_percent']):+.1f} %{fitted}"])
    return table(["row", "predicted", "measured", "error"], rows, "lr")


def constants() -> str:
    """The constants of each generation."""
    found = dict.fromkeys((line["constants"], line["fitted_on"]) for line in _lines() if line["quantity"])
    return table(["constants", "fitted on"], list(found), "ll")


def absent() -> str:
    """The rows without a prediction."""
    return table(["row", "reason"], [[line["row"], line["absent"]] for line in _lines() if line["absent"]], "ll")
