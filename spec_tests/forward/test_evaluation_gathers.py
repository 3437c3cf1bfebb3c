"""The number of all-gathers of an evaluation, with both APIs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spec_tests.harness import ranks
from spec_tests.models import apis
from spec_tests.models.modules import Stack, seeded
from spec_tests.models.running import batch
from spec_tests.subject import ShardingStrategy, trace

SHARD_GRAD_OP, HYBRID_SHARD_ZERO2 = ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2
# The root and its four blocks.
NUM_UNITS = 5


def num_gathers(model: Any, *, trains: bool = False) -> int:
    """The number of all-gathers of an evaluation, or of a forward and backward."""
    with trace.record() as recorder, torch.set_grad_enabled(trains):
        output = model(batch())
        if trains:
            output.sum().backward()
    return recorder.count("AG")


@pytest.mark.spec("FRESH-03")
@apis.settings_of(
    *((api, SHARD_GRAD_OP) for api in apis.ALL_APIS),
    (apis.WRAPPED, HYBRID_SHARD_ZERO2),
    (apis.ORIGINALS, HYBRID_SHARD_ZERO2),
)
@ranks(4)
def test_ranks_may_evaluate_different_numbers_of_batches_where_parameters_are_kept(api: Any, strategy: Any) -> None:
    model = api.shard(strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(batch()).sum().backward()
        optimizer.step()
        assert num_gathers(model) == NUM_UNITS
        for _ in range(4 - dist.get_rank()):
            assert num_gathers(model) == 0
        # A forward recorded by autograd uses the memory, too.
        assert num_gathers(model, trains=True) == 0


class Checkpointed(Stack):
    """Runs its blocks without grad mode, and again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.leave(x)


@pytest.mark.spec("SHARD-08", "FRESH-03")
@apis.all_apis
@ranks(2)
def test_a_checkpointed_unit_is_not_an_evaluation_and_is_kept_for_the_next_forward(api: apis.Api) -> None:
    model = api.shard(seeded(Checkpointed), strategy=SHARD_GRAD_OP)
    with trace.record() as recorder:
        model(batch())
        assert recorder.count("AG") == NUM_UNITS
        model(batch())
    assert recorder.count("AG") == NUM_UNITS


@pytest.mark.spec("FRESH-03")
@ranks(2)
def test_parameters_that_were_unsharded_manually_are_used_and_sharded_after_the_evaluation() -> None:
    model = apis.FULLY_SHARD.shard()
    owned = list(model.parameters())
    model.unshard()
    assert num_gathers(model) == NUM_UNITS - 1
    assert all(parameter is before for parameter, before in zip(model.parameters(), owned, strict=True))


@pytest.mark.spec("FRESH-03")
@ranks(2)
def test_no_sync_keeps_its_parameters_across_an_evaluation() -> None:
    model = apis.WRAPPED.shard(strategy=SHARD_GRAD_OP)
    with model.no_sync():
        model(batch()).sum().backward()
        assert num_gathers(model) == 0
        assert num_gathers(model, trains=True) == 0


@pytest.mark.spec("FRESH-05")
@pytest.mark.parametrize("records", [False, True])
@apis.wrapper_apis
@ranks(2)
def test_no_shard_unit_casts_its_parameters_again_for_each_forward(api: apis.Api, records: bool) -> None:
    model = api.shard(strategy=ShardingStrategy.NO_SHARD, precision={"param_dtype": torch.bfloat16})
    for factor in (1.0, 0.5):
        plain = seeded()
        for each, change in ((model, 0.5 if factor < 1 else 1.0), (plain, factor)):
            for parameter in each.parameters():
                parameter.data.mul_(change)
        with torch.set_grad_enabled(records):
            torch.testing.assert_close(model(batch()), plain.bfloat16()(batch().bfloat16()))
