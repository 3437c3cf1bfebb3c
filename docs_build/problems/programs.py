"""The answers of the chapter "What goes wrong in this program". The text is in ``programs.md``.

The figures are from the recorded output of the programs, or computed from it.
"""

import torch

from docs_build.problems.recorded import NUM_RANKS, line, said
from docs_build.problems.writing import Givens, Values
from minifsdp.engine.collectives import Scaling


def early_stop(g: Givens) -> Values:
    """A loop that ends at a different step on each rank."""
    return {"steps": said(g.name, r"stops after (\d+) steps")[0], "line": line(g.name, "if loss <")}


def rank_0_evaluates(g: Givens) -> Values:
    """A forward on one rank."""
    return {"line": line(g.name, "if rank ==")}


def counts_parameters(g: Givens) -> Values:
    """The number of elements of local shards."""
    parts = [int(said(g.name, r"has (\d+) parameters", rank)[0]) for rank in range(NUM_RANKS)]
    return {"first": parts[0], "second": parts[1], "total": sum(parts)}


def decay_groups(g: Givens) -> Values:
    """The dimensions of a flat parameter."""
    return {"decay": int(said(g.name, r"(\d+) parameters with weight decay")[0])}


def accumulates(g: Givens) -> Values:
    """A loss that is not divided by the number of micro-batches."""
    found, expected = map(float, said(g.name, r"is ([\d.]+), expected ([\d.]+)"))
    return {"ratio": round(found / expected, 1), "found": found, "expected": expected}


def plateau(g: Givens) -> Values:
    """A learning rate on each rank."""
    return {f"rate_{rank}": said(g.name, r"learning rate is (\S+)", rank)[0] for rank in range(NUM_RANKS)}


def batch_norm(g: Givens) -> Values:
    """The buffers of each rank."""
    return {f"first_{rank}": said(g.name, r"mean is (-?[\d.]+)", rank)[0] for rank in range(NUM_RANKS)}


def narrow_weights(g: Givens) -> Values:
    """Updates that are smaller than the distance between two numbers in bfloat16."""
    wide, total = map(int, said(g.name, r"(\d+) of (\d+) weights have changed in torch.float32"))
    narrow = int(said(g.name, r"(\d+) of \d+ weights have changed in torch.bfloat16")[0])
    return {"wide": wide, "narrow": narrow, "total": total, "distance": torch.finfo(torch.bfloat16).eps}


def root_first(g: Givens) -> Values:
    """The order in which modules are sharded."""
    return {"line": line(g.name, "fully_shard(model)"), "inner": line(g.name, "fully_shard(layer)")}


def clips_before_reduction(g: Givens) -> Values:
    """Clipping of gradients that are not reduced."""
    return {"line": said(g.name, r"py:(\d+): norm")[0], "divisor": Scaling.of(NUM_RANKS, torch.float32).after}
