"""A model of two blocks, and the comparison of a program that trains it as a plain model and as a sharded one.

All ranks have the same batch, so the mean of the gradients over the ranks is the gradient of the plain model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spec_tests.harness import device
from spec_tests.models.kinds import shard
from spec_tests.models.values import full_values, named


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return x + self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    """Two blocks, which become units, and a head, which belongs to the root."""

    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(x))


def sharded(kind: str, plain: nn.Module) -> Any:
    """A copy of a `Net`, sharded in one of the ways of ``KINDS``."""
    return shard(kind, copy.deepcopy(plain), ["blocks.0", "blocks.1"])


def batch() -> Tensor:
    return torch.linspace(-1, 1, 32).view(4, 8).to(device())


def assert_trains_alike(kind: str, plain: nn.Module, program: Callable[[Any, Tensor], object]) -> None:
    """Trains a plain model and a sharded copy for two steps, and compares their weights.

    Args:
        kind: how the copy is sharded.
        plain: the model.
        program: runs forward and backward of a model with a batch.
    """
    plain.to(device())
    model = sharded(kind, plain)
    for net in (plain, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            program(net, batch())
            optimizer.step()
    torch.testing.assert_close(full_values(model), named(plain))
