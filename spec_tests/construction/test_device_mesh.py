"""``device_mesh`` of the wrapper, and arguments that a policy gives to single units.

A mesh with one axis is the shard group. A mesh with two axes, *(replicate, shard)*, is for hybrid strategies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
    SHARD_GRAD_OP,
    as_torch,
    column_mesh,
    grid,
    grid_mesh,
    line_mesh,
    wrapped,
)
from spec_tests.models.values import assert_same, flat_parameters, full_values
from spec_tests.subject import CustomPolicy, FullyShardedDataParallel, ShardingStrategy, trace

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
    model = wrapped(sharding_strategy=strategy, device_mesh=line_mesh())
    assert all(wrapper.world_size == 2 for wrapper in FSDP.fsdp_modules(model))
    assert_same(trained(model), trained(wrapped(sharding_strategy=strategy)), bitwise=True)


@pytest.mark.spec("NEW-01")
@ranks(4)
def test_one_dimension_of_a_larger_mesh_is_the_shard_group() -> None:
    model = wrapped(device_mesh=grid_mesh()["shard"])
    with trace.record() as recorder:
        iterate(model)
    own = ((0, 1), (2, 3))[dist.get_rank() // 2]
    assert {(event.kind, event.ranks) for event in recorder.events if event.ranks} == {("AG", own), ("RS", own)}
    assert flat_parameters(model)[""].numel() == 56 // 2


@pytest.mark.spec("NEW-01", "HYB-02", "LEGACY-07")
@pytest.mark.parametrize("strategy", HYBRID_STRATEGIES)
@ranks(4)
def test_mesh_with_two_dimensions_gives_the_two_groups_of_a_hybrid(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy, process_group=None, device_mesh=grid_mesh())
    with trace.record() as recorder:
        iterate(model)
    model.zero_grad()
    shards, replicas = ((0, 1), (2, 3))[dist.get_rank() // 2], ((0, 2), (1, 3))[dist.get_rank() % 2]
    found = {(event.kind, event.ranks) for event in recorder.events if event.ranks}
    assert found == {("AG", shards), ("RS", shards), ("AR", replicas)}
    assert_same(trained(model), trained(wrapped(sharding_strategy=strategy, process_group=grid())), bitwise=True)


@pytest.mark.spec("NEW-01")
@ranks(2)
def test_a_mesh_with_a_group_or_with_a_wrong_number_of_dimensions_is_refused() -> None:
    with refused(ValueError, "process_group", "device_mesh"):
        wrapped(process_group=dist.group.WORLD, device_mesh=line_mesh())
    for strategy, mesh, num_dimensions in ((FULL_SHARD, column_mesh(), 1), (HYBRID_SHARD, line_mesh(), 2)):
        with refused(ValueError, strategy.name, "device_mesh", f"ndim={num_dimensions}"):
            FSDP(seeded(), sharding_strategy=strategy, device_mesh=mesh)


# --- sharded state dicts with a mesh ---


def sharded_state(library: Any, model: nn.Module) -> dict[str, Any]:
    with warnings.catch_warnings(action="ignore"):
        library.FullyShardedDataParallel.set_state_dict_type(model, library.StateDictType.SHARDED_STATE_DICT)
        return model.state_dict()


@pytest.mark.spec("NEW-01", "SD-SHARD-01", "SD-SHARD-02", "HYB-10")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(("strategy", "mesh"), [("FULL_SHARD", line_mesh), ("HYBRID_SHARD", grid_mesh)])
@ranks(4)
def test_with_a_mesh_sharded_state_dicts_hold_the_dtensors_of_torch(
    strategy: str, mesh: Callable[[], Any], use_orig_params: bool
) -> None:
    options = {"process_group": None, "device_mesh": mesh(), "use_orig_params": use_orig_params}
    found = sharded_state(subject.engine, wrapped(sharding_strategy=ShardingStrategy[strategy], **options))
    torch_strategy = torch_fsdp.ShardingStrategy[strategy]
    expected = sharded_state(torch_fsdp, as_torch(seeded(), sharding_strategy=torch_strategy, **options))
    assert found.keys() == expected.keys()
    for name, ours in found.items():
        theirs = expected[name]
        assert isinstance(ours, DTensor)
        assert (ours.shape, ours.placements) == (theirs.shape, theirs.placements)
        assert ours.device_mesh.mesh.tolist() == theirs.device_mesh.mesh.tolist()
        assert torch.equal(ours.to_local(), theirs.to_local())
        assert torch.equal(ours.full_tensor(), seeded().get_parameter(name))


@pytest.mark.spec("NEW-01", "SD-SHARD-03")
@ranks(2)
def test_dtensors_of_torch_can_be_loaded_and_the_reverse() -> None:
    mesh = line_mesh()
    ours, theirs, again = wrapped(device_mesh=mesh), as_torch(seeded(), device_mesh=mesh), wrapped(device_mesh=mesh)
    expected = trained(ours)
    state = sharded_state(subject.engine, ours)
    sharded_state(torch_fsdp, theirs)  # sets the form that it loads
    with warnings.catch_warnings(action="ignore"):
        theirs.load_state_dict(state)
    sharded_state(subject.engine, again)
    again.load_state_dict(sharded_state(torch_fsdp, theirs))
    assert_same(full_values(again), expected, bitwise=True)


# --- arguments of single units ---


@pytest.mark.spec("NEW-02", "WRAP-14")
@ranks(2)
def test_a_policy_gives_one_unit_another_strategy_and_the_sum_is_the_same() -> None:
    plain = seeded()
    other = {"sharding_strategy": SHARD_GRAD_OP}
    policy = CustomPolicy(lambda m: isinstance(m, Block) and (other if m is plain.blocks[1] else True))
    model = wrapped(plain, auto_wrap_policy=policy)
    strategies = [wrapper.sharding_strategy for wrapper in FSDP.fsdp_modules(model)]
    assert strategies == [FULL_SHARD, FULL_SHARD, SHARD_GRAD_OP, FULL_SHARD, FULL_SHARD]
    with trace.record() as recorder:
        iterate(model)
    assert [len(of_unit(recorder, unit, "AG")) for unit in UNITS[1:]] == [2, 1, 2, 2]
    model.zero_grad()
    assert_same(trained(model), trained(wrapped()), bitwise=True)
