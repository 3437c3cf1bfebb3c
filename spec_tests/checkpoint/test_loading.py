"""Saving and loading: manually with ``DTensor``, with torch's state-dict functions, as distributed checkpoints.

minifsdp only provides the parameters; these tests check that torch's own functions work with them. The last part moves
checkpoints between the two front ends.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from spec_tests import subject
from spec_tests.harness import device, plain_tensor, ranks
from spec_tests.models.modules import WIDTH, Block, Stack, seeded
from spec_tests.models.running import Wire, batch, detailed_debugging, iterate, loss_of
from spec_tests.models.sharding import grid_mesh, sharded
from spec_tests.models.values import assert_same, full_values, named
from spec_tests.oracles import count_collectives
from spec_tests.subject import ModuleWrapPolicy, fully_shard

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FSDP1 = subject.FullyShardedDataParallel


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Any) -> list[float]:
    losses = []
    for step in steps:
        losses.append(iterate(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def other() -> Any:
    """A sharded model whose values differ from those of all other models here."""
    model = sharded()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    return model


def on_meta() -> Any:
    with torch.device("meta"):
        model = Stack()
    return sharded(model)


# --- the dictionary itself ---


@pytest.mark.spec("FS2-SD-01", "FS2-SD-12")
@ranks(2)
def test_state_dict_has_dtensors_under_plain_names_and_is_loaded_without_communication() -> None:
    model, target = sharded(), other()
    train(model, adam(model), range(2))
    with count_collectives() as counts:
        state = model.state_dict()
        assert not target.load_state_dict(state).missing_keys
    assert counts.order == []
    assert list(state) == list(seeded().state_dict())
    for name, parameter in model.named_parameters():
        assert isinstance(state[name], DTensor)
        assert state[name].placements == parameter.placements
        assert state[name].to_local().data_ptr() == parameter.to_local().data_ptr()
    assert_same(full_values(target), full_values(model))
    assert iterate(target, 5) == iterate(model, 5)


@pytest.mark.spec("FS2-SD-01")
@ranks(2)
def test_state_dict_is_sharded_while_units_are_unsharded() -> None:
    model = sharded(reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(3, 6, device=device()))
    model.blocks[1].unshard()
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    plain = named(seeded())
    assert all(torch.equal(value.full_tensor(), plain[name]) for name, value in state.items())


@pytest.mark.spec("FS2-SD-01")
@ranks(2)
def test_state_dict_contains_buffers_as_plain_tensors() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device())
    fully_shard(model)
    state = model.state_dict()
    assert type(state["1.running_mean"]) is plain_tensor()
    assert isinstance(state["1.weight"], DTensor)


# --- manually ---


def saved_by_hand(model: nn.Module) -> dict[str, Tensor]:
    """All ranks all-gather the tensors one by one; rank 0 keeps them."""
    kept = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor()
        if dist.get_rank() == 0:
            kept[name] = whole.cpu()
    return kept


def loaded_by_hand(model: nn.Module, path: Path) -> None:
    """Each rank reads the file and keeps its shard."""
    whole = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    placed = model.state_dict()
    mine = {
        name: nn.Parameter(distribute_tensor(value.to(device()), placed[name].device_mesh, placed[name].placements))
        for name, value in whole.items()
    }
    model.load_state_dict(mine, assign=True)


@pytest.mark.spec("FS2-SD-02", "FS2-SD-03", "FS2-SD-09")
@ranks(2)
def test_full_state_dict_is_saved_and_loaded_manually(tmp_path: Path) -> None:
    source = sharded()
    train(source, adam(source), range(2))
    kept = saved_by_hand(source)
    assert (kept == {}) == (dist.get_rank() != 0)
    if dist.get_rank() == 0:
        torch.save(kept, tmp_path / "model.pt")
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    plain = seeded()
    plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert_same(full_values(source), named(plain))
    target = on_meta()
    loaded_by_hand(target, tmp_path / "model.pt")
    assert {p.device.type for p in target.parameters()} == {device().type}
    assert_same(full_values(target), named(plain))
    fresh = [adam(each) for each in (source, target)]
    assert train(target, fresh[1], range(5, 8)) == train(source, fresh[0], range(5, 8))


@pytest.mark.spec("FS2-SD-02")
@ranks(4)
def test_a_full_state_dict_can_be_saved_from_two_times_two() -> None:
    kept = saved_by_hand(sharded(mesh=grid_mesh()))
    if dist.get_rank() == 0:
        assert_same(kept, {name: value.cpu() for name, value in named(seeded()).items()})


@pytest.mark.spec("FS2-SD-04")
@ranks(2)
def test_loading_into_meta_parameters_without_assign_is_refused() -> None:
    state = sharded().state_dict()
    with pytest.raises((RuntimeError, ValueError), match="assign"):
        on_meta().load_state_dict(state)


@pytest.mark.spec("FS2-SD-05", "NEW-21")
@ranks(2)
def test_plain_tensors_are_refused_with_remedy() -> None:
    model = other()
    with pytest.raises((RuntimeError, ValueError), match="set_model_state_dict"):
        model.load_state_dict(seeded().state_dict())
    assert {type(p.data) for p in model.parameters()} == {DTensor}


@pytest.mark.spec("FS2-SD-15")
@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("from_rank_0", [False, True])
@ranks(2)
def test_full_state_dicts_are_loaded_after_a_forward(from_rank_0: bool, records: bool) -> None:
    model, expected = other(), named(seeded())
    with torch.set_grad_enabled(records):
        model(torch.ones(2, WIDTH, device=device()))
    # A forward recorded by autograd keeps the root unsharded for its backward.
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()) is not records
    state = {} if from_rank_0 and dist.get_rank() else seeded().state_dict()
    set_model_state_dict(model, state, options=FROM_RANK_0 if from_rank_0 else FULL)
    assert_same(full_values(model), expected)


@pytest.mark.spec("FS2-SD-14")
@pytest.mark.parametrize("assign", [False, True])
@ranks(2)
def test_dtensors_over_other_ranks_are_refused_before_anything_is_copied(assign: bool) -> None:
    model = other()
    before = full_values(model)
    state = sharded().state_dict()
    mesh = next(iter(state.values())).device_mesh
    turned = DeviceMesh(mesh.device_type, [1, 0])
    whole = {name: value.full_tensor() for name, value in state.items()}
    # The last tensor, so that all others would be copied before the error.
    last = list(state)[-1]
    otherwise: list[tuple[DeviceMesh, list[Placement]]] = [(turned, [Shard(0)])]
    if assign:
        otherwise.append((mesh, [Replicate()]))
    for ranks_of_it, placements in otherwise:
        state[last] = distribute_tensor(whole[last], ranks_of_it, placements, src_data_rank=None)
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(state, assign=assign)
        shape = tuple(whole[last].shape)
        for part in (
            f"rank {dist.get_rank()}: load_state_dict expected {last!r} of shape {shape}",
            "on ranks [0, 1] with placements (Shard(dim=0),)",
            f"found shape {shape} on ranks {ranks_of_it.mesh.tolist()} with placements",
            "torch.distributed.checkpoint",
        ):
            assert part in str(caught.value)
        assert_same(full_values(model), before, bitwise=True)
    if not assign:
        state[last] = distribute_tensor(whole[last], mesh, [Replicate()], src_data_rank=None)
        model.load_state_dict(state)
        assert_same(full_values(model), whole, bitwise=True)


@pytest.mark.spec("NEW-21")
@pytest.mark.parametrize("is_on_meta", [False, True])
@ranks(2)
def test_while_debugging_plain_tensors_are_sharded_instead(is_on_meta: bool) -> None:
    model = on_meta() if is_on_meta else other()
    with detailed_debugging():
        model.load_state_dict(seeded().state_dict(), assign=is_on_meta)
    assert {type(p.data) for p in model.parameters()} == {DTensor}
    assert_same(full_values(model), named(seeded()))


# --- with torch's functions ---


@pytest.mark.spec("FS2-SD-06", "MIG-12")
@ranks(2)
def test_only_rank_0_needs_the_dictionary() -> None:
    for target in (other(), on_meta()):
        if any(p.is_meta for p in target.parameters()):
            target.to_empty(device=device())
        mine = seeded().state_dict() if dist.get_rank() == 0 else {}
        set_model_state_dict(target, model_state_dict=mine, options=FROM_RANK_0)
        assert {type(p.data) for p in target.parameters()} == {DTensor}
        assert_same(full_values(target), named(seeded()))
        iterate(target)


@pytest.mark.spec("FS2-SD-07")
@ranks(2)
def test_broadcast_accepts_only_full_dictionaries() -> None:
    with pytest.raises(ValueError, match="full_state_dict"):
        set_model_state_dict(other(), {}, options=StateDictOptions(broadcast_from_rank0=True))


@pytest.mark.spec("FS2-SD-08", "FS2-SD-09")
@ranks(2)
def test_full_state_dict_is_on_all_ranks_or_on_the_cpu_of_rank_0() -> None:
    model = sharded()
    train(model, adam(model), range(1))
    state = get_model_state_dict(model, options=FULL)
    expected = full_values(model)
    if dist.get_rank() == 0:
        assert {(type(value), value.device.type) for value in state.values()} == {(Tensor, "cpu")}
        assert_same(state, {name: value.cpu() for name, value in expected.items()})
    else:
        assert state == {}
    on_all_ranks = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert {type(value) for value in on_all_ranks.values()} == {plain_tensor()}
    assert_same(on_all_ranks, expected)


def two_places() -> nn.Sequential:
    block = Block()
    return nn.Sequential(block, nn.Linear(6, 6), block)


@pytest.mark.spec("PROG-08")
@pytest.mark.parametrize("is_unit", [True, False])
@ranks(2)
def test_full_state_dict_of_module_in_two_places_loads(is_unit: bool) -> None:
    plain, model = seeded(two_places, 1), seeded(two_places, 2)
    if is_unit:
        fully_shard(model[0])
    fully_shard(model)
    options = StateDictOptions(full_state_dict=True)
    assert list(get_model_state_dict(model, options=options)) == list(plain.state_dict())
    set_model_state_dict(model, plain.state_dict(), options=options)
    for name, value in get_model_state_dict(model, options=options).items():
        assert torch.equal(value, plain.state_dict()[name])
    assert torch.equal(model(batch()), plain(batch()))
    loss_of(model(batch())).backward()
    with pytest.raises(RuntimeError, match="got full tensors"):
        model.load_state_dict(plain.state_dict())


# --- interrupted and resumed ---


def save_dtensor(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    state = {
        "model": get_model_state_dict(model, options=FULL),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
    }
    if dist.get_rank() == 0:
        torch.save(state, folder / "checkpoint.pt")
    dist.barrier()


def load_dtensor(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    state = {"model": {}, "optimizer": {}}
    if dist.get_rank() == 0:
        state = torch.load(folder / "checkpoint.pt", weights_only=True)
    set_model_state_dict(model, state["model"], options=FROM_RANK_0)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FROM_RANK_0)


def save_dcp(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load_dcp(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


WAYS = {"DTensor": (save_dtensor, load_dtensor), "DCP": (save_dcp, load_dcp)}


@pytest.mark.spec("FS2-SD-10", "FS2-SD-11")
@pytest.mark.parametrize("way", WAYS)
@ranks(2)
def test_second_run_resumes_from_the_checkpoint_of_the_first(way: str, tmp_path: Path) -> None:
    save, load = WAYS[way]
    first, second = sharded(), other()
    optimizer, fresh = adam(first), adam(second)
    train(first, optimizer, range(3))
    save(tmp_path, first, optimizer)
    load(tmp_path, second, fresh)
    for (name, mine), parameter in zip(second.named_parameters(), first.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert isinstance(fresh.state[mine][key], DTensor)
            assert torch.equal(fresh.state[mine][key].to_local(), optimizer.state[parameter][key].to_local()), name
        assert fresh.state[mine]["step"].item() == 3
    assert train(second, fresh, range(3, 6)) == train(first, optimizer, range(3, 6))
    assert_same(full_values(second), full_values(first))


@pytest.mark.spec("FS2-SD-12")
@ranks(4)
def test_distributed_checkpoint_is_loaded_under_another_mesh_without_sending_values(tmp_path: Path) -> None:
    source, target = sharded(), sharded(mesh=grid_mesh())
    train(source, adam(source), range(1))
    with Wire() as wire:
        dcp.save({"model": get_model_state_dict(source)}, checkpoint_id=tmp_path)
        state = {"model": get_model_state_dict(target)}
        dcp.load(state, checkpoint_id=tmp_path)
        set_model_state_dict(target, state["model"])
    assert wire.values == []
    assert_same(full_values(target), full_values(source))


# --- the other front end ---


@pytest.mark.spec("FS2-SD-13")
@ranks(2)
def test_state_dict_type_of_the_wrapper_does_not_affect_fully_shard() -> None:
    model = sharded()
    expected = model.state_dict()
    with FSDP1.state_dict_type(model, subject.StateDictType.FULL_STATE_DICT):
        inside = model.state_dict()
    assert list(inside) == list(expected)
    assert all(isinstance(value, DTensor) for value in inside.values())
    FSDP1.set_state_dict_type(model, subject.StateDictType.SHARDED_STATE_DICT)
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())


def wrapped() -> Any:
    return FSDP1(seeded(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)


def full_state(model: Any, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and optimizer states of either front end, as from a file."""
    if isinstance(model, FSDP1):
        return model.state_dict(), copy.deepcopy(FSDP1.optim_state_dict(model, optimizer))
    return copy.deepcopy(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)))


def load_full_state(model: Any, optimizer: torch.optim.Optimizer, weights: Any, states: Any) -> None:
    if isinstance(model, FSDP1):
        model.load_state_dict(weights)
        optimizer.load_state_dict(FSDP1.optim_state_dict_to_load(model, optimizer, states))
    else:
        options = StateDictOptions(full_state_dict=True)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)


@pytest.mark.spec("MIG-20")
@pytest.mark.parametrize("from_wrapper", [True, False])
@ranks(2)
def test_full_checkpoints_move_between_the_wrapper_and_fully_shard(from_wrapper: bool) -> None:
    source, target = (wrapped(), other()) if from_wrapper else (sharded(), wrapped())
    optimizer, fresh = adam(source), adam(target)
    train(source, optimizer, range(3))
    load_full_state(target, fresh, *full_state(source, optimizer))
    assert train(target, fresh, range(3, 6)) == train(source, optimizer, range(3, 6))
