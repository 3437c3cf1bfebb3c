"""The model of the recorded runs: two stages of two blocks, and a first and a last layer that belong to the root."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Block", "Net", "Stage", "batch"]

FEATURES = 16


class Block(nn.Module):
    """Two linear layers with an activation between them, and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (rows, width) to (rows, width)."""
        return x + self.narrow(torch.tanh(self.widen(x)))


class Stage(nn.Module):
    """Two blocks, one after the other."""

    def __init__(self, width: int, first: int) -> None:
        super().__init__()
        for number in (first, first + 1):
            self.add_module(f"block{number}", Block(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (rows, width) to (rows, width)."""
        for block in self.children():
            x = block(x)
        return x


class Net(nn.Module):
    """A small regression."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.stage0, self.stage1 = Stage(width, 0), Stage(width, 2)
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (rows, features) to (rows, 1)."""
        return self.last(self.stage1(self.stage0(self.first(x))))


def batch(rows: int, rank: int, step: int) -> torch.Tensor:
    """The batch of a rank in a step; a different one for each rank and step."""
    return torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(1000 * step + rank))
