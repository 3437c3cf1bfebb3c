"""A unit of several modules of which a forward calls only some."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spec_tests.harness import device, ranks
from spec_tests.subject import fully_shard


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start, self.end = nn.Linear(8, 8), nn.Linear(8, 8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, branches: str) -> Tensor:
        x = self.start(x)
        for name in branches.split():
            x = torch.tanh(getattr(self, name)(x))
        result: Tensor = self.end(x)
        return result


@pytest.mark.spec("PROG-87")
@pytest.mark.parametrize("trains", [True, False])
@ranks(2)
def test_a_unit_is_resharded_if_only_some_of_its_modules_are_called(trains: bool) -> None:
    plain = TwoBranches().to(device())
    model = copy.deepcopy(plain)
    fully_shard([model.left, model.right])
    fully_shard(model)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, model)]
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(device())
    for branches in ("left", "right", "left right", "left"):
        with torch.set_grad_enabled(trains):
            expected, found = plain(x, branches), model(x, branches)
        torch.testing.assert_close(found, expected)
        for module in (model.left, model.right):
            assert isinstance(module.weight, DTensor), f"unsharded after a forward through {branches}"
        if trains:
            for optimizer, result in zip(optimizers, (expected, found), strict=True):
                result.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()) or not trains


@pytest.mark.spec("PROG-87", "NEW-04")
@ranks(2)
def test_a_failed_call_of_one_module_does_not_affect_a_root_that_is_created_later() -> None:
    plain = TwoBranches().to(device())
    model = copy.deepcopy(plain)
    fully_shard([model.left, model.right])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.left(torch.ones(4, 7, device=device()))
    fully_shard(model)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).to(device())
    for _ in range(2):
        torch.testing.assert_close(model(x, "left right"), plain(x, "left right"))
