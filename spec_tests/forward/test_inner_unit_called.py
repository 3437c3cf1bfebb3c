"""A program calls an inner unit directly, instead of the root. The unit stays an inner unit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch
from spec_tests.models.sharding import wrapped
from spec_tests.subject import FullyShardedDataParallel, MixedPrecision

either = pytest.mark.parametrize("use_orig_params", [False, True])


class Probe(nn.Module):
    """Computes in the dtype of its weight, and records the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.seen: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype
        return x.to(self.weight.dtype) * self.weight


@pytest.mark.spec("MP-13", "MP-16")
@pytest.mark.parametrize(("on_root", "elsewhere"), [(True, False), (False, True)])
@either
@ranks(2)
def test_its_own_setting_decides_whether_it_casts_its_inputs(
    on_root: bool, elsewhere: bool, use_orig_params: bool
) -> None:
    """Defect: the unit that the program calls counts as the root."""
    precision = MixedPrecision(
        param_dtype=torch.bfloat16, cast_root_forward_inputs=on_root, cast_forward_inputs=elsewhere
    )
    probe = Probe().to(device())
    inner = FullyShardedDataParallel(probe, mixed_precision=precision, use_orig_params=use_orig_params)
    outer = nn.Sequential(nn.Linear(6, 6), inner).to(device())
    model = FullyShardedDataParallel(outer, use_orig_params=use_orig_params)
    for call in (model, inner, model, inner):
        call(batch()).sum().backward()
        assert probe.seen is (torch.bfloat16 if elsewhere else torch.float32)


@pytest.mark.spec("PROG-01", "SUMMON-10")
@either
@ranks(2)
def test_it_runs_while_another_unit_is_summoned_on_the_first_rank(use_orig_params: bool) -> None:
    """Defect: the forward of a unit is refused because of a unit that it does not use."""
    plain, model = seeded(), wrapped(use_orig_params=use_orig_params)
    blocks = model.module.blocks
    with torch.no_grad():
        model(batch())
        with FullyShardedDataParallel.summon_full_params(blocks[0], rank0_only=True, writeback=False):
            assert torch.equal(blocks[1](batch()), plain.blocks[1](batch()))
