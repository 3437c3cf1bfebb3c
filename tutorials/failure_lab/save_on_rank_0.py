"""Trains a step, saves a full checkpoint on rank 0, because one file is enough, and trains another step.

What will happen? Which rank writes a file? What does the other rank do at that time?

    torchrun --nproc-per-node 2 tutorials/failure_lab/save_on_rank_0.py
"""

import io

import torch
from lab import batch, layers, on_two_ranks

from minifsdp import FullyShardedDataParallel as FSDP

# ---- the part to look at and to fix ----


def broken(model, rank):
    if rank == 0:
        torch.save(model.state_dict(), io.BytesIO())


# ---- the experiment ----


def experiment(save, rank):
    model = FSDP(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(batch(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        save(model, rank)


# ---- one way to fix it; try your own first ----


def fixed(model, rank):
    weights = model.state_dict()  # Every rank sends its shard.
    if rank == 0:
        torch.save(weights, io.BytesIO())


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
