"""The layers of the test models, the models that many tests share, and how they get the same values everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from spec_tests.harness import device

WIDTH = 6
UNITS = ("", "blocks.0", "blocks.1", "blocks.2", "blocks.3")
SIZES = (2, 4, 6, 8)


def seeded(build: Callable[[], nn.Module] | None = None, seed: int = 11) -> nn.Module:
    """Returns the result of ``build``, or a `Stack`, with the same values in every process and in every call.

    The global random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (build or Stack)().to(device())


class Block(nn.Module):
    """The smallest unit: one linear layer with a residual connection. 42 parameters with the default width."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class MLP(nn.Module):
    """A unit of two linear layers around a ``tanh``, with a residual connection. 280 parameters with the default sizes.

    With sizes 3 and 4 it has 12 + 4 + 12 + 3 = 31 parameters, so two ranks and four ranks need one element of padding.
    Blocks of different sizes can be identified by the number of elements that they all-gather and reduce.
    """

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Four blocks between two layers of the root: the model that most tests use.

    The root has 42 + 14 = 56 parameters of its own, which are used first and last.

    Args:
        width: width of the blocks.
        hidden: if given, the blocks are `MLP`s with these hidden sizes.
    """

    def __init__(self, width: int = WIDTH, hidden: Iterable[int] = ()) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList([MLP(width, size) for size in hidden] or [Block(width) for _ in range(4)])
        self.leave = nn.Linear(width, 2)
        self.order: Iterable[int] = range(4)

    def forward(self, x: Tensor, order: Iterable[int] | None = None) -> Tensor:
        x = self.enter(x)
        for index in self.order if order is None else order:
            x = self.blocks[index](x)
        return self.leave(x)


def wide() -> nn.Module:
    """A `Stack` of blocks of different sizes."""
    return seeded(lambda: Stack(hidden=SIZES))


def chain(num_blocks: int = 3) -> nn.Sequential:
    """Blocks of 31 parameters in a root without parameters. Training must work although the root never all-gathers."""
    return seeded(lambda: nn.Sequential(*(MLP(3, 4) for _ in range(num_blocks))))


class Nested(nn.Module):
    """A unit around a unit: the outer unit's parameters are needed before and after the inner unit runs."""

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(width, width), MLP(width, hidden), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.inner(torch.tanh(self.before(x))))


class Tied(nn.Module):
    """One weight in the first layer and in the last, with a block in between: two names for one parameter."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(width, width), Block(width), nn.Linear(width, width)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


class Twice(nn.Module):
    """Calls each block twice in a row, so a block's gradient is complete only after its second backward."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


class Uneven(nn.Module):
    """For saving and loading: two units inside the root, the second of which can be skipped.

    Five rows are not divisible by two, and ``scale`` has fewer elements than there are ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.head = nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = self.first(x)
        return self.head(x if skip else self.second(x)) * self.scale


class NormedBlock(Block):
    """A block with a batch norm, which has buffers that forward writes. One of them is an integer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class Scale(nn.Module):
    """Multiplies the input by one parameter of any shape, possibly 0-D, with fewer elements than there are ranks."""

    def __init__(self, *shape: int, value: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight
