"""After the first step, rank 0 prepares the data of the next step. This takes 3.5 seconds. The time-out is 3 seconds.

What will happen on rank 1 at that time? What will happen on rank 0 afterwards?

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


# ---- the part to look at and to fix ----


def broken(rank):
    prepare(rank)


# ---- the experiment ----


def experiment(prepare_data, rank):
    model = FSDP(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            prepare_data(rank)


# ---- one way to fix it; try your own first ----


def fixed(rank):
    patient = dist.new_group(timeout=timedelta(seconds=30))
    prepare(rank)
    dist.barrier(patient)  # The faster rank waits here, with a longer timeout.


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
