"""Units with more than 2**31 elements, on GPUs with enough memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.harness import device, ranks
from spec_tests.models.apis import Api, both_apis

ROWS, WIDTH = 2**20 + 1, 2**11


class Table(nn.Module):
    """One weight with more than 2**31 elements. The loss only uses a few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device=device()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight[rows]


@pytest.mark.spec("STREAM-20")
@pytest.mark.gpu
@pytest.mark.gpu_memory(39)
@both_apis
@ranks(2)
def test_last_elements_of_a_large_unit_are_gathered_and_reduced(api: Api) -> None:
    rows = torch.tensor([0, ROWS // 2, ROWS - 1], device=device())
    model: Any = api.shard(Table())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(rows).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        found = model(rows)
    assert torch.equal(found, torch.full_like(found, -1.0))
