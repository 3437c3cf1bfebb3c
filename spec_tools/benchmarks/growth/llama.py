"""The large model: a decoder in the shape of Llama 7B, built on meta, sharded for rank 0 of 64, and materialized.

The full model is too large to be built first: in float32 it has 25.1 GiB. On meta, a parameter is a shape without
memory, and the two front ends materialize it in different ways::

    FSDP1           wrapping materializes a whole unit, shards it and frees the other shards: one unit at a time
    fully_shard     shards the shapes; `to_empty` then materializes only the shards of this rank, 1/64 of the model

Each materialized weight is filled with a constant, because the system only provides memory when it is written. Random
values would mainly measure the generation of 6.7 billion numbers. Only shapes matter here, so there is no forward.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from spec_tests.oracles.gathering import wrap_units
from spec_tools.benchmarks.contenders import OURS, TORCH
from spec_tools.benchmarks.growth.measure import join, timed

__all__ = ["LARGE", "Block", "Decoder", "Shape", "large", "materialised", "stored_bytes"]

CPU = torch.device("cpu")


class Shape(NamedTuple):
    """Sizes of a decoder; ``inner`` is the width between the two ends of a gated layer."""

    blocks: int
    width: int
    inner: int
    vocabulary: int


LARGE = Shape(32, 4096, 11008, 32000)
SMALL = Shape(1, 64, 64, 64)
NUM_RANKS = 64


class Block(nn.Module):
    """Attention and the gated layer: seven matrices and two vectors."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.norm, self.other_norm = nn.RMSNorm(width), nn.RMSNorm(width)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.inner) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)


def _fill(module: nn.Module) -> None:
    """Materializes the module's own parameters."""
    module.to_empty(device=CPU, recurse=False)
    _write(module)


def _write(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            getattr(parameter, "_local_tensor", parameter).fill_(0.02)


def materialised(contender: str, shape: Shape) -> nn.Module:
    """The decoder, sharded for this rank by ``contender``, and materialized."""
    library: Any = importlib.import_module(TORCH if contender.startswith("torch") else OURS)
    with torch.device("meta"):
        model = Decoder(shape)
    if contender.endswith("FSDP2"):
        wrapped: nn.Module = wrap_units(model, (Block,), library.fully_shard)
        return wrapped.to_empty(device=CPU).apply(_write)
    options = {"device_id": CPU, "use_orig_params": contender.endswith("orig"), "param_init_fn": _fill}
    whole: nn.Module = wrap_units(model, (Block,), lambda unit: library.FullyShardedDataParallel(unit, **options))
    return whole


def stored_bytes(model: nn.Module) -> int:
    """The total size of the storages of this rank's parameters, each counted once."""
    locals_ = [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]
    storages = [tensor.untyped_storage() for tensor in locals_]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def large(contender: str) -> dict[str, float]:
    """Measures the large model; must run in a process of its own.

    Returns:
        ``seconds``; ``stored``, MiB that rank 0 keeps; and ``peak``, the maximum growth of the process in MiB.
    """
    join(NUM_RANKS)
    # Load all code first, because it also counts as memory of the process.
    materialised(contender, SMALL)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    milliseconds, model = timed(lambda: materialised(contender, LARGE))
    stored = stored_bytes(model) / 2**20
    return {"seconds": milliseconds / 1000, "stored": stored, "peak": _resident("VmHWM") - before}


def _resident(which: str) -> float:
    """MiB; Linux only. Writing 5 to ``clear_refs`` resets the maximum (``VmHWM``)."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"/proc/self/status has no {which}"
    return int(found[1]) / 1024
