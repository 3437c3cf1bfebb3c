"""What test models are made of, the models that many tests share, and how they are made the same everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from spec_tests.harness import device

WIDTH = 6
UNITS = ("", "blocks.0", "blocks.1", "blocks.2", "blocks.3")
SIZES = (2, 4, 6, 8)


def seeded(build: Callable[[], nn.Module] | None = None, seed: int = 11) -> nn.Module:
    """What ``build`` makes, or a `Stack`, with the same values in every process and in every call.

    The global random state is left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (build or Stack)().to(device())


class Block(nn.Module):
    """The smallest unit: one linear layer and a bypass. 42 parameters with the usual width."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class MLP(nn.Module):
    """A unit of two linear layers around a ``tanh``, and a bypass. 280 parameters with the usual sizes.

    With sizes 3 and 4 it has 12 + 4 + 12 + 3 = 31 parameters, so that two ranks and four need an element of padding.
    Blocks of different sizes can be told apart by the number of elements that they gather and reduce.
    """

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Four blocks between two layers of the root: the model that most tests speak of.

    The root has 42 + 14 = 56 parameters of its own, which are used first and last.

    Args:
        width: of the blocks.
        hidden: makes the blocks `MLP`s of these sizes.
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
    """Blocks of 31 parameters in a root that has none of its own: it must not gather, and must not be missed."""
    return seeded(lambda: nn.Sequential(*(MLP(3, 4) for _ in range(num_blocks))))


class Nested(nn.Module):
    """A unit around a unit: its own parameters are needed before and after the inner one's whole life."""

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(width, width), MLP(width, hidden), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.inner(torch.tanh(self.before(x))))


class Tied(nn.Module):
    """One weight in the first layer and in the last, and a block between them: two names for one parameter."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(width, width), Block(width), nn.Linear(width, width)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))


class Twice(nn.Module):
    """Each block is called twice in a row, and its gradient is complete only after the second backward of it."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


class Uneven(nn.Module):
    """For saving and loading: two units inside the root, the second of which can be left out.

    Five rows do not divide by two, and ``scale`` has fewer elements than there are ranks.
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
    """A block with a batch norm: it has buffers that forward writes, one of them an integer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class Scale(nn.Module):
    """One parameter of any shape, also of no dimension, times the input: there are fewer elements than ranks."""

    def __init__(self, *shape: int, value: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, value))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight
