"""Small models for recordings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minifsdp_tools.simulate.models import Model
from minifsdp_tools.simulate.recording import Recording, record
from minifsdp_tools.simulate.setup import Setup
from minifsdp_tools.simulate.shapes import Shape

KINDS = ("AG", "F", "B", "RS", "FREE")
WIDTH = 64
SMALL = Shape(4, WIDTH, 4, 100, positions=32, sequence=32)


class Pair(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


def tower_module() -> nn.Sequential:
    return nn.Sequential(*(Pair() for _ in range(4)))


def tower(setup: Setup) -> Model:
    """Four units of two matrices, and one sample for each micro-batch."""
    with torch.device("meta"):
        module = tower_module()
    return Model(module, list(module), lambda model: model(torch.ones(1, WIDTH, device="meta")).sum(), 1)


def small(**options: object) -> Recording:
    """A recording of a small transformer on 8 ranks."""
    given: dict[str, object] = {"model": SMALL, "num_ranks": 8, **options}
    return record(Setup(**given))  # type: ignore[arg-type]


def tower_setup(api: str, strategy: str, num_ranks: int) -> Setup:
    exact = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    model = "spec_tools.simulate.small:tower"
    return Setup(model, num_ranks, num_ranks // 2, api, strategy, optimizer="sgd", **exact)  # type: ignore[arg-type]
