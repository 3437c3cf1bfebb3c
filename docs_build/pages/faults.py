"""Attempts to break a training, as tables. Each table is made from a record while the site is built.

==================================================  ======================================
``python -m spec_tools.processes faults --record``    every fault at every stage
``python -m spec_tools.processes restarts --record``  under a real torchrun
``python -m spec_tools.processes kills --record``     kill -9 in a save
``python -m spec_tools.processes soak --record``      2,000 steps
==================================================  ======================================
"""

from collections.abc import Callable, Iterable
from typing import Any

from docs_build.reading.text import table as markdown
from docs_build.recording.records import of_record

Row = dict[str, Any]


def _stated(heads: Iterable[str], rows: Iterable[Iterable[object]], record: Any, words: str = "") -> str:
    """A table with the circumstances of its record below it."""
    return "\n".join([markdown(heads, rows, "lr"), "", *([words, ""] if words else []), *record["circumstances"]])


def _pivot(
    head: str, rows: list[Row], lines: str, columns: str, text: Callable[[list[Row]], object]
) -> tuple[list[str], list[list[Any]]]:
    """The heads and lines of a table.

    Args:
        head: of the first column.
        rows: of a record.
        lines, columns: the fields whose values name the lines and the columns.
        text: makes a cell from the rows with its line and column.
    """

    def name(row: Row, fields: str) -> str:
        return ", ".join(row[field] for field in fields.split())

    cells: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        cells.setdefault(name(row, lines), {}).setdefault(name(row, columns), []).append(row)
    heads = list(dict.fromkeys(name(row, columns) for row in rows))
    return [head, *heads], [[line, *(text(of_line.get(each, [])) for each in heads)] for line, of_line in cells.items()]


def _span(rows: list[Row]) -> str:
    """The shortest and the longest time until all ranks had reported a fault."""
    if any("problem" in row for row in rows):
        return "**wrong**"
    seconds = [row["seconds"] for row in rows]
    return f"{min(seconds):.1f} to {max(seconds):.1f}" if rows else ""


@of_record("faults")
def table(record: Any) -> str:
    """A row for each stage, a column for each fault; below it the runs and their dates."""
    rows = record["rows"]
    heads, lines = _pivot("a rank ... at", rows, "stage", "fault", _span)
    return _stated(heads, lines, record, f"{len(rows)} cells, on CPUs with gloo, with 2 ranks (hybrid: 4).")


@of_record("faults")
def by_kind(record: Any) -> str:
    """The same cells by kind of training: a row for each, over all stages."""
    return markdown(*_pivot("API and training mode", record["rows"], "kind", "fault", _span), "lr")


@of_record("restarts")
def restarts(record: Any) -> str:
    """A row for each fault and moment, a column for each kind of training."""

    def text(rows: list[Row]) -> str:
        (job,) = rows
        return "**wrong**" if "problem" in job else f"rank {job['victim']}: {job['seconds']} s"

    heads, lines = _pivot("a rank ...", record["rows"], "fault moment", "api strategy", text)
    return _stated(heads, lines, record)


@of_record("kills")
def kills(record: Any) -> str:
    """For each kind of moment the number of kills with each API."""
    rows = record["rows"]
    heads, lines = _pivot("killed", rows, "moment", "api", len)
    lost = sum("problem" in row for row in rows)
    return _stated(heads, lines, record, f"{len(rows)} kills. Checkpoints lost: {lost}.")


# ---- long runs ----

APIS = {"wrapped": "`FullyShardedDataParallel`", "composed": "`fully_shard`"}
PROGRAMS = ("programs", "calls", "refused", "hybrid", "mixed precision", "ended early", "findings")
# Each resource: its description, unit and divisor.
HELD = {
    "tensors": ("live tensors", "", 1),
    "tensor_bytes": ("their bytes", " kB", 1e3),
    "objects": ("objects of the package", "", 1),
    "queued": ("messages in queues", "", 1),
    "ledger": ("records in the collective log", "", 1),
    "descriptors": ("file descriptors", "", 1),
    "threads": ("threads", "", 1),
    "on_disk": ("files of checkpoints", "", 1),
    "python_bytes": ("Python's memory", " kB", 1e3),
    "resident_bytes": ("memory of the process", " MiB", 2**20),
}


@of_record("fuzz")
def fuzz(record: Any) -> str:
    """A row for each run of random programs."""
    rows = [
        [APIS[run["api"]] + ", ranks do different things" * run["apart"], *(f"{run[c]:,}" for c in PROGRAMS)]
        for run in record["runs"]
    ]
    total = sum(run["programs"] for run in record["runs"])
    return _stated(["through", *PROGRAMS], rows, record, f"{total:,} programs in all.")


@of_record("soak")
def soak(record: Any) -> str:
    """The resources of a rank early and late, a column for each count."""
    samples = [(run["api"], run[when]) for run in record["rows"] for when in ("first", "last")]
    rows = [
        [words, *(f"{sample[name] / divisor:,.0f}{unit}" for _, sample in samples)]
        for name, (words, unit, divisor) in HELD.items()
    ]
    return _stated(["on rank 0", *(f"`{api}`, after step {one['step']:,}" for api, one in samples)], rows, record)
