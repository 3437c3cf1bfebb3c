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
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minifsdp_tools.simulate.shapes import SHAPES

__all__ = ["FILE", "Row", "computed_mfu", "load", "mfu_tolerance"]

FILE = Path(__file__).resolve().parents[2] / "docs" / "data" / "published.csv"
# FLOP/s of dense matrices in 16 bits; the first word of a card selects one. MosaicML calculates with 989.5e12.
PEAK_FLOPS = {"A100": 312e12, "H100": 989.5e12, "H200": 989.5e12}
# `llama3-7b` is the name of KempnerForge. Its stated MFU needs the parameters of Llama 3 8B.
MODELS = {**SHAPES, "llama3-7b": SHAPES["llama3-8b"]}


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


KINDS: dict[str, type] = {
    field.name: {"str": str, "int": int, "float": float}[str(field.type).partition(" ")[0]] for field in fields(Row)
}


def load() -> list[Row]:
    """All rows."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return [_row(cells) for cells in csv.DictReader(file)]


def _row(cells: dict[str, str]) -> Row:
    values: dict[str, Any] = {name: KINDS[name](text) if text else None for name, text in cells.items()}
    return Row(**values)


def computed_mfu(row: Row) -> float | None:
    """MFU in percent by the formula of the row's source; ``None`` if a number for it is missing."""
    shape = MODELS.get(row.model or "")
    peak = PEAK_FLOPS.get((row.card or "").partition(" ")[0])
    if shape is None or peak is None:
        return None
    if row.parameters is None or row.sequence_length is None or row.tokens_per_second is None:
        return None
    counted = row.parameters
    if row.source.startswith("torchtitan"):
        # It does not count the embedding, whose use is a look-up.
        counted -= shape.vocabulary * shape.width
    flops = 6 * counted + 12 * shape.layers * shape.width * row.sequence_length
    return 100 * flops * row.tokens_per_second / peak


def mfu_tolerance(row: Row) -> float:
    """The largest difference, in percent points, that the digits of the row's figures can cause.

    llm-foundry's table truncates tokens per second: 11,962 tokens on 32 GPUs are 373.8 for each, and the table has 373.
    Sources other than llm-foundry may divide by 989e12 instead of 989.5e12 FLOP/s, 0.05 percent less.
    """
    mfu, tokens = row.mfu or 0.0, row.tokens_per_second or 1.0
    if row.source.startswith("mosaicml"):
        return 0.005 + mfu / tokens
    # MFU has two decimals, or one.
    of_mfu = 0.005 if row.source.startswith("torchtitan") else 0.05
    return of_mfu + mfu * (0.5 / tokens + 0.0005)
