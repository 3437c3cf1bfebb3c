"""The points: each axis varies one value, and the other values have common defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_tools.benchmarks.contenders import CONTENDERS, Contender
from spec_tools.benchmarks.workloads import Batch, Workload

__all__ = ["AXES", "FSDPS", "Layer", "Point", "points_of"]

WIDTH = 8
FSDPS: dict[str, Contender] = {contender.name: contender for contender in CONTENDERS if contender.shards}


class Layer(nn.Module):
    """A unit with ``num_parameters`` weights, applied one after the other."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(num_parameters))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


@dataclass(frozen=True)
class Point:
    """A model, sharded for rank 0 of a world.

    Attributes:
        units: number of units in addition to the root, which has no parameters of its own.
        ranks: number of ranks in the world.
        parameters: number of parameters in each unit.
    """

    units: int = 48
    ranks: int = 2
    parameters: int = 2

    def workload(self) -> Workload:
        """The point as a workload for the contenders of the race."""
        return Workload(
            name="growth", about="", build=lambda: nn.Sequential(*(Layer(self.parameters) for _ in range(self.units))),
            unit_class=Layer, draw=_rows, loss=F.mse_loss,
        )  # fmt: skip


def _rows(generator: torch.Generator) -> Batch:
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


AXES = {"units": (12, 48, 192, 768), "ranks": (2, 16, 128, 1024), "parameters": (1, 4, 16, 64)}


def points_of(axis: str) -> Iterator[Point]:
    """The points of one axis. The parameters axis uses only a quarter of the units, because they are larger."""
    middle = Point(units=12) if axis == "parameters" else Point()
    return (replace(middle, **{axis: value}) for value in AXES[axis])
