"""Builds a model on the meta device, shards it, allocates its memory, and trains.

What will happen? Are all parameters allocated, and which values do they have?

    torchrun --nproc-per-node 2 tutorials/failure_lab/still_on_meta.py
"""

import torch
from lab import batch, on_two_ranks
from torch import nn

from minifsdp import fully_shard


def give_values(module):
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.1)


# ---- the part to look at and to fix ----


def broken(model):
    body, _ = model
    body.to_empty(device="cpu")
    give_values(body)


# ---- the experiment ----


def experiment(give_memory, rank):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    give_memory(model)
    loss = model(batch(rank)).square().mean()
    loss.backward()
    assert 0 < loss.item() < 10


# ---- one way to fix it; try your own first ----


def fixed(model):
    model.to_empty(device="cpu")
    give_values(model)


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
