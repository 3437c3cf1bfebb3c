"""The tables of measured and recorded values. ``tables.md.jinja`` has a macro for each."""

import csv
from statistics import median

from docs_build.drawing.pictures import events_of
from docs_build.recording.recordings import find
from docs_build.recording.records import DATA, load
from docs_build.templates import template
from minifsdp_tools.events import peak_gathered_bytes


def predictions() -> list[dict[str, str]]:
    """The published measurements with their predictions."""
    with (DATA / "published-predictions.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def prediction_errors() -> dict[str, list[float]]:
    """The absolute errors in percent of the rows that are not fitted, by quantity."""
    errors: dict[str, list[float]] = {}
    for line in predictions():
        if line["quantity"] and not line["fitted"]:
            source = "MosaicML" if line["row"].startswith("mosaicml") else "other sources"
            name = "memory" if line["quantity"] == "memory_gib" else f"time, {source}"
            errors.setdefault(name, []).append(abs(float(line["error_percent"])))
    return errors


TABLES = template(
    "pages/tables.md.jinja",
    load=load,
    median=median,
    events_of=events_of,
    find=find,
    peak=peak_gathered_bytes,
    predictions=predictions,
    prediction_errors=prediction_errors,
)
