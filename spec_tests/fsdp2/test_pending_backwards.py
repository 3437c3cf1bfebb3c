"""Iterations of several forwards and backwards: which units still wait for a backward, and are prefetched for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.models.modules import WIDTH
from spec_tests.models.running import batch, loss_of
from spec_tests.subject import fully_shard, trace


class Parts(nn.Module):
    """Calls its blocks in any order. It has no parameters of its own, so each parameter belongs to a block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, order: Iterable[int]) -> Tensor:
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return x


def sharded_parts() -> Any:
    model = Parts().to(device())
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@pytest.mark.spec("NEW-07")
@pytest.mark.parametrize("orders", [[(0, 1, 2), (0, 1, 2)], [(0, 1, 2, 2)]], ids=["second iteration", "run twice"])
@ranks(2)
def test_units_whose_backward_has_ended_are_not_prefetched_in_the_next_one(orders: list[tuple[int, ...]]) -> None:
    model = sharded_parts()
    for number, order in enumerate(orders):
        model.set_is_last_backward(number < len(orders) - 1)
        loss_of(model(batch(number), order)).backward()
    loss = loss_of(model(batch(2), (0, 1)))
    model.set_is_last_backward(True)
    with trace.record() as recorder:
        loss.backward()
    assert recorder.order("AG") == ["AG blocks.1", "AG blocks.0"]
