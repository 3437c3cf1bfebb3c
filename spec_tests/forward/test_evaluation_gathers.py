"""The number of all-gathers of an evaluation, with both APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spec_tests.harness import ranks
from spec_tests.models.apis import FULLY_SHARD, ORIGINALS, WRAPPED, Api, all_apis, wrapper_apis
from spec_tests.models.modules import Stack, seeded
from spec_tests.models.running import Wire, batch, iterate
from spec_tests.models.sharding import FULL_SHARD, HYBRID_SHARD_ZERO2, NO_SHARD, SHARD_GRAD_OP, sharded

# The root and its four blocks.
NUM_UNITS = 5


def gathers(action: Callable[[], object]) -> int:
    with Wire() as wire:
        action()
    return wire.calls().count("AG")


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(batch())


@pytest.mark.spec("FRESH-03")
@all_apis
@ranks(2)
def test_ranks_may_evaluate_different_numbers_of_batches_where_parameters_are_kept(api: Api) -> None:
    model = api.shard(strategy=SHARD_GRAD_OP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        iterate(model, 0, optimizer)
        assert gathers(lambda: evaluate(model)) == NUM_UNITS
        for _ in range(4 if dist.get_rank() == 0 else 1):
            assert gathers(lambda: evaluate(model)) == 0
        # A forward recorded by autograd uses the memory, too.
        assert gathers(lambda: iterate(model)) == 0


@pytest.mark.spec("FRESH-03")
@wrapper_apis
@ranks(4)
def test_replicas_with_kept_parameters_may_evaluate_different_numbers_of_batches(api: Api) -> None:
    model = api.shard(strategy=HYBRID_SHARD_ZERO2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        iterate(model, 0, optimizer)
        for number in range(2 + dist.get_rank()):
            assert gathers(lambda: evaluate(model)) == (NUM_UNITS if number == 0 else 0)


class Checkpointed(Stack):
    """Runs its blocks without grad mode, and again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.leave(x)


@pytest.mark.spec("SHARD-08", "FRESH-03")
@all_apis
@ranks(2)
def test_a_checkpointed_unit_is_not_an_evaluation_and_is_kept_for_the_next_forward(api: Api) -> None:
    model = api.shard(seeded(Checkpointed), strategy=SHARD_GRAD_OP)
    assert [gathers(lambda: model(batch())) for _ in range(2)] == [NUM_UNITS, 0]


@pytest.mark.spec("FRESH-03")
@pytest.mark.parametrize(
    ("api", "options", "later"),
    [
        # The root stays unsharded, except with `reshard_after_forward=True`.
        (WRAPPED, {}, NUM_UNITS - 1),
        (ORIGINALS, {}, NUM_UNITS - 1),
        (FULLY_SHARD, {}, NUM_UNITS - 1),
        (FULLY_SHARD, {"reshard_after_forward": True}, NUM_UNITS),
    ],
    ids=str,
)
@ranks(2)
def test_each_evaluation_all_gathers_each_resharded_unit_once(api: Api, options: dict[str, Any], later: int) -> None:
    model = api.shard(strategy=FULL_SHARD, **options)
    assert [gathers(lambda: evaluate(model)) for _ in range(3)] == [NUM_UNITS, later, later]


@pytest.mark.spec("FRESH-03")
@ranks(2)
def test_parameters_that_were_unsharded_manually_are_used_and_sharded_after_the_evaluation() -> None:
    model = sharded()
    owned = list(model.parameters())
    model.unshard()
    assert gathers(lambda: evaluate(model)) == NUM_UNITS - 1
    assert [id(parameter) for parameter in model.parameters()] == [id(parameter) for parameter in owned]


@pytest.mark.spec("FRESH-03")
@ranks(2)
def test_no_sync_keeps_its_parameters_across_an_evaluation() -> None:
    model = WRAPPED.shard(strategy=SHARD_GRAD_OP)
    with model.no_sync():
        iterate(model)
        assert gathers(lambda: evaluate(model)) == 0
        assert gathers(lambda: iterate(model)) == 0


@pytest.mark.spec("FRESH-05")
@pytest.mark.parametrize("records", [False, True])
@wrapper_apis
@ranks(2)
def test_no_shard_unit_casts_its_parameters_again_for_each_forward(api: Api, records: bool) -> None:
    plain = seeded()
    model = api.shard(strategy=NO_SHARD, precision={"param_dtype": torch.bfloat16})
    for _ in range(2):
        for one in (model, plain):
            with torch.set_grad_enabled(records):
                one(batch())
            for parameter in one.parameters():
                parameter.data.mul_(0.5)
        with torch.no_grad():
            expected = plain.bfloat16()(batch().bfloat16())
            torch.testing.assert_close(model(batch()), expected)
            plain.float()
