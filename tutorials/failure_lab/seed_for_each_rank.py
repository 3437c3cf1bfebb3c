"""Every rank sets a different seed, so that dropout differs between ranks. Then it builds and shards the model.

What will happen? Which rank's weights does the sharded model start with?

    torchrun --nproc-per-node 2 tutorials/failure_lab/seed_for_each_rank.py
"""

import torch
from lab import WrongAnswerError, from_all_ranks, on_two_ranks
from torch import nn

from minifsdp import fully_shard

# ---- the part to look at and to fix ----


def broken(rank):
    torch.manual_seed(rank)
    return nn.Linear(8, 8)


# ---- the experiment ----


def experiment(build, rank):
    model = build(rank)
    initial = from_all_ranks(model.weight.detach().clone())
    fully_shard(model)
    whole = model.weight.full_tensor()
    same = [[torch.equal(row, other) for row, other in zip(whole, one, strict=True)] for one in initial]
    for number, rows in enumerate(same):
        if not all(rows):
            what = f"{sum(rows)} of the 8 rows"
            raise WrongAnswerError(f"the model has {what} that rank {number} has drawn, and the others from elsewhere")


# ---- one way to fix it; try your own first ----


def fixed(rank):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    torch.manual_seed(rank)  # Each rank draws different numbers from here on.
    return model


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
