"""Features of torch's wrapper that are newer than its documentation: groups as a device mesh, and related changes.

A mesh with one axis is the shard group. A mesh with two axes, *(replicate, shard)*, is for hybrid strategies.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from spec_tests import subject
from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import ranks
from spec_tests.models.modules import UNITS, Block, seeded
from spec_tests.models.running import iterate, of_unit
from spec_tests.models.sharding import (
    FLAT_STRATEGIES,
    FULL_SHARD,
    HYBRID_SHARD,
    HYBRID_STRATEGIES,
    as_torch,
    column_mesh,
    grid,
    grid_mesh,
    line_mesh,
    wrapped,
)
from spec_tests.models.values import assert_same, flat_parameters, full_values
from spec_tests.subject import CustomPolicy, FullyShardedDataParallel, ShardingStrategy, StateDictType, trace

FSDP = FullyShardedDataParallel


def trained(model: FSDP) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        iterate(model, step, optimizer)
    return full_values(model)


# --- groups as a mesh ---


@pytest.mark.spec("NEW-01", "CTOR-06")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_mesh_with_one_dimension_is_the_shard_group(strategy: ShardingStrategy) -> None:
    expected = trained(wrapped(sharding_strategy=strategy))
    model = wrapped(sharding_strategy=strategy, device_mesh=line_mesh())
    assert all(wrapper.world_size == 2 for wrapper in FSDP.fsdp_modules(model))
    assert_same(trained(model), expected, bitwise=True)


@pytest.mark.spec("NEW-01")
@ranks(4)
def test_one_dimension_of_a_larger_mesh_is_the_shard_group() -> None:
    rank = dist.get_rank()
    model = wrapped(device_mesh=grid_mesh()["shard"])
    with trace.record() as recorder:
        iterate(model)
    own = (0, 1) if rank < 2 else (2, 3)
    assert {event.ranks for event in recorder.events if event.kind in ("AG", "RS")} == {own}
    assert recorder.count("AR") == 0
    assert flat_parameters(model)[""].numel() == 28


@pytest.mark.spec("NEW-01", "HYB-02", "LEGACY-07")
@pytest.mark.parametrize("strategy", HYBRID_STRATEGIES)
@ranks(4)
def test_mesh_with_two_dimensions_gives_the_two_groups_of_a_hybrid(strategy: ShardingStrategy) -> None:
    expected = trained(wrapped(sharding_strategy=strategy, process_group=grid()))
    model = wrapped(sharding_strategy=strategy, process_group=None, device_mesh=grid_mesh())
    with trace.record() as recorder:
        iterate(model)
    model.zero_grad()
    rank = dist.get_rank()
    shards, replicas = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
    assert {event.ranks for event in recorder.events if event.kind in ("AG", "RS")} == {shards}
    assert {event.ranks for event in recorder.events if event.kind == "AR"} == {replicas}
    assert_same(trained(model), expected, bitwise=True)


@pytest.mark.spec("NEW-01")
@ranks(2)
def test_a_mesh_and_a_group_together_are_refused() -> None:
    mesh = line_mesh()
    with refused(ValueError, "process_group", "device_mesh"):
        wrapped(process_group=dist.group.WORLD, device_mesh=mesh)


@pytest.mark.spec("NEW-01")
@ranks(2)
def test_mesh_with_wrong_number_of_dimensions_for_the_strategy_is_refused() -> None:
    for strategy, mesh, num_dimensions in ((FULL_SHARD, column_mesh(), 1), (HYBRID_SHARD, line_mesh(), 2)):
        with refused(ValueError, strategy.name, "device_mesh", f"ndim={num_dimensions}"):
            FSDP(seeded(), sharding_strategy=strategy, device_mesh=mesh)


def sharded_state(library: Any, model: nn.Module) -> dict[str, Any]:
    wrapper = library.FullyShardedDataParallel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with wrapper.state_dict_type(model, library.StateDictType.SHARDED_STATE_DICT):
            return model.state_dict()


def facts(state: dict[str, Any]) -> dict[str, Any]:
    """For each DTensor: its shape, its placements, its mesh, and the rows that this rank stores."""
    assert all(isinstance(value, DTensor) for value in state.values())
    return {
        name: (value.shape, value.placements, value.device_mesh.mesh.tolist(), value.to_local().tolist())
        for name, value in state.items()
    }


@pytest.mark.spec("NEW-01", "SD-SHARD-01", "SD-SHARD-02")
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_with_a_mesh_sharded_state_dicts_hold_the_dtensors_of_torch(use_orig_params: bool) -> None:
    mesh, options = line_mesh(), {"use_orig_params": use_orig_params}
    state = sharded_state(subject.engine, wrapped(device_mesh=mesh, **options))
    expected = sharded_state(torch_fsdp, as_torch(seeded(), device_mesh=mesh, **options))
    assert facts(state) == facts(expected)
    assert all(value.placements == (Shard(0),) for value in state.values())
    for name, parameter in seeded().named_parameters():
        assert torch.equal(state[name].full_tensor(), parameter)


@pytest.mark.spec("NEW-01", "SD-SHARD-01", "HYB-10")
@ranks(4)
def test_with_a_mesh_of_two_axes_the_dtensors_are_replicated_over_the_first() -> None:
    mesh = grid_mesh()
    state = sharded_state(subject.engine, wrapped(sharding_strategy=HYBRID_SHARD, process_group=None, device_mesh=mesh))
    hybrid = torch_fsdp.ShardingStrategy.HYBRID_SHARD
    expected = sharded_state(torch_fsdp, as_torch(seeded(), sharding_strategy=hybrid, device_mesh=mesh))
    assert facts(state) == facts(expected)
    assert all(value.placements == (Replicate(), Shard(0)) for value in state.values())


@pytest.mark.spec("NEW-01", "SD-SHARD-03")
@ranks(2)
def test_dtensors_of_torch_can_be_loaded_and_the_reverse() -> None:
    mesh = line_mesh()
    ours, theirs = wrapped(device_mesh=mesh), as_torch(seeded(), device_mesh=mesh)
    expected = trained(ours)
    with FSDP.state_dict_type(ours, StateDictType.SHARDED_STATE_DICT):
        state = ours.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch_fsdp.FullyShardedDataParallel.state_dict_type(theirs, torch_fsdp.StateDictType.SHARDED_STATE_DICT):
            theirs.load_state_dict(state)
            back = theirs.state_dict()
    again = wrapped(device_mesh=mesh)
    with FSDP.state_dict_type(again, StateDictType.SHARDED_STATE_DICT):
        again.load_state_dict(back)
    assert_same(full_values(again), expected, bitwise=True)


# --- arguments of single units ---


@pytest.mark.spec("NEW-02", "WRAP-14")
@ranks(2)
def test_a_policy_gives_one_unit_another_strategy_and_the_sum_is_the_same() -> None:
    expected = trained(wrapped())
    plain = seeded()
    other = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    policy = CustomPolicy(lambda m: isinstance(m, Block) and (other if m is plain.blocks[1] else True))
    model = wrapped(plain, auto_wrap_policy=policy)
    strategies = [wrapper.sharding_strategy.name for wrapper in FSDP.fsdp_modules(model)]
    assert strategies == ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "FULL_SHARD"]
    with trace.record() as recorder:
        iterate(model)
    assert [len(of_unit(recorder, unit, "AG")) for unit in UNITS[1:]] == [2, 1, 2, 2]
    model.zero_grad()
    assert_same(trained(model), expected, bitwise=True)
