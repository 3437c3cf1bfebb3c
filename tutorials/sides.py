"""The common parts of both sides of the migration table: the model, the training loop and the comparison.

``migrate.py`` contains the table. Each of its rows trains one model twice, once with each API. Each training gives a
`Run`: the losses, and the all-gathers, computations, frees and reductions of the last step, in order::

    AG  F  AG blocks.0  F blocks.0  FREE blocks.0  ...  RS blocks.0  FREE  RS

A row passes if the losses and the events of both runs are equal. On two ranks, the losses are equal to the last bit,
because the only sum over ranks is ``a + b``. With more ranks, the result depends on the order of the sum, and the two
APIs split their gradients at different places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from common import Block, Place
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minifsdp import trace

__all__ = [
    "KINDS",
    "NUM_STEPS",
    "ROWS",
    "WIDTH",
    "Model",
    "Run",
    "batch",
    "check",
    "compare",
    "grid",
    "line",
    "momentum",
    "plain",
    "row",
    "train",
]

WIDTH, NUM_BLOCKS, NUM_STEPS = 8, 3, 3
KINDS = ("AG", "F", "FREE", "RS", "AR")


class Model(nn.Module):
    """Blocks, each a unit, between two layers that belong to the root unit."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(..., WIDTH)`` to ``(..., 1)``. The root may compute in another dtype than its blocks."""
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x.to(self.enter.weight.dtype))

    def reset_parameters(self) -> None:
        """Sets the values of a model built on the meta device. They do not depend on the rank or on the sharding."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(0.5 / WIDTH)


@dataclass
class Run:
    """The result of a training with one API.

    Attributes:
        losses: this rank's loss of each step.
        events: the events of the last step, in order.
        held_back: how often the rate limiter blocked the CPU in that step.
    """

    losses: list[float] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    held_back: int = 0


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        ids: requirement IDs.
        old: the arguments of the wrapper.
        new: the arguments of the function.
        both: runs both APIs.
        num_ranks: the smallest number of ranks that it needs.
        differs: the intended difference in the order of events; ``""`` for none.
        exact: whether the losses are equal to the last bit on two ranks.
        rounding: the largest relative difference of the losses otherwise.
    """

    ids: tuple[str, ...]
    old: str
    new: str
    both: Callable[[Place], tuple[Run, Run]]
    num_ranks: int = 2
    differs: str = ""
    exact: bool = True
    rounding: float = 1e-5


ROWS: dict[str, Row] = {}


def row(*ids: str, old: str, new: str, **more: Any) -> Callable[..., Any]:
    """Adds a function to the table under its own name; see `Row` for the arguments."""

    def enter(both: Callable[[Place], tuple[Run, Run]]) -> Callable[[Place], tuple[Run, Run]]:
        ROWS[both.__name__] = Row(ids, old, new, both, **more)
        return both

    return enter


# --- what both sides have in common ---


def plain(place: Place, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().to(place.device)


def line(place: Place) -> DeviceMesh:
    return init_device_mesh(place.device.type, (place.num_ranks,))


def grid(place: Place) -> DeviceMesh:
    return init_device_mesh(place.device.type, (place.num_ranks // 2, 2), mesh_dim_names=("replicate", "shard"))


def batch(step: int, place: Place) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(step * place.num_ranks + place.rank)
    x = torch.randn(4, WIDTH, generator=dice)
    return x.to(place.device), x.sum(1, keepdim=True).sin().to(place.device)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(
    model: Any,
    place: Place,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    clip: Callable[[], Any] = lambda: None,
    steps: Iterable[int] = range(NUM_STEPS),
) -> Run:
    """The training loop, the same for both sides."""
    optimizer, run = optimizer or momentum(model), Run()
    for step in steps:
        x, target = batch(step, place)
        with trace.record() as recorder:
            loss = nn.functional.mse_loss(model(x).float(), target)
            loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
        run.events, run.held_back = recorder.order(*KINDS), recorder.count("WAIT")
    return run


# --- the comparison ---


def compare(old: Run, new: Run, *, exact: bool, rounding: float = 1e-5) -> None:
    """Checks that the losses are equal; to the last bit if ``exact``, since a sum of two numbers has no order.

    Raises:
        AssertionError: they differ.
    """
    tolerance = 0.0 if exact else rounding
    for step, (mine, other) in enumerate(zip(old.losses, new.losses, strict=True)):
        assert math.isclose(mine, other, rel_tol=tolerance), f"loss {step}: {mine} in FSDP1, {other} in FSDP2"


def check(name: str, place: Place) -> str:
    """Runs one row with both APIs and compares the results. Every rank must call it.

    Returns:
        Text that describes the result.

    Raises:
        AssertionError: the results differ, and the difference is not intended.
    """
    entry = ROWS[name]
    old, new = entry.both(place)
    compare(old, new, exact=entry.exact and place.num_ranks == 2, rounding=entry.rounding)
    if entry.differs:
        assert old.events != new.events, f"the order no longer differs: {entry.differs}"
    else:
        assert old.events == new.events, f"FSDP1: {' '.join(old.events)}; FSDP2: {' '.join(new.events)}"
    same = "equal losses, " + (entry.differs or f"the same {len(new.events)} events in the same order")
    return f"{', '.join(entry.ids):<15} {entry.old} -> {entry.new}\n{'':<15} {same}"
