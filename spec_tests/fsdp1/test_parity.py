"""Trains all of `MODELS` with ``FullyShardedDataParallel`` and with the reference trainers.

On two ranks in float32, a sum over ranks has no order and dividing by two is exact, so all results must be bitwise
equal. On four ranks the order of a sum affects the last bits. ``compare.py`` defines the tolerances in one place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from spec_tests import subject
from spec_tests.harness import ranks
from spec_tests.models import MODELS
from spec_tests.models.sharding import grid
from spec_tests.oracles import (
    SAME_MATH,
    Recipe,
    adamw,
    assert_same_training,
    sgd,
    tolerance_for,
    train_ddp,
    train_fsdp1,
    train_single,
    train_torch_fsdp1,
)

every_model = pytest.mark.parametrize("name", MODELS)
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def train(name: str, recipe: Recipe, **options: Any) -> Any:
    return train_fsdp1(subject.FullyShardedDataParallel, MODELS[name], recipe, **options)


@pytest.mark.spec("PAR-03", "PAR-06", "PREF-07")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # torch's NO_SHARD, on a GPU
@pytest.mark.parametrize("strategy", STRATEGIES)
@every_model
@ranks(2)
def test_two_ranks_are_bit_equal_to_torch_fsdp1(name: str, strategy: str) -> None:
    recipe = Recipe(steps=2, optimizer=adamw)
    ours = train(name, recipe, sharding_strategy=strategy)
    assert_same_training(ours, train_torch_fsdp1(MODELS[name], recipe, sharding_strategy=strategy), tolerance_for(2))


@pytest.mark.spec("PAR-01", "PAR-06", "SHARD-15")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
@every_model
@ranks(2)
def test_two_ranks_are_equal_to_one_process_on_both_batches(name: str, optimizer: Any, strategy: str) -> None:
    recipe = Recipe(steps=2, optimizer=optimizer)
    ours = train(name, recipe, sharding_strategy=strategy)
    assert_same_training(ours, train_single(MODELS[name], 2, recipe, flat_units=True), tolerance_for(2))


@pytest.mark.spec("PAR-01", "PAR-03", "ORIG-05")
@pytest.mark.parametrize("strategy", STRATEGIES)
@every_model
@ranks(2)
def test_original_parameters_train_like_flat_ones(name: str, strategy: str) -> None:
    recipe = Recipe(steps=2, optimizer=adamw)
    ours = train(name, recipe, sharding_strategy=strategy, use_orig_params=True)
    assert_same_training(ours, train_single(MODELS[name], 2, recipe, flat_units=True), tolerance_for(2))


@pytest.mark.spec("PAR-02", "SHARD-12")
@every_model
@ranks(2)
def test_no_shard_is_equal_to_ddp(name: str) -> None:
    recipe = Recipe(steps=2, optimizer=sgd)
    ours = train(name, recipe, sharding_strategy="NO_SHARD")
    assert_same_training(ours, train_ddp(MODELS[name], recipe), tolerance_for(2))


@pytest.mark.spec("PAR-01", "PAR-06")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@every_model
@ranks(4)
def test_four_ranks_and_two_by_two_are_equal_up_to_the_order_of_a_sum(name: str, strategy: str) -> None:
    options = {"process_group": grid()} if "HYBRID" in strategy else {}
    dist.barrier()
    recipe = Recipe(steps=2, optimizer=sgd)
    ours = train(name, recipe, sharding_strategy=strategy, **options)
    assert_same_training(ours, train_single(MODELS[name], 4, recipe, flat_units=True), SAME_MATH)


@pytest.mark.spec("PAR-06", "CTOR-14")
@every_model
@ranks(1)
def test_one_rank_is_equal_to_one_process(name: str) -> None:
    recipe = Recipe(steps=2, optimizer=adamw)
    assert_same_training(train(name, recipe), train_single(MODELS[name], 1, recipe, flat_units=True), tolerance_for(1))
