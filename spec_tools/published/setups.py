"""The simulated configuration of each published row: the setup, the card and the network.

A source does not state everything. The page "Checked against published measurements" lists the assumptions. A row that
lacks a setting for which there is no good assumption is not predicted, and `case_of` returns the reason.

Worked example, MPT 7b of MosaicML on 8 A100 with 80 GB: the wrapper with FULL_SHARD, micro-batches of 6 sequences, two
of them in each step, no checkpointing, parameters and gradients communicated in bfloat16.

All blocks of a model are equal, and so are all micro-batches after the first one. So a row is not recorded with all
of them. It is extrapolated from recordings with 4 and 8 blocks, and with 1 and 2 micro-batches. `parts_of` returns
these setups with their weights. Worked example, 32 blocks and one micro-batch: the time with 8 blocks, and 24 / 4 times
the difference to 4 blocks, so the weights are 7 and -6.

Spec: CHECKED-01, CHECKED-02.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from minifsdp_tools.simulate.machine import CARDS, Card, Network
from minifsdp_tools.simulate.setup import Setup
from minifsdp_tools.simulate.shapes import SHAPES, Shape
from spec_tools.published.table import Row

__all__ = ["BLOCKS", "Case", "case_of", "parts_of"]

# The numbers of recorded blocks.
BLOCKS = (4, 8)

_llama2 = partial(Shape, vocabulary=32000, gated=True, biases=False, rms=True, sequence=4096)
_LLAMA2 = {
    "7b": _llama2(32, 4096, 32, intermediate=11008),
    "13b": _llama2(40, 5120, 40, intermediate=13824),
    "34b": _llama2(48, 8192, 64, kv_heads=8, intermediate=22016),
    "70b": _llama2(80, 8192, 64, kv_heads=8, intermediate=28672),
}
# The share of the peak that FlashAttention 2 reaches in forward and backward with causal masks, from its publication:
# about 190 of 312 TFLOP/s, and 335 of 989. It uses no instruction that is new in Hopper.
_ATTENTION = {"A100": 0.6, "H100": 0.34, "H200": 0.34}
_NVLINK = {"A100": 300e9, "H100": 450e9, "H200": 450e9}
# torchtitan's H100 have HBM2e memory of 96 GB and 2.4 TB/s, as the source states.
_TITAN_H100 = replace(CARDS["H100"], name="H100-96", bandwidth=2.4e12, memory=96e9)


@dataclass(frozen=True)
class Case:
    """A row as the simulator sees it.

    Attributes:
        row: the published row.
        setup: the whole model and all micro-batches.
        card: the card, with constants from its data sheet.
        network: the network.
        generation: rows of the same name share fitted constants.
        is_fitted: whether the constants of the generation are fitted on this row.
    """

    row: Row
    setup: Setup
    card: Card
    network: Network
    generation: str
    is_fitted: bool


_REASONS = {
    "KempnerForge": "the source does not state the micro-batch, nor the rate of the network",
    "cosmos-framework": "the source does not state the model",
}


def case_of(row: Row) -> Case | str:
    """The simulated configuration of a row, or the reason why there is none."""
    strategy = row.strategy or ""
    if " x TP" in strategy or "TP " in strategy:
        return "tensor parallelism is not simulated"
    if "EP" in strategy:
        return "expert parallelism is not simulated"
    source = row.source.partition(" ")[0]
    if source in _REASONS:
        return _REASONS[source]
    if source == "mosaicml/llm-foundry":
        return _mosaicml(row)
    if source == "torchtitan":
        return _torchtitan(row)
    return _ibm(row) if source == "IBM" else _paper(row)


def parts_of(setup: Setup) -> list[tuple[Setup, float]]:
    """Setups with few blocks and micro-batches, and their weights. The last setup is the largest."""
    shape = SHAPES[setup.model] if isinstance(setup.model, str) else setup.model
    few, more = BLOCKS
    by_blocks = {few: (more - shape.layers) / (more - few), more: (shape.layers - few) / (more - few)}
    count = setup.accumulation
    by_count = {1: 2.0 - count, 2: count - 1.0} if count > 2 else {count: 1.0}
    return [
        (replace(setup, model=replace(shape, layers=layers), accumulation=number), weight * times)
        for number, times in by_count.items()
        for layers, weight in by_blocks.items()
    ]


def _case(row: Row, card: Card, between: float, generation: str, is_fitted: bool = False, **given: Any) -> Case:
    family = (row.card or "").partition(" ")[0]
    return Case(
        row,
        Setup(num_ranks=row.num_gpus or 0, **given),
        replace(card, attention=_ATTENTION[family]),
        Network(within=_NVLINK[family], between=between),
        generation,
        is_fitted,
    )


def _mosaicml(row: Row) -> Case:
    card, memory, _ = (row.card or "").split(" ")
    is_a100 = card == "A100"
    return _case(
        row,
        CARDS[f"A100-{memory}" if is_a100 else card],
        200e9 if is_a100 else 400e9,
        f"MosaicML {card}",
        # The chips of both A100 are the same. Rows of the smaller one are all predicted.
        is_fitted=row.num_gpus == 8 and memory == "80",
        model=row.model,
        api="fsdp1",
        micro_batch=row.micro_batch,
        sequence=row.sequence_length,
        accumulation=row.accumulation,
        checkpointing=row.checkpointing,
        reduce_dtype="bf16",
        backward_prefetch="BACKWARD_POST",
    )


def _torchtitan(row: Row) -> Case | str:
    if "262k" in row.row:
        return "context parallelism is not simulated"
    card = (row.card or "").partition(" ")[0]
    is_simple = row.row.startswith("simplefsdp")
    is_long = row.sequence_length == 32768
    kind = "compiled" if row.compiled == "yes" else "eager"
    if row.precision == "float8" or is_long:
        kind = "float8"
    return _case(
        row,
        _TITAN_H100 if card == "H100" and not is_simple else CARDS[card],
        400e9,
        "SimpleFSDP H100" if is_simple else f"torchtitan {card} {kind}",
        is_fitted=row.num_gpus == (8 if card == "H100" else 32) and not is_long,
        model="llama3-8b",
        micro_batch=row.micro_batch or 1,
        sequence=row.sequence_length or 8192,
        checkpointing=row.checkpointing or "selective",
    )


def _ibm(row: Row) -> Case:
    return _case(
        row,
        CARDS["A100-80"],
        50e9,
        "MosaicML A100",
        model=_LLAMA2[row.model or ""],
        api="fsdp1",
        strategy="HYBRID_SHARD" if row.strategy == "HSDP" else "FULL_SHARD",
        micro_batch=row.micro_batch,
        sequence=row.sequence_length,
        checkpointing=row.checkpointing,
        reduce_dtype="bf16",
    )


def _paper(row: Row) -> Case | str:
    if row.tflops is None:
        return "the source states no measurement that the simulator computes"
    return _case(
        row,
        CARDS["A100-80"],
        250e9,
        "MosaicML A100",
        model=replace(SHAPES["gpt3-175b"], vocabulary=50000),
        api="fsdp1",
        micro_batch=row.micro_batch,
        sequence=2048,
        checkpointing="full",
        reduce_dtype="bf16",
    )
