"""A small model, sharded in each way, for programs that use parameters in unusual ways.

Each program runs on a plain model and on the sharded model. Both ranks have the same batch, so the mean of the
gradients over the ranks equals the gradient of the plain model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spec_tests.harness import device
from spec_tests.models.kinds import KINDS, shard


class Net(nn.Module):
    """Inner units, and parameters of the root's unit before and after them."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(blocks or (nn.Linear(8, 8), nn.Linear(8, 8)))
        for parameter in self.blocks.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, *self.blocks):
            x = torch.tanh(block(x))
        result: Tensor = self.head(x)
        return result


# The inner blocks are units, or the whole model is one unit.
ALL = [*KINDS, *(f"{kind} one unit" for kind in ("flat FULL_SHARD", "original FULL_SHARD", "fully_shard True"))]
every_kind = pytest.mark.parametrize("kind", ALL)
named_kinds = pytest.mark.parametrize("kind", [kind for kind in ALL if not kind.startswith("flat")])
three_apis = pytest.mark.parametrize("kind", ["flat FULL_SHARD", "original FULL_SHARD", "fully_shard True"])


def sharded(kind: str, model: Any, **options: Any) -> Any:
    """Shards a `Net` or another model with ``blocks``."""
    units = [] if kind.endswith("one unit") else [f"blocks.{index}" for index in range(len(model.blocks))]
    return shard(kind.removesuffix(" one unit"), model, units, **options)


def batch() -> Tensor:
    return torch.linspace(-1, 1, 32).view(4, 8).to(device())


def backward(model: nn.Module) -> None:
    model(batch()).square().mean().backward()


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    backward(model)
    optimizer.step()


def weights_of(model: Any) -> dict[str, Tensor]:
    found = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }
    return {name: value.detach().clone() for name, value in found.items()}


def assert_equal_weights(model: Any, plain: nn.Module) -> None:
    found, expected = weights_of(model), weights_of(plain)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


def warnings_of(action: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught]
