"""``device_mesh`` of the wrapper, and arguments that a policy gives to single units.

A mesh with one axis is the shard group. A mesh with two axes, *(replicate, shard)*, is for hybrid strategies.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor

from spec_tests import subject
from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models import sharding
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.models.running import iterate
from spec_tests.subject import CustomPolicy, ShardingStrategy, trace
from spec_tests.subject import FullyShardedDataParallel as FSDP

# --- groups as a mesh ---


@pytest.mark.spec("NEW-01", "CTOR-06")
@ranks(4)
def test_one_dimension_of_a_larger_mesh_is_the_shard_group() -> None:
    model = sharding.wrapped(device_mesh=sharding.grid_mesh()["shard"])
    with trace.record() as recorder:
        iterate(model)
    own = ((0, 1), (2, 3))[dist.get_rank() // 2]
    assert {(event.kind, event.ranks) for event in recorder.events if event.ranks} == {("AG", own), ("RS", own)}
    assert sum(parameter.numel() for parameter in model.parameters()) == (56 + 4 * 42) // 2


@pytest.mark.spec("NEW-01", "HYB-02", "LEGACY-07")
@pytest.mark.parametrize("strategy", [*ShardingStrategy][3:])
@ranks(4)
def test_mesh_with_two_dimensions_gives_the_two_groups_of_a_hybrid(strategy: ShardingStrategy) -> None:
    model = sharding.wrapped(sharding_strategy=strategy, process_group=None, device_mesh=sharding.grid_mesh())
    with trace.record() as recorder:
        assert_trains_like(model)
    shards, replicas = ((0, 1), (2, 3))[dist.get_rank() // 2], ((0, 2), (1, 3))[dist.get_rank() % 2]
    found = {(event.kind, event.ranks) for event in recorder.events if event.ranks}
    assert found == {("AG", shards), ("RS", shards), ("AR", replicas)}


@pytest.mark.spec("NEW-01")
@ranks(2)
def test_a_mesh_with_a_group_or_with_a_wrong_number_of_dimensions_is_refused() -> None:
    line, grid = sharding.line_mesh(), sharding.column_mesh()
    with refused(ValueError, "process_group", "device_mesh"):
        FSDP(seeded(), process_group=dist.group.WORLD, device_mesh=line)
    with refused(ValueError, "FULL_SHARD", "device_mesh", "ndim=1"):
        FSDP(seeded(), sharding_strategy=ShardingStrategy.FULL_SHARD, device_mesh=grid)
    with refused(ValueError, "HYBRID_SHARD", "device_mesh", "ndim=2"):
        FSDP(seeded(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=line)


# --- sharded state dicts with a mesh ---


def sharded_state(library: Any, model: nn.Module) -> dict[str, Any]:
    with warnings.catch_warnings(action="ignore"):
        library.FullyShardedDataParallel.set_state_dict_type(model, library.StateDictType.SHARDED_STATE_DICT)
        return model.state_dict()


@pytest.mark.spec("NEW-01", "SD-SHARD-01", "SD-SHARD-02", "HYB-10")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(("strategy", "mesh"), [("FULL_SHARD", "line_mesh"), ("HYBRID_SHARD", "grid_mesh")])
@ranks(4)
def test_with_a_mesh_sharded_state_dicts_hold_the_dtensors_of_torch(
    strategy: str, mesh: str, use_orig_params: bool
) -> None:
    options = {"device_mesh": getattr(sharding, mesh)(), "use_orig_params": use_orig_params}
    ours, theirs = (
        sharded_state(
            library,
            library.FullyShardedDataParallel(
                seeded(), sharding_strategy=library.ShardingStrategy[strategy], device_id=device(), **options
            ),
        )
        for library in (subject.engine, torch_fsdp)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert isinstance(tensor, DTensor)
        assert (tensor.shape, tensor.placements) == (theirs[name].shape, theirs[name].placements)
        assert tensor.device_mesh.mesh.tolist() == theirs[name].device_mesh.mesh.tolist()
        assert torch.equal(tensor.to_local(), theirs[name].to_local())
        assert torch.equal(tensor.full_tensor(), seeded().get_parameter(name))


# --- arguments of single units ---


@pytest.mark.spec("NEW-02", "WRAP-14")
@ranks(2)
def test_a_policy_gives_one_unit_another_strategy_and_the_sum_is_the_same() -> None:
    plain = seeded()
    choices = {plain.blocks[0]: True, plain.blocks[1]: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}}
    model = FSDP(plain, auto_wrap_policy=CustomPolicy(lambda module: choices.get(module, False)))
    assert [unit.sharding_strategy.name for unit in FSDP.fsdp_modules(model)[1:]] == ["FULL_SHARD", "SHARD_GRAD_OP"]
    with trace.record() as recorder:
        iterate(model)
    assert [recorder.order("AG").count(f"AG blocks.{index}") for index in (0, 1)] == [2, 1]
    model.zero_grad()
    assert_trains_like(model)
