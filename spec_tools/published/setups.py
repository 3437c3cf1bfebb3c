"""The simulated configuration of each published row: the setup, the card, the network, and what had to be assumed.

A source does not state everything. `ASSUMED` names each assumption and its reason, and `case_of` lists those of a row.
A row that lacks a setting for which there is no good assumption is not predicted. `Absent` has the reason.

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
from typing import Any

from minifsdp_tools.simulate.machine import CARDS, Card, Network
from minifsdp_tools.simulate.setup import Setup
from minifsdp_tools.simulate.shapes import SHAPES, Shape
from spec_tools.published.table import Row

__all__ = ["ASSUMED", "BLOCKS", "Absent", "Case", "case_of", "parts_of"]

# The numbers of recorded blocks.
BLOCKS = (4, 8)

# Values that a source does not state, and the reason for each.
ASSUMED = {
    "composer": (
        "Communication of MosaicML's rows in bfloat16, also with `DEFAULT`: composer's `DEFAULT` of the time set "
        "`param_dtype` and no `reduce_dtype`, and torch then reduces in `param_dtype`. `BACKWARD_POST` is composer's "
        "default, and llm-foundry's benchmark sets `limit_all_gathers=True` and checkpointing without reentrance. "
        "The stored parameters are in float32."
    ),
    "h100 network": "400 Gb/s for each GPU, 400 GB/s for a machine of 8, as torchtitan states for its machines.",
    "torchtitan precision": (
        "`param_dtype` bfloat16 and `reduce_dtype` float32, the defaults of torchtitan. torchtitan's selective "
        "checkpointing recomputes every second matrix product, and no attention."
    ),
    "attention": (
        "FlashAttention 2 reaches 60 % of the peak of an A100, and 34 % of that of an H100: about 190 of 312 and 335 "
        "of 989 TFLOP/s in its publication."
    ),
    "compiled": (
        "torch.compile fuses operators. The recording has the operators of eager mode, so rows with torch.compile have "
        "a constant of their own, and their memory is that of eager mode."
    ),
    "float8": "Matrix products count as in bfloat16, with a larger efficiency; all-gathers are in bfloat16.",
    "sequence 8192": "Sequences of 8,192 tokens, in torchtitan's configuration of Llama 3 8B.",
    "selective": "Selective checkpointing, as in torchtitan's configuration of Llama 3 8B.",
    "one micro-batch": "One micro-batch in a step.",
    "local batch 1": "The text of the source states a local batch size of 1, torch.compile and float8 for this table.",
    "ibm shapes": "The sizes of Llama 2 (34b: Code Llama), and sharding within machines of 8 with HSDP.",
    "ibm network": "400 Gb/s for a machine, in publications of IBM about its cluster.",
    "paper": (
        "Sequences of 2,048 tokens, full checkpointing, bfloat16, 2 Tb/s for a machine. TFLOP/s count recomputed "
        "operations, as usual for such models at the time."
    ),
}  # fmt: skip

_LLAMA2 = {
    "7b": Shape(32, 4096, 32, 32000, intermediate=11008, gated=True, biases=False, rms=True, sequence=4096),
    "13b": Shape(40, 5120, 40, 32000, intermediate=13824, gated=True, biases=False, rms=True, sequence=4096),
    "34b": Shape(48, 8192, 64, 32000, 8, intermediate=22016, gated=True, biases=False, rms=True, sequence=4096),
    "70b": Shape(80, 8192, 64, 32000, 8, intermediate=28672, gated=True, biases=False, rms=True, sequence=4096),
}
# The share of the peak that FlashAttention 2 reaches in forward and backward with causal masks, from its publication:
# about 190 of 312 TFLOP/s, and 335 of 989. It uses no instruction that is new in Hopper.
_ATTENTION = {"A100": 0.6, "H100": 0.34, "H200": 0.34}
_NVLINK = {"A100": 300e9, "H100": 450e9, "H200": 450e9}
# torchtitan's H100 have HBM2e memory of 96 GB and 2.4 TB/s, as the source states.
_TITAN_H100 = replace(CARDS["H100"], name="H100-96", bandwidth=2.4e12, memory=96e9)


@dataclass(frozen=True)
class Absent:
    """Why a row is not predicted."""

    reason: str


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
        assumed: names of `ASSUMED`.
    """

    row: Row
    setup: Setup
    card: Card
    network: Network
    generation: str
    is_fitted: bool
    assumed: tuple[str, ...]


def case_of(row: Row) -> Case | Absent:
    """The simulated configuration of a row, or the reason why there is none."""
    if " x TP" in (row.strategy or "") or "TP " in (row.strategy or ""):
        return Absent("tensor parallelism is not simulated")
    if "EP" in (row.strategy or ""):
        return Absent("expert parallelism is not simulated")
    source = row.source.partition(" ")[0]
    make = {"mosaicml/llm-foundry": _mosaicml, "torchtitan": _torchtitan, "IBM": _ibm, "PyTorch": _paper}.get(source)
    if make is not None:
        return make(row)
    return Absent(_REASONS[source])


_REASONS = {
    "KempnerForge": "the source does not state the micro-batch, nor the rate of the network",
    "cosmos-framework": "the source does not state the model",
}


def parts_of(setup: Setup) -> list[tuple[Setup, float]]:
    """Setups with few blocks and micro-batches, and their weights. The last setup is the largest."""
    shape = SHAPES[setup.model] if isinstance(setup.model, str) else setup.model
    few, more = BLOCKS
    by_blocks = [(few, (more - shape.layers) / (more - few)), (more, (shape.layers - few) / (more - few))]
    count = setup.accumulation
    by_count = [(1, 2.0 - count), (2, count - 1.0)] if count > 2 else [(count, 1.0)]
    return [
        (replace(setup, model=replace(shape, layers=layers), accumulation=number), weight * times)
        for number, times in by_count
        for layers, weight in by_blocks
    ]


def _case(
    row: Row, card: Card, between: float, generation: str, is_fitted: bool, assumed: tuple[str, ...], **given: Any
) -> Case:
    setup = Setup(num_ranks=row.num_gpus or 0, **given)
    family = (row.card or "").partition(" ")[0]
    network = Network(within=_NVLINK[family], between=between)
    return Case(
        row, setup, replace(card, attention=_ATTENTION[family]), network, generation, is_fitted, ("attention", *assumed)
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
        row.num_gpus == 8 and memory == "80",
        ("composer",) if is_a100 else ("composer", "h100 network"),
        model=row.model,
        api="fsdp1",
        micro_batch=row.micro_batch,
        sequence=row.sequence_length,
        accumulation=row.accumulation,
        checkpointing=row.checkpointing,
        reduce_dtype="bf16",
        backward_prefetch="BACKWARD_POST",
    )


def _torchtitan(row: Row) -> Case | Absent:
    card = (row.card or "").partition(" ")[0]
    if "262k" in row.row:
        return Absent("context parallelism is not simulated")
    assumed = ["torchtitan precision"]
    is_simple = row.row.startswith("simplefsdp")
    is_long = row.sequence_length == 32768
    kind = "compiled" if row.compiled == "yes" else "eager"
    if row.precision == "float8" or is_long:
        kind = "float8"
        assumed += ["compiled", "float8"]
    elif kind == "compiled":
        assumed += ["compiled"]
    if is_long:
        assumed += ["local batch 1"]
    if row.sequence_length is None:
        assumed += ["sequence 8192", "selective"]
    return _case(
        row,
        _TITAN_H100 if card == "H100" and not is_simple else CARDS[card],
        400e9,
        "SimpleFSDP H100" if is_simple else f"torchtitan {card} {kind}",
        row.num_gpus == (8 if card == "H100" else 32) and not is_long,
        tuple(assumed),
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
        False,
        ("ibm shapes", "ibm network", "one micro-batch"),
        model=_LLAMA2[row.model or ""],
        api="fsdp1",
        strategy="HYBRID_SHARD" if row.strategy == "HSDP" else "FULL_SHARD",
        micro_batch=row.micro_batch,
        sequence=row.sequence_length,
        checkpointing=row.checkpointing,
        reduce_dtype="bf16",
    )


def _paper(row: Row) -> Case | Absent:
    if row.tflops is None:
        return Absent("the source states no measurement that the simulator computes")
    return _case(
        row,
        CARDS["A100-80"],
        250e9,
        "MosaicML A100",
        False,
        ("paper", "one micro-batch"),
        model=replace(SHAPES["gpt3-175b"], vocabulary=50000),
        api="fsdp1",
        micro_batch=row.micro_batch,
        sequence=2048,
        checkpointing="full",
        reduce_dtype="bf16",
    )
