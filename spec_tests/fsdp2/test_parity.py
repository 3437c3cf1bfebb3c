"""All `MODELS`, trained by ``fully_shard`` and by independent reference implementations.

On two ranks in float32, a sum of two terms does not depend on their order and division by two is exact. So all results
must be bitwise equal. On four ranks, the order of a sum changes the last bits; ``compare.py`` defines the tolerance.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from spec_tests import subject
from spec_tests.harness import ranks
from spec_tests.models import MODELS
from spec_tests.models.sharding import grid_mesh
from spec_tests.oracles import (
    FLOAT,
    LOW_PRECISION,
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
    train_torch_fsdp2,
)
from spec_tests.subject import MixedPrecisionPolicy, fully_shard

# Models whose ranks take different branches need a switch; ``test_new.py`` tests them. Autograd refuses a unit that
# overwrites its input; the end of this file tests that case.
every_model = pytest.mark.parametrize("name", [name for name in MODELS if name not in ("one_sided", "writes_input")])
# Autograd determines the order in which it adds the gradients of several uses. torch and minifsdp use this order. The
# single process sums each micro-batch first.
USED_OFTEN = ("called_twice", "shared_module", "several_forwards")


def train(name: str, recipe: Recipe, **options: Any) -> Any:
    return train_fsdp2(fully_shard, MODELS[name], recipe, **options)


@pytest.mark.spec("PAR-03", "PAR-06", "FS2-13")
@every_model
@ranks(2)
def test_two_ranks_are_bit_equal_to_torch_fully_shard(name: str) -> None:
    recipe = Recipe(steps=2, optimizer=adamw)
    assert_same_training(train(name, recipe), train_torch_fsdp2(MODELS[name], recipe), tolerance_for(2))


@pytest.mark.spec("PAR-03", "FS2-13", "FS2-17")
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("name", ["mlp", "nested", "tied", "called_twice", "several_forwards", "frozen", "sometimes"])
@ranks(2)
def test_reshard_after_forward_changes_no_bit(name: str, reshard_after_forward: bool) -> None:
    recipe = Recipe(steps=2)
    ours = train(name, recipe, reshard_after_forward=reshard_after_forward)
    assert_same_training(ours, train(name, recipe), tolerance_for(2))


@pytest.mark.spec("PAR-03", "FS2-04", "FS2-05", "FS2-06", "FS2-13")
@every_model
@ranks(2)
def test_shards_and_sharded_gradients_of_each_rank_equal_those_of_torch(name: str) -> None:
    info, recipe = MODELS[name], Recipe()
    ours, theirs = shard_fsdp2(fully_shard, info), shard_fsdp2(torch_fsdp.fully_shard, info)
    for model in (ours, theirs):
        forward_backward(model, info, recipe, dist.get_rank(), 0)
    pairs = list(zip(ours.named_parameters(), theirs.named_parameters(), strict=True))
    assert pairs
    for (our_name, mine), (their_name, his) in pairs:
        assert our_name == their_name
        assert (mine.shape, mine.placements, mine.dtype) == (his.shape, his.placements, his.dtype)
        assert torch.equal(mine.to_local(), his.to_local()), our_name
        assert (mine.grad is None) == (his.grad is None), our_name
        if his.grad is not None:
            assert mine.grad.placements == his.grad.placements
            assert torch.equal(mine.grad.to_local(), his.grad.to_local()), f"gradient of {our_name}"


@pytest.mark.spec("PAR-01", "PAR-02", "PAR-05", "PAR-06", "FS2-13", "FS2-OPT-04", "MIG-01")
@every_model
@ranks(2)
def test_both_apis_train_like_one_process_and_ddp(name: str) -> None:
    info, recipe = MODELS[name], Recipe(steps=2, optimizer=sgd)
    ours = train(name, recipe)
    assert_same_training(ours, train_single(info, 2, recipe), tolerance_for(2))
    assert_same_training(ours, train_ddp(info, recipe), tolerance_for(2), buffers=True)
    other_api = train_fsdp1(subject.FullyShardedDataParallel, info, recipe)
    assert_same_training(ours, other_api, tolerance_for(2), buffers=True)


@pytest.mark.spec("PAR-01", "FS2-SYNC-01", "FS2-13")
@pytest.mark.parametrize("no_sync", [True, False])
@every_model
@ranks(2)
def test_accumulation_is_equal_to_that_of_one_process(name: str, no_sync: bool) -> None:
    recipe = Recipe(steps=2, accumulate=2, no_sync=no_sync)
    tolerance = FLOAT if name in USED_OFTEN else tolerance_for(2)
    assert_same_training(train(name, recipe), train_single(MODELS[name], 2, recipe), tolerance)


@pytest.mark.spec("PAR-01", "PAR-06", "FS2-18")
@pytest.mark.parametrize("is_grid", [False, True])
@every_model
@ranks(4)
def test_four_ranks_and_two_by_two_are_equal_up_to_the_order_of_a_sum(name: str, is_grid: bool) -> None:
    recipe = Recipe(steps=2, optimizer=sgd)
    ours = train(name, recipe, **({"mesh": grid_mesh()} if is_grid else {}))
    assert_same_training(ours, train_single(MODELS[name], 4, recipe), SAME_MATH)


@pytest.mark.spec("PAR-05", "MIG-04", "MIG-05")
@pytest.mark.parametrize("name", ["mlp", "uneven", "nested", "tied"])
@ranks(4)
def test_both_apis_agree_on_two_by_two_mesh(name: str) -> None:
    recipe, mesh = Recipe(steps=2), grid_mesh()
    groups = mesh.get_group("shard"), mesh.get_group("replicate")
    for strategy, reshard_after_forward in (("HYBRID_SHARD", True), ("_HYBRID_SHARD_ZERO2", False)):
        ours = train(name, recipe, mesh=mesh, reshard_after_forward=reshard_after_forward)
        other_api = train_fsdp1(
            subject.FullyShardedDataParallel,
            MODELS[name],
            recipe,
            process_group=groups,
            sharding_strategy=strategy,
        )
        assert_same_training(ours, other_api, FLOAT)


@pytest.mark.spec("PAR-06")
@every_model
@ranks(1)
def test_one_rank_is_equal_to_one_process(name: str) -> None:
    recipe = Recipe(steps=2, optimizer=adamw)
    assert_same_training(train(name, recipe), train_single(MODELS[name], 1, recipe), tolerance_for(1))


IN_BFLOAT16 = ("mlp", "uneven", "nested", "tied", "called_twice", "frozen", "conv", "checkpoint_outside")


@pytest.mark.spec("PAR-03", "FS2-MP-02", "FS2-MP-03", "FS2-MP-05")
@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", IN_BFLOAT16)
@ranks(2)
def test_bfloat16_is_bit_equal_to_torch_fully_shard(name: str, reduce_dtype: torch.dtype) -> None:
    recipe = Recipe(steps=2)
    ours = train(name, recipe, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype))
    policy = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    assert_same_training(ours, train_torch_fsdp2(MODELS[name], recipe, mp_policy=policy), tolerance_for(2))


@pytest.mark.spec("PAR-03", "FS2-18", "FS2-MP-02", "FS2-MP-03")
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("name", ["mlp", "uneven"])
@ranks(4)
def test_bfloat16_on_two_by_two_mesh_equals_torch(name: str, no_sync: bool) -> None:
    recipe, mesh = Recipe(steps=2, accumulate=2, no_sync=no_sync), grid_mesh()
    ours = train(name, recipe, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    policy = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert_same_training(ours, train_torch_fsdp2(MODELS[name], recipe, mesh=mesh, mp_policy=policy), FLOAT)


@pytest.mark.spec("PAR-01", "FS2-MP-03")
@pytest.mark.parametrize("name", ["mlp", "nested", "tied", "called_twice", "transformer"])
@ranks(2)
def test_bfloat16_is_near_to_float32(name: str) -> None:
    info, recipe = MODELS[name], Recipe(steps=2)

    def halved(module: nn.Module) -> Any:
        # Only for the root. In an inner unit, its float32 output would not match the dtype of the next layer.
        output_dtype = None if isinstance(module, info.unit_classes) else torch.float32
        return fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype))

    assert_same_training(train_fsdp2(halved, info, recipe), train_single(info, 2, recipe), LOW_PRECISION)


@pytest.mark.spec("PAR-03", "PAR-06")
@ranks(2)
def test_unit_that_overwrites_its_input_trains() -> None:
    """torch's fully_shard refuses it: its inputs are results of a custom autograd function."""
    recipe = Recipe(steps=2)
    assert_same_training(
        train("writes_input", recipe), train_single(MODELS["writes_input"], 2, recipe), tolerance_for(2)
    )
