"""The elements that each rank holds, drawn from the arithmetic of both layouts: a weight of (3, 2) and a bias of 3."""

import torch

from docs_build.templates import SKETCHES
from minifsdp.engine.flat_tensor import FlatSharding
from minifsdp.engine.shards import padded_shard_numel, shard_of

PARAMETERS = {"w": torch.Size((3, 2)), "b": torch.Size((3,))}
RANKS = range(2)
LEFT, CELL = 186, 30
# A label, "." for padding, and the rank that determines the colour.
Cells = list[tuple[str, int]]


def layouts() -> str:
    """The elements of each rank, in both layouts."""
    sent = {(name, rank): _sent(name, rank) for name in PARAMETERS for rank in RANKS}
    rows = [
        ("flat parameter", _flat_row()),
        ("per parameter: all-gathered", [cell for rank in RANKS for name in PARAMETERS for cell in sent[name, rank]]),
        ("per parameter: sorted", [cell for cells in sent.values() for cell in cells]),
    ]
    return SKETCHES.shardmap("The elements of each rank", "sends it", rows, LEFT, CELL)


def checkpoints() -> str:
    """The elements in each kind of state dict."""
    whole = [cell for cell in _flat_row() if cell[0] != "."]
    owner = dict(whole)
    rows = [("full: on every rank", whole)]
    for rank in RANKS:
        labels = [label for name in PARAMETERS for label, _ in _sent(name, rank) if label != "."]
        rows.append((f"sharded: on rank {rank}", [(label, owner[label]) for label in labels]))
    rows += [(f"local: on rank {rank}", [cell for cell in _flat_row() if cell[1] == rank]) for rank in RANKS]
    return SKETCHES.shardmap("What a state dict holds", "stores it while training", rows, LEFT, CELL)


def _flat_row() -> Cells:
    sharding = FlatSharding(tuple(shape.numel() for shape in PARAMETERS.values()), len(RANKS))
    labels = [f"{name}{n}" for name, shape in PARAMETERS.items() for n in range(shape.numel())]
    labels += ["."] * (sharding.padded_numel - sharding.numel)
    return [(label, place // sharding.shard_numel) for place, label in enumerate(labels)]


def _sent(name: str, rank: int) -> Cells:
    shape = PARAMETERS[name]
    numbers = torch.arange(shape.numel()).view(shape)
    labels = [f"{name}{n}" for n in shard_of(numbers, 0, len(RANKS), rank).flatten().tolist()]
    num_padding = padded_shard_numel(shape, 0, len(RANKS)) - len(labels)
    return [(label, rank) for label in [*labels, *["."] * num_padding]]
