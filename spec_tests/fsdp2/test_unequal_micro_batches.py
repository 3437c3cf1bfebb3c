"""Ranks with unequal numbers of micro-batches, which only differ in computations that send nothing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.subject import FSDPModule, fully_shard


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + number)).to(device())


@pytest.mark.spec("PROG-86")
@pytest.mark.parametrize("has_last_backward", [False, True])
@pytest.mark.parametrize("has_units", [False, True])
@ranks(2)
def test_parameters_stay_unsharded_and_are_reduced_once(has_units: bool, has_last_backward: bool) -> None:
    for counts in ([3, 2], [1, 4], [2, 2]):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(device())
        model = copy.deepcopy(plain)
        for module in (model[0], model[2]) if has_units else ():
            fully_shard(module, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, plain)]
        for _ in range(2):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
            for number in range(counts[dist.get_rank()]):
                is_last = number == counts[dist.get_rank()] - 1
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last)
                if has_last_backward:
                    model.set_is_last_backward(is_last)
                model(batch(dist.get_rank(), number)).square().mean().backward()
            for rank in range(2):
                for number in range(counts[rank]):
                    (plain(batch(rank, number)).square().mean() / 2).backward()
            for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(found.grad.full_tensor(), expected.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
