"""Trains an epoch on 5 batches: 3 on rank 0 and 2 on rank 1. Then the ranks sum their losses.

What will happen after the second step? What does rank 1 do while rank 0 trains?

    torchrun --nproc-per-node 2 tutorials/failure_lab/uneven_batches.py
"""

import torch
import torch.distributed as dist
from lab import batch, layers, on_two_ranks

from minifsdp import FullyShardedDataParallel as FSDP

# ---- the part to look at and to fix ----


def broken(batches):
    return batches


# ---- the experiment ----


def experiment(as_long_as_all_have, rank):
    model = FSDP(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.zeros(1)
    for x in as_long_as_all_have([batch(number) for number in range(rank, 5, 2)]):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    dist.all_reduce(total)


# ---- one way to fix it; try your own first ----


def fixed(batches):
    left = iter(batches)
    while True:
        x = next(left, None)
        all_have_data = torch.tensor(float(x is not None))
        dist.all_reduce(all_have_data, dist.ReduceOp.MIN)
        if not all_have_data:
            return
        yield x


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
