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

from spec_tests import subject
from spec_tests.harness import ranks
from spec_tests.models import MODELS
from spec_tests.models.apis import FULLY_SHARD, HYBRID_SETTINGS, ORIGINALS, WRAPPED, Api
from spec_tests.models.sharding import FLAT_STRATEGIES, FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, grid
from spec_tests.oracles import (
    FLOAT,
    SAME_MATH,
    Recipe,
    adamw,
    assert_same_training,
    forward_backward,
    sgd,
    shard_fsdp2,
    tolerance_for,
    train_ddp,
    train_fsdp1,
    train_fsdp2,
    train_single,
)
from spec_tests.subject import fully_shard

# With `fully_shard`, models whose ranks take different branches need a switch, which
# ``construction/test_reduction_settings.py`` tests. torch's function refuses a unit that overwrites its
# input, so a test of this file compares it with a single process.
NOT_BY_FUNCTION = ("one_sided", "writes_input")
# Autograd determines the order in which it adds the gradients of several uses. torch and minifsdp use this order. The
# single process sums each micro-batch first.
USED_OFTEN = ("called_twice", "shared_module", "several_forwards")
IN_BFLOAT16 = ("mlp", "uneven", "nested", "tied", "called_twice", "frozen", "conv", "checkpoint_outside")

by_function = pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_BY_FUNCTION])


def on_every_model(*cases: tuple[Any, ...]) -> list[Any]:
    """Each case, which begins with an API and a strategy, with each model that the API supports."""
    found = []
    for name in MODELS:
        for api, strategy, *rest in cases:
            if api != FULLY_SHARD or name not in NOT_BY_FUNCTION:
                words = [name, str(api), strategy.name, *(each.__name__ for each in rest)]
                found.append(pytest.param(name, api, strategy, *rest, id="-".join(words)))
    return found


def train(api: Api, name: str, recipe: Recipe, strategy: Any = FULL_SHARD, **options: Any) -> Any:
    if api.name == FULLY_SHARD.name:
        return train_fsdp2(api.unit, MODELS[name], recipe, strategy=strategy, **options)
    options |= {"sharding_strategy": strategy.name, "use_orig_params": api.name == ORIGINALS.name}
    if "HYBRID" in strategy.name:
        options["process_group"] = grid()
    library = torch_fsdp if api.is_torch else subject
    return train_fsdp1(library.FullyShardedDataParallel, MODELS[name], recipe, **options)


# --- torch ---

WITH_TORCH = [(WRAPPED, strategy) for strategy in FLAT_STRATEGIES]
WITH_TORCH += [(FULLY_SHARD, FULL_SHARD), (FULLY_SHARD, SHARD_GRAD_OP)]


@pytest.mark.spec("PAR-03", "PAR-06")
@pytest.mark.api_spec(wrapper=["PREF-07"], fully_shard=["FS2-13", "FS2-17"])
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # torch's NO_SHARD, on a GPU
@pytest.mark.parametrize(("name", "api", "strategy"), on_every_model(*WITH_TORCH))
@ranks(2)
def test_two_ranks_are_bit_equal_to_torch(name: str, api: Api, strategy: Any) -> None:
    recipe = Recipe(steps=2, optimizer=adamw)
    ours, theirs = (train(each, name, recipe, strategy) for each in (api, api.of_torch()))
    assert_same_training(ours, theirs, tolerance_for(2))


@pytest.mark.spec("PAR-03", "FS2-04", "FS2-05", "FS2-06", "FS2-13")
@by_function
@ranks(2)
def test_shards_and_sharded_gradients_of_each_rank_equal_those_of_torch(name: str) -> None:
    info, recipe = MODELS[name], Recipe()
    ours, theirs = shard_fsdp2(fully_shard, info), shard_fsdp2(torch_fsdp.fully_shard, info)
    for model in (ours, theirs):
        forward_backward(model, info, recipe, dist.get_rank(), 0)
    pairs = list(zip(ours.named_parameters(), theirs.named_parameters(), strict=True))
    assert pairs
    for (our_name, mine), (their_name, other) in pairs:
        assert our_name == their_name
        assert (mine.shape, mine.placements, mine.dtype) == (other.shape, other.placements, other.dtype)
        assert torch.equal(mine.to_local(), other.to_local()), our_name
        assert (mine.grad is None) == (other.grad is None), our_name
        if other.grad is not None:
            assert mine.grad.placements == other.grad.placements
            assert torch.equal(mine.grad.to_local(), other.grad.to_local()), f"gradient of {our_name}"


@pytest.mark.spec("PAR-03", "MP-02", "FS2-MP-02", "FS2-MP-03", "FS2-MP-05")
@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", IN_BFLOAT16)
@ranks(2)
def test_bfloat16_is_bit_equal_to_torch_fully_shard(name: str, reduce_dtype: torch.dtype) -> None:
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    apis = (FULLY_SHARD, FULLY_SHARD.of_torch())
    ours, theirs = (train(api, name, Recipe(steps=2), precision=precision) for api in apis)
    assert_same_training(ours, theirs, tolerance_for(2))


@pytest.mark.spec("PAR-03", "FS2-18", "FS2-MP-02", "FS2-MP-03")
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("name", ["mlp", "uneven"])
@ranks(4)
def test_bfloat16_on_two_by_two_mesh_equals_torch(name: str, no_sync: bool) -> None:
    recipe = Recipe(steps=2, accumulate=2, no_sync=no_sync)
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    apis = (FULLY_SHARD, FULLY_SHARD.of_torch())
    ours, theirs = (train(api, name, recipe, HYBRID_SHARD, precision=precision) for api in apis)
    assert_same_training(ours, theirs, FLOAT)


# --- one process, and DDP ---

WITH_ONE_PROCESS = [(WRAPPED, strategy, optimizer) for strategy in FLAT_STRATEGIES for optimizer in (sgd, adamw)]
WITH_ONE_PROCESS += [(ORIGINALS, strategy, adamw) for strategy in FLAT_STRATEGIES]
WITH_ONE_PROCESS += [(FULLY_SHARD, strategy, sgd) for strategy in (FULL_SHARD, SHARD_GRAD_OP)]


@pytest.mark.spec("PAR-01", "PAR-03", "PAR-06")
@pytest.mark.api_spec(wrapper=["SHARD-15", "ORIG-05"], fully_shard=["FS2-13", "FS2-OPT-04", "MIG-01"])
@pytest.mark.parametrize(("name", "api", "strategy", "optimizer"), on_every_model(*WITH_ONE_PROCESS))
@ranks(2)
def test_two_ranks_are_equal_to_one_process_on_both_batches(name: str, api: Api, strategy: Any, optimizer: Any) -> None:
    recipe = Recipe(steps=2, optimizer=optimizer)
    ours = train(api, name, recipe, strategy)
    assert_same_training(ours, train_single(MODELS[name], 2, recipe, flat_units=api != FULLY_SHARD), tolerance_for(2))


WITH_DDP = [(WRAPPED, NO_SHARD), (WRAPPED, FULL_SHARD), (FULLY_SHARD, FULL_SHARD)]


@pytest.mark.spec("PAR-02", "PAR-05")
@pytest.mark.api_spec(wrapper=["SHARD-12"], fully_shard=["MIG-01"])
@pytest.mark.parametrize(("name", "api", "strategy"), on_every_model(*WITH_DDP))
@ranks(2)
def test_two_ranks_are_equal_to_ddp(name: str, api: Api, strategy: Any) -> None:
    recipe = Recipe(steps=2, optimizer=sgd)
    ours = train(api, name, recipe, strategy)
    expected = train_ddp(MODELS[name], recipe)
    assert_same_training(ours, expected, tolerance_for(2), buffers=True, flat=api != FULLY_SHARD)


WITH_FOUR_RANKS = [(WRAPPED, FULL_SHARD), (FULLY_SHARD, FULL_SHARD), *HYBRID_SETTINGS]


@pytest.mark.spec("PAR-01", "PAR-05", "PAR-06")
@pytest.mark.api_spec(fully_shard=["FS2-18", "MIG-04", "MIG-05"])
@pytest.mark.parametrize(("name", "api", "strategy"), on_every_model(*WITH_FOUR_RANKS))
@ranks(4)
def test_four_ranks_and_two_by_two_are_equal_up_to_the_order_of_a_sum(name: str, api: Api, strategy: Any) -> None:
    recipe = Recipe(steps=2, optimizer=sgd)
    ours = train(api, name, recipe, strategy)
    assert_same_training(ours, train_single(MODELS[name], 4, recipe, flat_units=api != FULLY_SHARD), SAME_MATH)


@pytest.mark.spec("PAR-06")
@pytest.mark.api_spec(wrapper=["CTOR-14"])
@pytest.mark.parametrize(("name", "api", "strategy"), on_every_model((WRAPPED, FULL_SHARD), (FULLY_SHARD, FULL_SHARD)))
@ranks(1)
def test_one_rank_is_equal_to_one_process(name: str, api: Api, strategy: Any) -> None:
    recipe = Recipe(steps=2, optimizer=adamw)
    expected = train_single(MODELS[name], 1, recipe, flat_units=api != FULLY_SHARD)
    assert_same_training(train(api, name, recipe, strategy), expected, tolerance_for(1))


@pytest.mark.spec("PAR-01", "FS2-SYNC-01", "FS2-13")
@pytest.mark.parametrize("no_sync", [True, False])
@by_function
@ranks(2)
def test_accumulation_is_equal_to_that_of_one_process(name: str, no_sync: bool) -> None:
    recipe = Recipe(steps=2, accumulate=2, no_sync=no_sync)
    tolerance = FLOAT if name in USED_OFTEN else tolerance_for(2)
    assert_same_training(train(FULLY_SHARD, name, recipe), train_single(MODELS[name], 2, recipe), tolerance)


@pytest.mark.spec("PAR-03", "PAR-06")
@ranks(2)
def test_unit_that_overwrites_its_input_trains_with_fully_shard() -> None:
    """torch's fully_shard refuses it: its inputs are results of a custom autograd function."""
    recipe = Recipe(steps=2)
    expected = train_single(MODELS["writes_input"], 2, recipe)
    assert_same_training(train(FULLY_SHARD, "writes_input", recipe), expected, tolerance_for(2))
