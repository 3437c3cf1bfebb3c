"""``requires_grad`` and hooks that a program sets while a forward of the root runs, or before ``unshard()``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.subject import fully_shard


class Turns(nn.Module):
    """Trains one of its two layers in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.trains_b = False

    def forward(self, x: Tensor) -> Tensor:
        self.a.requires_grad_(not self.trains_b)
        self.b.requires_grad_(self.trains_b)
        self.trains_b = not self.trains_b
        return self.b(self.a(x))


def sharded() -> Any:
    model = Turns().to(device())
    for layer in (model.a, model.b):
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.spec("FS2-22")
@ranks(2)
def test_requires_grad_that_the_root_sets_in_its_forward_counts_in_this_forward() -> None:
    model = sharded()
    for trained in ("a", "b", "a"):
        model(torch.ones(2, 4, device=device(), requires_grad=True)).sum().backward()
        assert {name.partition(".")[0] for name, p in model.named_parameters() if p.grad is not None} == {trained}
        model.zero_grad()


@pytest.mark.spec("FS2-22")
@ranks(2)
def test_requires_grad_is_that_of_the_unsharded_parameter_after_unshard() -> None:
    model = sharded()
    model.a.weight.requires_grad_(False)
    model.a.unshard()
    assert not model.a.weight.requires_grad
    assert model.a.bias.requires_grad
