"""The model and the training loop of the programs in this folder.

Each program trains a small transformer twice on the same ranks: plainly, and in low precision. It prints both losses of
each step. The model predicts the next byte of a source file of Python. The global batch of a step does not depend on
the number of ranks.
"""

import argparse
import inspect
import pydoc
from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from minifsdp import fully_shard

BATCH, LENGTH, WIDTH, NUM_STEPS = 16, 32, 64, 30
OTHER_TEXT = pydoc


class Block(nn.Module):
    """Attention with two heads, and two layers with four times the width between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (sequences, tokens, WIDTH) to the same shape."""
        parts = self.heads(self.norms[0](x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.norms[1](x))))


def new_model() -> nn.Sequential:
    """The model, with the same initial weights on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))


def shard(model: nn.Sequential) -> nn.Sequential:
    """Shards each block, and the rest of the model."""
    for block in model[1:3]:
        fully_shard(block)
    return fully_shard(model)


def adam(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of the plain training."""
    return torch.optim.AdamW(weights, lr=3e-3)


def train(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adam,
    text: ModuleType = argparse,
    after_step: Callable[[nn.Module], object] = id,
) -> list[float]:
    """Trains a sharded model on the source of a module. Returns the mean loss over all ranks for each step."""
    optimizer = make_optimizer([weight for weight in model.parameters() if weight.requires_grad])
    data = torch.tensor(list(inspect.getsource(text).encode()))
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(NUM_STEPS):
        part = data[step * BATCH * LENGTH :][: BATCH * LENGTH + 1]
        x = part[:-1].view(BATCH, LENGTH).chunk(num_ranks)[rank]
        y = part[1:].view(BATCH, LENGTH).chunk(num_ranks)[rank]
        loss = functional.cross_entropy(model(x).mT, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(model)
        mean = loss.detach() / num_ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def compare(plain: Callable[[], list[float]], low: Callable[[], list[float]]) -> None:
    """Joins the ranks, runs both trainings, and prints their losses side by side."""
    dist.init_process_group("gloo")
    for step, (first, second) in enumerate(zip(plain(), low(), strict=True)):
        if dist.get_rank() == 0:
            print(f"step {step:2d}   plain {first:.4f}   low {second:.4f}", flush=True)
    dist.destroy_process_group()
