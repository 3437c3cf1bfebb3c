"""The model of the recorded runs: two stages of two blocks, and a first and a last layer that belong to the root."""

from collections import OrderedDict

import torch
from torch import nn

FEATURES = 16


class Block(nn.Module):
    """Two linear layers with an activation between them, and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (rows, width) to (rows, width)."""
        return x + self.narrow(torch.tanh(self.widen(x)))


class Stage(nn.Sequential):
    """Two blocks, one after the other."""

    def __init__(self, width: int, first: int) -> None:
        super().__init__(OrderedDict({f"block{number}": Block(width) for number in (first, first + 1)}))


class Net(nn.Sequential):
    """A small regression: maps (rows, features) to (rows, 1)."""

    def __init__(self, width: int) -> None:
        first, stages = nn.Linear(FEATURES, width), {"stage0": Stage(width, 0), "stage1": Stage(width, 2)}
        super().__init__(OrderedDict(first=first, **stages, last=nn.Linear(width, 1)))


def batch(rows: int, rank: int, step: int) -> torch.Tensor:
    """The batch of a rank in a step; a different one for each rank and step."""
    return torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(1000 * step + rank))
