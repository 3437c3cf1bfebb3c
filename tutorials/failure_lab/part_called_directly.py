"""Wraps a model. To get its features, the script calls the first layer directly, without gradients.

What will happen? The whole model is one unit, and the layer belongs to it.

    torchrun --nproc-per-node 2 tutorials/failure_lab/part_called_directly.py
"""

import torch
from lab import batch, layers, on_two_ranks

from minifsdp import FullyShardedDataParallel as FSDP

# ---- the part to look at and to fix ----


def broken(model, x):
    return model.module[0](x)


# ---- the experiment ----


def experiment(features_of, rank):
    model = FSDP(layers())
    model(batch(rank)).square().mean().backward()
    with torch.no_grad():
        features = features_of(model, batch(rank))
    assert features.shape == (4, 8)


# ---- one way to fix it; try your own first ----


def fixed(model, x):
    with FSDP.summon_full_params(model, writeback=False):
        return model.module[0](x)


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
