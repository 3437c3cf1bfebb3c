"""After the first step rank 0 prepares the data of the next one, for 3.5 seconds. A rank may be waited for for 3.

What will happen on rank 1 meanwhile? And on rank 0, when it comes back?

    torchrun --nproc-per-node 2 tutorials/failure_lab/slow_rank.py
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from lab import batch, layers, on_two_ranks

from minifsdp import FullyShardedDataParallel as FSDP


def prepare(rank):
    time.sleep(3.5 if rank == 0 else 0)


# ---- the place to look at, and to mend ----


def broken(rank):
    prepare(rank)


# ---- what is tried ----


def experiment(prepare_data, rank):
    model = FSDP(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            prepare_data(rank)


# ---- one way to mend it; try yours first ----


def mended(rank):
    patient = dist.new_group(timeout=timedelta(seconds=30))
    prepare(rank)
    dist.barrier(patient)  # Whoever is ready waits here, where there is more time.


if __name__ == "__main__":
    on_two_ranks(experiment, broken, mended)
