"""The answers of the chapter "What goes wrong in this program". The text is in ``programs.md``.

The figures are from the recorded output of the programs, or computed from it.
"""

from typing import Any

import torch

from docs_build.problems.recorded import NUM_RANKS, line, said
from minifsdp.engine.collectives import Scaling

Values = dict[str, Any]


def early_stop(*, name: str = "early_stop") -> Values:
    """A loop that ends at a different step on each rank."""
    return {"steps": said(name, r"stops after (\d+) steps")[0], "line": line(name, "if loss <")}


def rank_0_evaluates(*, name: str = "rank_0_evaluates") -> Values:
    """A forward on one rank."""
    return {"line": line(name, "if rank ==")}


def counts_parameters(*, name: str = "counts_parameters") -> Values:
    """The number of elements of local shards."""
    parts = [int(said(name, r"has (\d+) parameters", rank)[0]) for rank in range(NUM_RANKS)]
    return {"first": parts[0], "second": parts[1], "total": sum(parts)}


def decay_groups(*, name: str = "decay_groups") -> Values:
    """The dimensions of a flat parameter."""
    return {"decay": int(said(name, r"(\d+) parameters with weight decay")[0])}


def accumulates(*, name: str = "accumulates") -> Values:
    """A loss that is not divided by the number of micro-batches."""
    found, expected = map(float, said(name, r"is ([\d.]+), expected ([\d.]+)"))
    return {"ratio": round(found / expected, 1), "found": found, "expected": expected}


def plateau(*, name: str = "plateau") -> Values:
    """A learning rate on each rank."""
    return {f"rate_{rank}": said(name, r"learning rate is (\S+)", rank)[0] for rank in range(NUM_RANKS)}


def batch_norm(*, name: str = "batch_norm") -> Values:
    """The buffers of each rank."""
    return {f"first_{rank}": said(name, r"mean is (-?[\d.]+)", rank)[0] for rank in range(NUM_RANKS)}


def narrow_weights(*, name: str = "narrow_weights") -> Values:
    """Updates that are smaller than the distance between two numbers in bfloat16."""
    wide, total = map(int, said(name, r"(\d+) of (\d+) weights have changed in torch.float32"))
    narrow = int(said(name, r"(\d+) of \d+ weights have changed in torch.bfloat16")[0])
    return {"wide": wide, "narrow": narrow, "total": total, "distance": torch.finfo(torch.bfloat16).eps}


def root_first(*, name: str = "root_first") -> Values:
    """The order in which modules are sharded."""
    return {"line": line(name, "fully_shard(model)"), "inner": line(name, "fully_shard(layer)")}


def clips_before_reduction(*, name: str = "clips_before_reduction") -> Values:
    """Clipping of gradients that are not reduced."""
    return {"line": said(name, r"py:(\d+): norm")[0], "divisor": Scaling.of(NUM_RANKS, torch.float32).after}
