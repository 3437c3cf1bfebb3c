"""The rows of ``docs/data/published.csv``: a published measurement in each line, with figures and facts only.

An empty cell means that the source does not state the value, and is ``None`` here. ``derived`` names the columns whose
values follow from other figures of the source: for instance, tokens per second of one GPU from those of all GPUs.

The *model FLOPs utilization* (MFU) of a row can be computed again from its tokens per second. In each token, forward
and backward use each parameter for 6 FLOPs. The attention adds ``12 * layers * width * sequence_length``. Worked
example, MPT 7b on 8 H100 with 2,048 tokens: ``6 * 6.659e9 + 12 * 32 * 4096 * 2048 = 43.17e9`` FLOPs, 10,643 tokens per
second, and 989.5e12 FLOP/s at peak: 46.44 %. torchtitan does not count the parameters of the embedding.

Spec: PUBLISHED-01 to PUBLISHED-04.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from spec_tools.published.models import LLAMAS, MPTS, Shape

__all__ = ["FILE", "Row", "computed_mfu", "load", "misfits", "mfu_tolerance", "shape_of", "uncheckable"]

FILE = Path(__file__).resolve().parents[2] / "docs" / "data" / "published.csv"
# FLOP/s of dense matrices in 16 bits; the first word of a card selects one. MosaicML calculates with 989.5e12.
PEAK_FLOPS = {"A100": 312e12, "H100": 989.5e12, "H200": 989.5e12}
TEXTS = ("row", "source", "source_row")


@dataclass(frozen=True)
class Row:
    """One published measurement.

    Attributes:
        row: a name that is unique in the file.
        source, source_row: the document, and the row in it.
        card: the GPU, as the source names it.
        num_gpus, gpus_per_machine: the number of GPUs.
        network: the network between machines, as the source states it.
        model, parameters: the model, and the number of its parameters.
        sequence_length, micro_batch, accumulation: tokens of a sequence, sequences in a micro-batch of a GPU, and
            micro-batches in a step.
        precision, checkpointing, compiled, strategy: settings; ``checkpointing`` is ``none``, ``full`` or
            ``selective``, and ``compiled`` is ``yes`` or ``no``.
        tokens_per_second: of one GPU.
        mfu, hfu: percent of the peak FLOP/s, by the FLOPs of the model, and including recomputation.
        tflops: TFLOP/s of one GPU.
        seconds_per_step: of an optimizer step.
        memory_gib: the largest memory of a GPU.
        derived: the columns that are not stated, but follow from other figures of the source.
    """

    row: str
    source: str
    source_row: str
    card: str | None
    num_gpus: int | None
    gpus_per_machine: int | None
    network: str | None
    model: str | None
    parameters: int | None
    sequence_length: int | None
    micro_batch: int | None
    accumulation: int | None
    precision: str | None
    checkpointing: str | None
    compiled: str | None
    strategy: str | None
    tokens_per_second: float | None
    mfu: float | None
    hfu: float | None
    tflops: float | None
    seconds_per_step: float | None
    memory_gib: float | None
    derived: str | None


def load(path: Path = FILE) -> list[Row]:
    """All rows.

    Raises:
        ValueError: the columns are not those of `Row`, a cell is not a number, or a row has a wrong value; the message
            names the line.
    """
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        names = [field.name for field in fields(Row)]
        if reader.fieldnames != names:
            raise ValueError(f"{path.name} has the columns {reader.fieldnames}, expected {names}")
        rows = [_row(cells, f"{path.name}, line {line}") for line, cells in enumerate(reader, 2)]
    repeated = {row.row for row in rows if sum(other.row == row.row for other in rows) > 1}
    if repeated:
        raise ValueError(f"{path.name}: the names {sorted(repeated)} occur more than once")
    return rows


def _row(cells: dict[str, str], where: str) -> Row:
    if None in cells or None in cells.values():
        raise ValueError(f"{where}: the line has another number of cells than the header")
    values: dict[str, object] = {}
    for field in fields(Row):
        text = cells[field.name]
        kind = str(field.type).removesuffix(" | None")
        try:
            values[field.name] = text if kind == "str" else int(text) if kind == "int" else float(text)
        except ValueError:
            if text:
                raise ValueError(f"{where}: {field.name} is {text!r}, which is not a number") from None
        if not text:
            values[field.name] = None
    row = Row(**values)  # type: ignore[arg-type]
    problems = list(_problems(row))
    if problems:
        raise ValueError(f"{where}: {'; '.join(problems)}")
    return row


def _problems(row: Row) -> Iterator[str]:
    """Values that no measurement can have."""
    yield from (f"{name} is missing" for name in TEXTS if getattr(row, name) is None)
    for field in fields(row):
        value = getattr(row, field.name)
        if isinstance(value, int | float) and value <= 0:
            yield f"{field.name} is {value}, which is not positive"
    for name in ("mfu", "hfu"):
        if (getattr(row, name) or 0) >= 100:
            yield f"{name} is {getattr(row, name)} percent"
    if row.checkpointing not in (None, "none", "full", "selective"):
        yield f"checkpointing is {row.checkpointing!r}"
    if row.compiled not in (None, "yes", "no"):
        yield f"compiled is {row.compiled!r}"
    if all(getattr(row, name) is None for name in ("tokens_per_second", "mfu", "tflops", "seconds_per_step")):
        yield "the row has no measurement of time"
    unknown = [name for name in (row.derived or "").split() if getattr(row, name, None) is None]
    if unknown:
        yield f"derived names {unknown}, which have no value"


# ---- model FLOPs utilization ----------------------------------------------------------------------------------------


def shape_of(row: Row) -> Shape | None:
    """The shape of the row's model; ``None`` if it is not known here."""
    return {**MPTS, **LLAMAS}.get(row.model or "")


def computed_mfu(row: Row) -> float | None:
    """MFU in percent by the formula of the row's source; ``None`` if a number for it is missing."""
    shape, peak = shape_of(row), PEAK_FLOPS.get((row.card or "").partition(" ")[0])
    if shape is None or peak is None:
        return None
    if row.parameters is None or row.sequence_length is None or row.tokens_per_second is None:
        return None
    # torchtitan does not count the embedding, whose use is a look-up.
    counted = row.parameters - (shape.vocabulary * shape.width if row.source.startswith("torchtitan") else 0)
    flops = 6 * counted + 12 * shape.layers * shape.width * row.sequence_length
    return 100 * flops * row.tokens_per_second / peak


def mfu_tolerance(row: Row) -> float:
    """The largest difference, in percent points, that the digits of the row's figures can cause.

    llm-foundry's table truncates tokens per second: 11,962 tokens on 32 GPUs are 373.8 for each, and the table has 373.
    Sources other than llm-foundry may divide by 989e12 instead of 989.5e12 FLOP/s, 0.05 percent less.
    """
    mfu, tokens, is_mosaicml = row.mfu or 0.0, row.tokens_per_second or 1.0, row.source.startswith("mosaicml")
    # MFU has two decimals, or one.
    of_mfu = 0.005 if is_mosaicml or row.source.startswith("torchtitan") else 0.05
    return of_mfu + mfu * (1 / tokens if is_mosaicml else 0.5 / tokens + 0.0005)


def misfits(rows: Iterable[Row]) -> list[tuple[Row, float]]:
    """The rows whose stated MFU differs from the computed one by more than rounding, with the computed one."""
    found = ((row, computed_mfu(row)) for row in rows if row.mfu is not None)
    return [
        (row, mfu)
        for row, mfu in found
        if mfu is not None and row.mfu is not None and abs(mfu - row.mfu) > mfu_tolerance(row)
    ]


def uncheckable(rows: Iterable[Row]) -> list[Row]:
    """The rows that state an MFU, but not all numbers that its formula needs."""
    return [row for row in rows if row.mfu is not None and computed_mfu(row) is None]
