"""Trains all of `MODELS` with both APIs and with independent reference implementations.

On two ranks in float32, a sum over ranks has no order and dividing by two is exact, so all results must be bitwise
equal. On four ranks the order of a sum affects the last bits. ``compare.py`` defines the tolerances in one place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp

from spec_tests import oracles
from spec_tests.harness import ranks
from spec_tests.models import MODELS, apis
from spec_tests.subject import ShardingStrategy as Strategy
from spec_tests.subject import fully_shard

BF16 = torch.bfloat16
# The function has no counterpart of the last one.
STRATEGIES = (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD)

# With `fully_shard`, models whose ranks take different branches need a switch, which
# ``construction/test_reduction_settings.py`` tests. torch's function refuses a unit that overwrites its
# input, so a test of this file compares it with a single process.
NOT_BY_FUNCTION = ("one_sided", "writes_input")
# Autograd determines the order in which it adds the gradients of several uses. torch and minifsdp use this order. The
# single process sums each micro-batch first.
USED_OFTEN = ("called_twice", "shared_module", "several_forwards")


def on_every_model(*cases: tuple[Any, ...]) -> list[Any]:
    """Each case, which begins with an API and a strategy, with each model that the API supports."""
    found = []
    for name in MODELS:
        for api, strategy, *rest in cases:
            if api != apis.FULLY_SHARD or name not in NOT_BY_FUNCTION:
                words = [name, str(api), strategy.name, *(each.__name__ for each in rest)]
                found.append(pytest.param(name, api, strategy, *rest, id="-".join(words)))
    return found


def train(api: Any, name: str, recipe: oracles.Recipe, strategy: Any = Strategy.FULL_SHARD, **options: Any) -> Any:
    return oracles.train_sharded(api, MODELS[name], recipe, strategy=strategy, **options)


# --- torch ---

WITH_TORCH = [(apis.WRAPPED, strategy) for strategy in STRATEGIES]
WITH_TORCH += [(apis.FULLY_SHARD, strategy) for strategy in STRATEGIES[:2]]


@pytest.mark.spec("PAR-03", "PAR-06")
@pytest.mark.api_spec(wrapper=["PREF-07"], fully_shard=["FS2-13", "FS2-17"])
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # torch's NO_SHARD, on a GPU
@pytest.mark.parametrize(("name", "api", "strategy"), on_every_model(*WITH_TORCH))
@ranks(2)
def test_two_ranks_are_bit_equal_to_torch(name: str, api: Any, strategy: Any) -> None:
    recipe = oracles.Recipe(steps=2, optimizer=oracles.adamw)
    ours, theirs = (train(each, name, recipe, strategy) for each in (api, api.of_torch()))
    oracles.assert_same_training(ours, theirs, oracles.tolerance_for(2))


@pytest.mark.spec("PAR-03", "FS2-04", "FS2-05", "FS2-06", "FS2-13")
@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_BY_FUNCTION])
@ranks(2)
def test_shards_and_sharded_gradients_of_each_rank_equal_those_of_torch(name: str) -> None:
    info, recipe = MODELS[name], oracles.Recipe()
    ours, theirs = oracles.shard_fsdp2(fully_shard, info), oracles.shard_fsdp2(torch_fsdp.fully_shard, info)
    for model in (ours, theirs):
        oracles.forward_backward(model, info, recipe, dist.get_rank(), 0)
    for (our_name, mine), (their_name, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert our_name == their_name
        for found, expected in ((mine, other), (mine.grad, other.grad)):
            assert (found is None) == (expected is None), our_name
            if expected is not None:
                assert (found.shape, found.placements) == (expected.shape, expected.placements), our_name
                torch.testing.assert_close(found.to_local(), expected.to_local(), rtol=0.0, atol=0.0)


@pytest.mark.spec("PAR-03", "MP-02", "FS2-MP-02", "FS2-MP-03", "FS2-MP-05")
@pytest.mark.parametrize("reduce_dtype", [BF16, torch.float32])
@pytest.mark.parametrize("name", ["uneven", "nested", "tied", "called_twice", "frozen", "conv", "checkpoint_outside"])
@ranks(2)
def test_bfloat16_is_bit_equal_to_torch_fully_shard(name: str, reduce_dtype: torch.dtype) -> None:
    precision = {"param_dtype": BF16, "reduce_dtype": reduce_dtype}
    both = (apis.FULLY_SHARD, apis.FULLY_SHARD.of_torch())
    ours, theirs = (train(api, name, oracles.Recipe(steps=2), precision=precision) for api in both)
    oracles.assert_same_training(ours, theirs, oracles.tolerance_for(2))


@pytest.mark.spec("PAR-03", "FS2-18", "FS2-MP-02", "FS2-MP-03")
@pytest.mark.parametrize("no_sync", [False, True])
@ranks(4)
def test_bfloat16_on_two_by_two_mesh_equals_torch(no_sync: bool) -> None:
    recipe = oracles.Recipe(steps=2, accumulate=2, no_sync=no_sync)
    precision = {"param_dtype": BF16, "reduce_dtype": torch.float32}
    both = (apis.FULLY_SHARD, apis.FULLY_SHARD.of_torch())
    ours, theirs = (train(api, "uneven", recipe, Strategy.HYBRID_SHARD, precision=precision) for api in both)
    oracles.assert_same_training(ours, theirs, oracles.FLOAT)


# --- one process, and DDP ---

WITH_ONE_PROCESS = [(apis.WRAPPED, strategy, oracles.sgd) for strategy in STRATEGIES]
WITH_ONE_PROCESS += [(apis.ORIGINALS, strategy, oracles.adamw) for strategy in STRATEGIES]
WITH_ONE_PROCESS += [
    (apis.FULLY_SHARD, strategy, oracles.sgd) for strategy in (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP)
]


@pytest.mark.spec("PAR-01", "PAR-03", "PAR-06")
@pytest.mark.api_spec(wrapper=["SHARD-15", "ORIG-05"], fully_shard=["FS2-13", "FS2-OPT-04", "MIG-01"])
@pytest.mark.parametrize(("name", "api", "strategy", "optimizer"), on_every_model(*WITH_ONE_PROCESS))
@ranks(2)
def test_two_ranks_are_equal_to_one_process_on_both_batches(name: str, api: Any, strategy: Any, optimizer: Any) -> None:
    recipe = oracles.Recipe(steps=2, optimizer=optimizer)
    expected = oracles.train_single(MODELS[name], 2, recipe, flat_units=api != apis.FULLY_SHARD)
    oracles.assert_same_training(train(api, name, recipe, strategy), expected, oracles.tolerance_for(2))


WITH_DDP = [
    (apis.WRAPPED, Strategy.NO_SHARD),
    (apis.WRAPPED, Strategy.FULL_SHARD),
    (apis.FULLY_SHARD, Strategy.FULL_SHARD),
]


@pytest.mark.spec("PAR-02", "PAR-05")
@pytest.mark.api_spec(wrapper=["SHARD-12"], fully_shard=["MIG-01"])
@pytest.mark.parametrize(("name", "api", "strategy"), on_every_model(*WITH_DDP))
@ranks(2)
def test_two_ranks_are_equal_to_ddp(name: str, api: Any, strategy: Any) -> None:
    recipe = oracles.Recipe(steps=2, optimizer=oracles.sgd)
    ours, expected = train(api, name, recipe, strategy), oracles.train_ddp(MODELS[name], recipe)
    oracles.assert_same_training(ours, expected, oracles.tolerance_for(2), buffers=True, flat=api != apis.FULLY_SHARD)


WITH_FOUR_RANKS = [(apis.WRAPPED, Strategy.FULL_SHARD), (apis.FULLY_SHARD, Strategy.FULL_SHARD), *apis.HYBRID_SETTINGS]


@pytest.mark.spec("PAR-01", "PAR-05", "PAR-06")
@pytest.mark.api_spec(fully_shard=["FS2-18", "MIG-04", "MIG-05"])
@pytest.mark.parametrize(("name", "api", "strategy"), on_every_model(*WITH_FOUR_RANKS))
@ranks(4)
def test_four_ranks_and_two_by_two_are_equal_up_to_the_order_of_a_sum(name: str, api: Any, strategy: Any) -> None:
    recipe = oracles.Recipe(steps=2, optimizer=oracles.sgd)
    expected = oracles.train_single(MODELS[name], 4, recipe, flat_units=api != apis.FULLY_SHARD)
    oracles.assert_same_training(train(api, name, recipe, strategy), expected, oracles.SAME_MATH)


@pytest.mark.spec("PAR-06")
@pytest.mark.api_spec(wrapper=["CTOR-14"])
@pytest.mark.parametrize("api", [apis.WRAPPED, apis.FULLY_SHARD], ids=str)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_BY_FUNCTION])
@ranks(1)
def test_one_rank_is_equal_to_one_process(name: str, api: Any) -> None:
    recipe = oracles.Recipe(steps=2, optimizer=oracles.adamw)
    expected = oracles.train_single(MODELS[name], 1, recipe, flat_units=api != apis.FULLY_SHARD)
    oracles.assert_same_training(train(api, name, recipe), expected, oracles.tolerance_for(1))


@pytest.mark.spec("PAR-01", "FS2-SYNC-01", "FS2-13")
@pytest.mark.parametrize("no_sync", [True, False])
@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_BY_FUNCTION])
@ranks(2)
def test_accumulation_is_equal_to_that_of_one_process(name: str, no_sync: bool) -> None:
    recipe = oracles.Recipe(steps=2, accumulate=2, no_sync=no_sync)
    tolerance = oracles.FLOAT if name in USED_OFTEN else oracles.tolerance_for(2)
    expected = oracles.train_single(MODELS[name], 2, recipe)
    oracles.assert_same_training(train(apis.FULLY_SHARD, name, recipe), expected, tolerance)


@pytest.mark.spec("PAR-03", "PAR-06")
@ranks(2)
def test_unit_that_overwrites_its_input_trains_with_fully_shard() -> None:
    """torch's fully_shard refuses it: its inputs are results of a custom autograd function."""
    recipe = oracles.Recipe(steps=2)
    expected = oracles.train_single(MODELS["writes_input"], 2, recipe)
    oracles.assert_same_training(train(apis.FULLY_SHARD, "writes_input", recipe), expected, oracles.tolerance_for(2))
