"""In a small language model, the embedding and the last layer share one matrix. Each module becomes a unit.

What will happen? Do the two weights stay equal during the training?

    torchrun --nproc-per-node 2 tutorials/failure_lab/tied_weights.py
"""

import torch
from lab import layers, on_two_ranks
from torch import nn

from minifsdp import fully_shard


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = nn.Embedding(16, 8), layers(), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(self.body(self.embed(words)))


# ---- the part to look at and to fix ----


def broken(model):
    fully_shard(model.embed)
    fully_shard(model.head)


# ---- the experiment ----


def experiment(shard_ends, rank):
    model = Language()
    fully_shard(model.body)
    shard_ends(model)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.arange(4) + rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.head.weight is model.embed.weight


# ---- one way to fix it; try your own first ----


def fixed(model):
    fully_shard([model.embed, model.head])  # Two modules, one unit.


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
