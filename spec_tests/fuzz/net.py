"""The model of the programs, and its batches: small, odd sizes, so that most rows are cut with padding.

::

    Net   enter (3 -> 4)   the root's own
          blocks.0 .. 2    each a unit; the middle one may contain another unit, and each may run twice
          leave (4 -> 2)   the root's own
          seen             a buffer: how many forwards there were

All in float64: rounding is far below any mistake, in whatever order sums are taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["NUM_BLOCKS", "WIDTH", "Block", "Net", "batch", "loss_of", "made", "optimizer_over"]

NUM_BLOCKS, WIDTH = 3, 4


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 5)
        self.inner = inner
        self.narrow = nn.Linear(5, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            x = self.inner(x)
        return x + self.narrow(torch.tanh(self.wide(x)))


class Net(nn.Module):
    def __init__(self, nested: bool = False, uses: int = 1) -> None:
        super().__init__()
        self.uses = uses
        self.enter = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(
            [Block(Block() if nested and number == 1 else None) for number in range(NUM_BLOCKS)]
        )
        self.leave = nn.Linear(WIDTH, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, skip: int | None = None, bang: int | None = None) -> Tensor:
        self.seen += 1
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            if number == bang:
                raise ValueError("bang")
            if number != skip:
                for _ in range(self.uses):
                    x = block(x)
        return self.leave(x)


def made(options: dict[str, Any]) -> Net:
    """The model with the same values on every rank."""
    torch.manual_seed(17)
    return Net(options.get("nested", False), options.get("uses", 1)).double()


def batch(number: int, rank: int, width: int = 3) -> Tensor:
    """The input number ``number`` of a rank."""
    generator = torch.Generator().manual_seed(1000 * number + 10 * rank + width)
    return torch.randn(3, width, generator=generator, dtype=torch.float64)


def loss_of(output: Tensor) -> Tensor:
    return torch.tanh(output).square().mean()


def optimizer_over(parameters: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    if options.get("optimizer") == "adam":
        # Adam divides by the size of a gradient; that of a tiny one is mostly rounding.
        return torch.optim.Adam(parameters, lr=1 / 32, eps=1 / 8)
    return torch.optim.SGD(parameters, lr=1 / 8, momentum=0.5)
