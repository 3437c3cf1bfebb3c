"""Shards a small model with the wrapper, trains it for ten steps, and checks whether the loss has fallen.

What will happen? Does the model learn on both ranks, on one, or on none? Is there a warning or an error?

    torchrun --nproc-per-node 2 tutorials/failure_lab/optimizer_too_early.py
"""

import torch
from lab import WrongAnswerError, batch, layers, on_two_ranks

from minifsdp import FullyShardedDataParallel as FSDP

# ---- the part to look at and to fix ----


def broken():
    model = layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    return FSDP(model), optimizer


# ---- the experiment ----


def experiment(build, rank):
    model, optimizer = build()
    x = batch(rank)
    losses = []
    for _ in range(10):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"rank {rank}: the loss was {losses[0]:.4f} at first and {losses[-1]:.4f} at last", flush=True)
    if losses[-1] >= losses[0]:
        raise WrongAnswerError("the loss has not fallen")


# ---- one way to fix it; try your own first ----


def fixed():
    model = FSDP(layers())
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
