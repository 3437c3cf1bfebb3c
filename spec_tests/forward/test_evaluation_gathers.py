"""All-gathers of an evaluation, with both APIs. The models are those of ``test_after_evaluation.py``."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spec_tests.forward.test_after_evaluation import (
    EDITS,
    FREES,
    KEEPS,
    Tiny,
    around,
    assert_shows_shards,
    backward,
    batch,
    evaluate,
    in_place,
    sgd,
)
from spec_tests.harness import device, ranks
from spec_tests.models.running import Wire
from spec_tests.models.sharding import grid
from spec_tests.subject import FSDPModule, MixedPrecision


def gathers(action: Callable[[], object]) -> int:
    with Wire() as wire:
        action()
    return wire.calls().count("AG")


@pytest.mark.spec("FRESH-03")
@pytest.mark.parametrize("kind", KEEPS)
@ranks(2)
def test_ranks_may_evaluate_different_numbers_of_batches_where_parameters_are_kept(kind: str) -> None:
    model = KEEPS[kind](Tiny())
    optimizer = sgd(model)
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        assert gathers(lambda: evaluate(model)) == 3
        for _ in range(4 if dist.get_rank() == 0 else 1):
            assert gathers(lambda: evaluate(model)) == 0
        # A forward recorded by autograd uses the memory, too.
        assert gathers(lambda: backward(model)) == 0


class Checkpointed(Tiny):
    """Runs its blocks without grad mode, and again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        result: Tensor = self.head(x)
        return result


@pytest.mark.spec("SHARD-08", "FRESH-03")
@pytest.mark.parametrize("kind", KEEPS)
@ranks(2)
def test_a_checkpointed_unit_is_not_an_evaluation_and_is_kept_for_the_next_forward(kind: str) -> None:
    model = KEEPS[kind](Checkpointed())
    assert [gathers(lambda: model(batch())) for _ in range(2)] == [3, 0]


@pytest.mark.spec("FRESH-03")
@pytest.mark.parametrize("originals", [False, True])
@ranks(4)
def test_replicas_with_kept_parameters_may_evaluate_different_numbers_of_batches(originals: bool) -> None:
    options = {"process_group": grid()}
    model = around("_HYBRID_SHARD_ZERO2", keeps_originals=originals, **options)(Tiny())
    optimizer = sgd(model)
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        for number in range(2 + dist.get_rank()):
            assert gathers(lambda: evaluate(model)) == (3 if number == 0 else 0)


@pytest.mark.spec("FRESH-03")
@pytest.mark.parametrize("kind", ["fully_shard", "fully_shard True", "FULL_SHARD", "FULL_SHARD originals"])
@ranks(2)
def test_each_evaluation_all_gathers_each_resharded_unit_once(kind: str) -> None:
    model = FREES[kind](Tiny())
    # The root stays unsharded, except with `reshard_after_forward=True`.
    later = 3 if kind == "fully_shard True" else 2
    assert [gathers(lambda: evaluate(model)) for _ in range(3)] == [3, later, later]


@pytest.mark.spec("FRESH-03")
@ranks(2)
def test_parameters_that_were_unsharded_manually_are_used_and_sharded_after_the_evaluation() -> None:
    model = in_place()(Tiny())
    owned = list(model.parameters())
    assert isinstance(model, FSDPModule)
    model.unshard()
    assert gathers(lambda: evaluate(model)) == 2
    assert_shows_shards(model, owned)


@pytest.mark.spec("FRESH-03")
@ranks(2)
def test_no_sync_keeps_its_parameters_across_an_evaluation() -> None:
    model = KEEPS["SHARD_GRAD_OP"](Tiny())
    with model.no_sync():
        backward(model)
        assert gathers(lambda: evaluate(model)) == 0
        assert gathers(lambda: backward(model)) == 0


@pytest.mark.spec("FRESH-05")
@pytest.mark.parametrize("originals", [False, True])
@pytest.mark.parametrize("records", [False, True])
@ranks(2)
def test_no_shard_unit_casts_its_parameters_again_for_each_forward(originals: bool, records: bool) -> None:
    mixed = MixedPrecision(param_dtype=torch.bfloat16)
    plain = Tiny().to(device())
    model = around("NO_SHARD", keeps_originals=originals, mixed_precision=mixed)(copy.deepcopy(plain))
    for _ in range(2):
        for one in (model, plain):
            with torch.set_grad_enabled(records):
                one(batch())
            EDITS["scaled by data"](one)
        assert torch.allclose(evaluate(model).float(), evaluate(plain), atol=2e-2)
