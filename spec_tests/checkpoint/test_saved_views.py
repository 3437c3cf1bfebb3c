"""A buffer that is a view of a larger tensor is saved without the rest of this tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.subject import FullyShardedDataParallel


class Rows(nn.Module):
    """One row of a table, of which the rank has a part. The table is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(4, 4), torch.arange(400.0, device=device()).view(100, 4)
        self.register_buffer("row", self.table[2])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.row


@pytest.mark.spec("SAVE-01")
@pytest.mark.parametrize("has_run", [False, True])
@ranks(2)
def test_the_saved_value_has_the_memory_of_its_own_elements(has_run: bool) -> None:
    """Defect: `torch.save` writes the whole table, because the value of the dict shares its memory."""
    model = FullyShardedDataParallel(Rows().to(device()), device_id=device())
    if has_run:
        with torch.no_grad():
            model(torch.ones(2, 4, device=device()))
    saved = model.state_dict()["row"]
    assert torch.equal(saved, torch.arange(8.0, 12.0, device=device()))
    assert saved.untyped_storage().nbytes() == saved.nbytes
