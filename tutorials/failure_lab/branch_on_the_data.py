"""A model for text and images. Each rank has its own example. Only the example of rank 0 has an image.

What will happen in the first forward? The two parts of the model have the same size.

    torchrun --nproc-per-node 2 tutorials/failure_lab/branch_on_the_data.py
"""

import torch
from lab import batch, layers, on_two_ranks
from torch import nn

from minifsdp import fully_shard


class TextAndImage(nn.Module):
    def __init__(self, look):
        super().__init__()
        self.see, self.read, self.last = *layers(2), nn.Linear(8, 8)
        self.look = look

    def forward(self, text, image):
        return self.last(self.look(self.see, image) + self.read(text))


# ---- the part to look at and to fix ----


def broken(see, image):
    return see(image) if image is not None else 0


# ---- the experiment ----


def experiment(look, rank):
    model = TextAndImage(look)
    for part in (model.see, model.read, model):
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        image = batch(step) if rank == 0 else None
        model(batch(10 + rank), image).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- one way to fix it; try your own first ----


def fixed(see, image):
    # The image branch runs on all ranks. Without an image it runs on zeros, and its output is multiplied by 0.
    return see(image) if image is not None else 0 * see(torch.zeros(4, 8))


if __name__ == "__main__":
    on_two_ranks(experiment, broken, fixed)
