"""Accumulates the gradients of four batches without communication, then takes an optimizer step.

What will happen in the step? What does ``.grad`` contain at that time?

    torchrun --nproc-per-node 2 tutorials/failure_lab/step_without_reduction.py
"""

from contextlib import nullcontext

import torch
from lab import batch, layers, on_two_ranks

from minifsdp import FullyShardedDataParallel as FSDP

# ---- the part to look at and to fix ----


def broken(model, number):
    return model.no_sync()


# ---- the experiment ----


def experiment(quietly, rank):
    model = FSDP(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        with quietly(model, number):
            model(batch(2 * number + rank)).square().mean().backward()
    optimizer.step()


# ---- one way to fix it; try your own first ----


def fixed(model, number):
    return model.no_sync() if number < 3 else nullcontext()


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
