"""Runs four equal blocks. In the first step they run in order. From the second step on, the order is random.

What will happen in the second step? Both ranks issue the same number of all-gathers, and all have the same size.

    torchrun --nproc-per-node 2 tutorials/failure_lab/order_changes_later.py
"""

import torch
from lab import WrongAnswerError, batch, layers, on_two_ranks
from torch import nn

from minifsdp import fully_shard


class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = layers(4)

    def forward(self, x, order):
        for number in order:
            x = torch.tanh(self.blocks[number](x))
        return x


# ---- the part to look at and to fix ----


def broken(rank):
    return torch.Generator().manual_seed(rank)


# ---- the experiment ----


def experiment(generator_for, rank):
    model, plain, order, generator = Shuffled(), Shuffled(), [0, 1, 2, 3], generator_for(rank)
    for module in (*model.blocks, model):
        fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (1, 2, 3):
        plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
        y = model(batch(rank), order)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not torch.allclose(y, plain(batch(rank), order)):
            raise WrongAnswerError(f"in step {step} this rank has computed with weights of other blocks")
        order = torch.randperm(4, generator=generator).tolist()


# ---- one way to fix it; try your own first ----


def fixed(rank):
    return torch.Generator().manual_seed(0)  # The order must be the same on all ranks.


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
