"""A small model, sharded in each way, for programs that use parameters in unusual ways.

Each program runs on a plain model and on the sharded model. Both ranks have the same batch, so the mean of the
gradients over the ranks equals the gradient of the plain model.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from spec_tests.harness import device
from spec_tests.models.kinds import KINDS, shard


class Net(nn.Module):
    """Inner units, and parameters of the root's unit before and after them."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks or (nn.Linear(8, 8), nn.Linear(8, 8)))
        for parameter in self.blocks.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, *self.blocks):
            x = torch.tanh(block(x))
        return self.head(x)


THREE = ("flat FULL_SHARD", "original FULL_SHARD", "fully_shard True")
# The inner blocks are units, or the whole model is one unit.
ALL = [*KINDS, *(f"{kind} one unit" for kind in THREE)]


def sharded(kind: str, model: Any, **options: Any) -> Any:
    """Shards a `Net` or another model with ``blocks``."""
    units = [] if kind.endswith("one unit") else [f"blocks.{index}" for index in range(len(model.blocks))]
    return shard(kind.removesuffix(" one unit"), model, units, **options)


def pair(kind: str, plain: nn.Module) -> tuple[Any, Any]:
    """The plain model, and a sharded copy."""
    plain.to(device())
    return plain, sharded(kind, copy.deepcopy(plain))


def batch() -> Tensor:
    return torch.linspace(-1, 1, 32).view(4, 8).to(device())


def backward(model: nn.Module) -> None:
    model(batch()).square().mean().backward()


def train(*models: nn.Module, num_steps: int = 2) -> None:
    """Trains each model on the same batch."""
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(num_steps):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()


def mask(gradient: Tensor) -> Tensor:
    """A hook that multiplies each element of a gradient by another factor."""
    factors = torch.linspace(0, 1, gradient.numel(), dtype=gradient.dtype, device=gradient.device)
    return gradient * factors.view(gradient.shape)
