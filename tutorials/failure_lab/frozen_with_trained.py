"""Freezes all but the last layer of a model, and wraps the whole model in one call.

What will happen? The model becomes one flat tensor.

    torchrun --nproc-per-node 2 tutorials/failure_lab/frozen_with_trained.py
"""

import torch
from lab import batch, layers, on_two_ranks

from minifsdp import FullyShardedDataParallel as FSDP

# ---- the part to look at and to fix ----


def broken(model):
    return FSDP(model)


# ---- the experiment ----


def experiment(wrap, rank):
    model = layers()
    model[0].requires_grad_(False)
    model = wrap(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for _ in range(2):
        model(batch(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- one way to fix it; try your own first ----


def fixed(model):
    model[0] = FSDP(model[0])  # The frozen layer becomes a unit of its own.
    return FSDP(model)


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
