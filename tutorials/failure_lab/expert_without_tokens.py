"""A router sends each token to one of two experts. In this batch, all tokens of rank 0 go to the first expert.

What will happen in backward? Both experts belong to one unit, so every rank all-gathers both.

    torchrun --nproc-per-node 2 tutorials/failure_lab/expert_without_tokens.py
"""

import torch
from lab import WrongAnswerError, batch, layers, on_two_ranks
from torch import nn

from minifsdp import fully_shard


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = layers(2)

    def forward(self, tokens, chosen):
        return self.experts[chosen](tokens).square().mean()


# ---- the part to look at and to fix ----


def broken():
    return fully_shard(Experts())


# ---- the experiment ----


def experiment(build, rank):
    model, plain = build(), Experts()
    model(batch(rank), chosen=rank).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    ((plain(batch(0), 0) + plain(batch(1), 1)) / 2).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for name, parameter in model.named_parameters():
        if not torch.allclose(parameter.full_tensor(), plain.get_parameter(name)):
            raise WrongAnswerError(f"after a step {name} differs from that of a single process")


# ---- one way to fix it; try your own first ----


def fixed():
    model = fully_shard(Experts())
    # The gradient of an expert without tokens is zero, and is reduced like any other.
    model.set_reduce_scatter_unused_params(True)
    return model


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
