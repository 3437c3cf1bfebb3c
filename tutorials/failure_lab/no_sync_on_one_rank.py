"""Accumulates gradients. Rank 0 has two short batches for each step, and rank 1 has a single long batch.

What will happen after rank 0 has computed its first gradient, which is not reduced?

    torchrun --nproc-per-node 2 tutorials/failure_lab/no_sync_on_one_rank.py
"""

import torch
from lab import batch, layers, on_two_ranks

from minifsdp import FullyShardedDataParallel as FSDP


def gradient(model, x):
    model(x).square().sum().backward()


# ---- the part to look at and to fix ----


def broken(rank):
    return [batch(0), batch(1)] if rank == 0 else [batch(2, rows=8)]


# ---- the experiment ----


def experiment(micro_batches, rank):
    model = FSDP(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        *early, last = micro_batches(rank)
        for x in early:
            with model.no_sync():
                gradient(model, x)
        gradient(model, last)
        optimizer.step()
        optimizer.zero_grad()


# ---- one way to fix it; try your own first ----


def fixed(rank):
    # Every rank has the same number of batches, so it issues the same all-gathers and reductions.
    return [batch(0), batch(1)] if rank == 0 else list(batch(2, rows=8).chunk(2))


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
