"""Accumulates the gradients of four batches without communication, then makes a step.

What will happen at the step? What is in ``.grad`` by then?

    torchrun --nproc-per-node 2 tutorials/failure_lab/step_without_reduction.py
"""

from contextlib import nullcontext

import torch
from lab import batch, layers, on_two_ranks

from minifsdp import FullyShardedDataParallel as FSDP

# ---- the place to look at, and to mend ----


def broken(model, number):
    return model.no_sync()


# ---- what is tried ----


def experiment(quietly, rank):
    model = FSDP(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        with quietly(model, number):
            model(batch(2 * number + rank)).square().mean().backward()
    optimizer.step()


# ---- one way to mend it; try yours first ----


def mended(model, number):
    return model.no_sync() if number < 3 else nullcontext()


if __name__ == "__main__":
    on_two_ranks(experiment, broken, mended)
