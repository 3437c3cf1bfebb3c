"""Features of torch's wrapper that are newer than its documentation: groups as a device mesh, and related changes.

A mesh with one axis is the shard group. A mesh with two axes, *(replicate, shard)*, is for hybrid strategies.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from minifsdp.engine import rank_checks
from spec_tests import subject
from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, kept, ranks
from spec_tests.models.modules import UNITS, Block, seeded
from spec_tests.models.running import batch, iterate, loss_of, of_unit
from spec_tests.models.sharding import (
    FLAT_STRATEGIES,
    FULL_SHARD,
    HYBRID_SHARD,
    HYBRID_STRATEGIES,
    all_connected,
    as_torch,
    grid,
    wrapped,
)
from spec_tests.models.values import assert_same, flat_gradients, flat_parameters, full_values
from spec_tests.subject import CustomPolicy, FullyShardedDataParallel, ShardingStrategy, StateDictType, trace

FSDP = FullyShardedDataParallel


def mesh_of(*shape: int) -> DeviceMesh:
    def make() -> DeviceMesh:
        mesh = init_device_mesh(device().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        all_connected()
        return mesh

    return kept(("mesh", shape), make)


def trained(model: FSDP, steps: int = 2) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        iterate(model, step)
        optimizer.step()
    return full_values(model)


# --- groups as a mesh ---


@pytest.mark.spec("NEW-01", "CTOR-06")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_mesh_with_one_dimension_is_the_shard_group(strategy: ShardingStrategy) -> None:
    expected = trained(wrapped(sharding_strategy=strategy))
    model = wrapped(sharding_strategy=strategy, device_mesh=mesh_of(2))
    assert all(wrapper.world_size == 2 for wrapper in FSDP.fsdp_modules(model))
    assert_same(trained(model), expected, bitwise=True)


@pytest.mark.spec("NEW-01")
@ranks(4)
def test_one_dimension_of_a_larger_mesh_is_the_shard_group() -> None:
    rank = dist.get_rank()
    model = wrapped(device_mesh=mesh_of(2, 2)["shard"])
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
    model = wrapped(sharding_strategy=strategy, process_group=None, device_mesh=mesh_of(2, 2))
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
    mesh = mesh_of(2)
    with refused(ValueError, "process_group", "device_mesh"):
        wrapped(process_group=dist.group.WORLD, device_mesh=mesh)


@pytest.mark.spec("NEW-01")
@pytest.mark.parametrize(("strategy", "shape"), [(FULL_SHARD, (1, 2)), (HYBRID_SHARD, (2,))])
@ranks(2)
def test_mesh_with_wrong_number_of_dimensions_for_the_strategy_is_refused(
    strategy: ShardingStrategy, shape: tuple[int, ...]
) -> None:
    mesh = mesh_of(*shape)
    with refused(ValueError, strategy.name, "device_mesh", f"ndim={3 - len(shape)}"):
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
    mesh, options = mesh_of(2), {"use_orig_params": use_orig_params}
    state = sharded_state(subject.engine, wrapped(device_mesh=mesh, **options))
    expected = sharded_state(torch_fsdp, as_torch(seeded(), device_mesh=mesh, **options))
    assert facts(state) == facts(expected)
    assert all(value.placements == (Shard(0),) for value in state.values())
    for name, parameter in seeded().named_parameters():
        assert torch.equal(state[name].full_tensor(), parameter)


@pytest.mark.spec("NEW-01", "SD-SHARD-01", "HYB-10")
@ranks(4)
def test_with_a_mesh_of_two_axes_the_dtensors_are_replicated_over_the_first() -> None:
    mesh = mesh_of(2, 2)
    state = sharded_state(subject.engine, wrapped(sharding_strategy=HYBRID_SHARD, process_group=None, device_mesh=mesh))
    hybrid = torch_fsdp.ShardingStrategy.HYBRID_SHARD
    expected = sharded_state(torch_fsdp, as_torch(seeded(), sharding_strategy=hybrid, device_mesh=mesh))
    assert facts(state) == facts(expected)
    assert all(value.placements == (Replicate(), Shard(0)) for value in state.values())


@pytest.mark.spec("NEW-01", "SD-SHARD-03")
@ranks(2)
def test_dtensors_of_torch_can_be_loaded_and_the_reverse() -> None:
    mesh = mesh_of(2)
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


# --- user errors and exceptions ---


class Broken(Exception):
    """An exception that the library does not raise itself."""


class Fuse:
    """A hook that raises while ``breaks`` is set."""

    breaks = False

    def __call__(self, *_: Any) -> None:
        if self.breaks:
            raise Broken


@pytest.mark.spec("NEW-15")
@pytest.mark.parametrize("moment", ["forward", "backward"])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_iteration_after_an_exception_in_the_middle_is_correct(strategy: ShardingStrategy, moment: str) -> None:
    plain = seeded()
    fuse = Fuse()
    layer = plain.blocks[1].linear
    layer.register_forward_hook(fuse) if moment == "forward" else layer.register_full_backward_hook(fuse)
    model = wrapped(plain, sharding_strategy=strategy)
    iterate(model, 0)
    expected = {unit: gradient.clone() for unit, gradient in flat_gradients(model).items()}
    model.zero_grad()
    fuse.breaks = True
    with pytest.raises(Broken):
        iterate(model, 1)
    fuse.breaks = False
    model.zero_grad()
    iterate(model, 0)
    assert_same(flat_gradients(model), expected, bitwise=True)


def saved_full(model: FSDP, _: torch.optim.Optimizer) -> dict[str, Any]:
    return model.state_dict()


def saved_in_shards(model: FSDP, _: torch.optim.Optimizer) -> dict[str, Any]:
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return {name: value.local_tensor() for name, value in model.state_dict().items()}


def saved_optimizer(model: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    states = FSDP.optim_state_dict(model, optimizer)["state"]
    return {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}


def loaded(model: FSDP, _: torch.optim.Optimizer) -> dict[str, Any]:
    model.load_state_dict(seeded().state_dict())
    return full_values(model)


LOOKS: dict[str, Callable[[FSDP, torch.optim.Optimizer], dict[str, Any]]] = {
    "full": saved_full,
    "sharded": saved_in_shards,
    "optimizer": saved_optimizer,
    "loaded": loaded,
    "summoned": lambda model, _: full_values(model),
}


@pytest.mark.spec("NEW-15")
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
@ranks(2)
def test_state_is_readable_and_saveable_after_an_exception_in_backward(keep: bool, look: str) -> None:
    plain = seeded()
    fuse = Fuse()
    plain.blocks[1].linear.register_full_backward_hook(fuse)
    model = wrapped(plain, use_orig_params=keep)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    iterate(model, 0)
    optimizer.step()
    expected = {name: torch.clone(value) for name, value in LOOKS[look](model, optimizer).items()}
    fuse.breaks = True
    with pytest.raises(Broken):
        iterate(model, 1)
    assert_same(LOOKS[look](model, optimizer), expected, bitwise=True)


@contextmanager
def debugging(is_on: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if is_on:
            patch.setattr(rank_checks, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
        yield


@pytest.mark.spec("NEW-19")
@ranks(2)
def test_different_order_raises_in_first_iteration() -> None:
    rank = dist.get_rank()
    model = wrapped()
    order = [0, 1, 2, 3] if rank == 0 else [0, 2, 1, 3]
    with pytest.raises(RuntimeError, match=rf"rank {rank}: .*rank 0: 'blocks.1', rank 1: 'blocks.2'"):
        model(batch(), order=order)


@pytest.mark.spec("NEW-19")
@ranks(2)
def test_debug_mode_reports_order_in_later_iteration() -> None:
    rank = dist.get_rank()
    with debugging(True):
        model = wrapped()
        iterate(model)
        model.zero_grad()
        with pytest.raises(RuntimeError, match=rf"rank {rank}: .*'blocks.1'.*'blocks.2'"):
            model(batch(), order=[0, 1, 2, 3] if rank == 0 else [0, 2, 1, 3])
        # The failed forward leaves no state behind.
        loss_of(model(batch())).backward()


@pytest.mark.spec("NEW-22")
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_copy_of_wrapped_model_raises_with_remedy(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    for whole in (model, nn.ModuleList([model])):
        with refused(RuntimeError, "copy.deepcopy", "before wrapping", "state_dict()"):
            copy.deepcopy(whole)
    iterate(model)
