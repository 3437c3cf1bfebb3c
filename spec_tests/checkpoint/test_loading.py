"""State dicts of ``fully_shard``: manually with ``DTensor``, and with torch's functions.

minifsdp only provides the parameters; these tests check that torch's own functions work with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from spec_tests import subject
from spec_tests.harness import device, plain_tensor, ranks
from spec_tests.models.modules import WIDTH, Block, Stack, seeded
from spec_tests.models.running import Wire, batch, detailed_debugging, iterate
from spec_tests.models.sharding import grid_mesh, sharded
from spec_tests.models.values import assert_same, full_values, named
from spec_tests.subject import fully_shard

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def other() -> Any:
    """A sharded model with other values."""
    return sharded(seeded(seed=5))


def on_meta() -> Any:
    with torch.device("meta"):
        return sharded(Stack())


@pytest.mark.spec("FS2-SD-01", "FS2-SD-12", "FS2-SD-13")
@ranks(2)
def test_state_dict_has_dtensors_under_plain_names_and_is_loaded_without_communication() -> None:
    model, target = sharded(), other()
    # The setting of the wrapper has no effect.
    with Wire() as wire, subject.FullyShardedDataParallel.state_dict_type(model, subject.StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
        assert not target.load_state_dict(state).missing_keys
    assert wire.sent == []
    assert list(state) == list(seeded().state_dict())
    assert type(fully_shard(nn.BatchNorm1d(4).to(device())).state_dict()["running_mean"]) is plain_tensor()
    for name, parameter in model.named_parameters():
        assert isinstance(state[name], DTensor)
        assert state[name].placements == parameter.placements
        assert state[name].to_local().data_ptr() == parameter.to_local().data_ptr()
    assert_same(full_values(target), named(seeded()))


@pytest.mark.spec("FS2-SD-01")
@ranks(2)
def test_state_dict_is_sharded_while_units_are_unsharded() -> None:
    model = sharded(reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(3, WIDTH, device=device()))
    model.blocks[1].unshard()
    plain = named(seeded())
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor)
        assert torch.equal(value.full_tensor(), plain[name])


# --- manually ---


def saved_by_hand(model: nn.Module) -> dict[str, torch.Tensor]:
    """All ranks all-gather the tensors one by one; rank 0 keeps them."""
    kept = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor()
        if dist.get_rank() == 0:
            kept[name] = whole.cpu()
    return kept


@pytest.mark.spec("FS2-SD-02", "FS2-SD-03", "FS2-SD-09")
@pytest.mark.parametrize("is_grid", [False, True])
@ranks(4)
def test_full_state_dict_is_saved_and_loaded_manually(is_grid: bool, tmp_path: Path) -> None:
    source, target = sharded(mesh=grid_mesh() if is_grid else None), on_meta()
    kept = saved_by_hand(source)
    if dist.get_rank() == 0:
        torch.save(kept, tmp_path / "model.pt")
    dist.barrier()
    full = torch.load(tmp_path / "model.pt", mmap=True, weights_only=True, map_location="cpu")
    assert_same(full, {name: value.cpu() for name, value in named(seeded()).items()}, bitwise=True)
    placed = target.state_dict()
    mine = {
        name: nn.Parameter(distribute_tensor(value.to(device()), placed[name].device_mesh, placed[name].placements))
        for name, value in full.items()
    }
    target.load_state_dict(mine, assign=True)
    assert {p.device.type for p in target.parameters()} == {device().type}
    assert_same(full_values(target), named(seeded()), bitwise=True)
    assert iterate(target, 5) == iterate(source, 5)


@pytest.mark.spec("FS2-SD-04")
@ranks(2)
def test_loading_into_meta_parameters_without_assign_is_refused() -> None:
    with pytest.raises((RuntimeError, ValueError), match="assign"):
        on_meta().load_state_dict(sharded().state_dict())


@pytest.mark.spec("FS2-SD-05", "NEW-21")
@pytest.mark.parametrize("is_on_meta", [False, True])
@ranks(2)
def test_plain_tensors_are_refused_with_remedy_and_while_debugging_sharded(is_on_meta: bool) -> None:
    model = on_meta() if is_on_meta else other()
    with pytest.raises((RuntimeError, ValueError), match="set_model_state_dict"):
        model.load_state_dict(seeded().state_dict(), assign=is_on_meta)
    with detailed_debugging():
        model.load_state_dict(seeded().state_dict(), assign=is_on_meta)
    assert {type(p.data) for p in model.parameters()} == {DTensor}
    assert_same(full_values(model), named(seeded()))


@pytest.mark.spec("FS2-SD-14")
@pytest.mark.parametrize(("wrong", "assign"), [("ranks", False), ("ranks", True), ("placements", True)])
@ranks(2)
def test_dtensors_over_other_ranks_are_refused_before_anything_is_copied(wrong: str, assign: bool) -> None:
    model = other()
    before, state = full_values(model), sharded().state_dict()
    mesh = next(iter(state.values())).device_mesh
    # The last tensor, so that all others would be copied before the error.
    last = list(state)[-1]
    whole, shape = state[last].full_tensor(), tuple(state[last].shape)
    replicated = distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None)
    turned = distribute_tensor(whole, DeviceMesh(mesh.device_type, [1, 0]), [Shard(0)], src_data_rank=None)
    state[last] = turned if wrong == "ranks" else replicated
    with pytest.raises(RuntimeError, match=r"torch\.distributed\.checkpoint") as caught:
        model.load_state_dict(state, assign=assign)
    for part in (
        f"rank {dist.get_rank()}: load_state_dict expected {last!r} of shape {shape}",
        "on ranks [0, 1] with placements (Shard(dim=0),)",
        f"found shape {shape} on ranks {[1, 0] if wrong == 'ranks' else [0, 1]} with placements",
    ):
        assert part in str(caught.value)
    assert_same(full_values(model), before, bitwise=True)
    if not assign:
        model.load_state_dict({**state, last: replicated})
        assert_same(full_values(model), named(seeded()), bitwise=True)


# --- with torch's functions ---


@pytest.mark.spec("FS2-SD-15", "FS2-SD-06", "MIG-12")
@pytest.mark.parametrize("state", ["sharded", "after an evaluation", "before a backward", "meta"])
@pytest.mark.parametrize("from_rank_0", [False, True])
@ranks(2)
def test_full_state_dicts_are_loaded_by_all_ranks_or_from_rank_0(from_rank_0: bool, state: str) -> None:
    model = on_meta().to_empty(device=device()) if state == "meta" else other()
    if state in ("after an evaluation", "before a backward"):
        with torch.set_grad_enabled(state == "before a backward"):
            model(torch.ones(2, WIDTH, device=device()))
        # A forward recorded by autograd keeps the root unsharded for its backward.
        assert all(isinstance(p, DTensor) for p in model.parameters()) is (state == "after an evaluation")
    given = {} if from_rank_0 and dist.get_rank() else seeded().state_dict()
    set_model_state_dict(model, given, options=FROM_RANK_0 if from_rank_0 else FULL)
    assert_same(full_values(model), named(seeded()))
    if state == "meta":
        iterate(model)


@pytest.mark.spec("FS2-SD-07")
@ranks(2)
def test_broadcast_accepts_only_full_dictionaries() -> None:
    with pytest.raises(ValueError, match="full_state_dict"):
        set_model_state_dict(other(), {}, options=StateDictOptions(broadcast_from_rank0=True))


@pytest.mark.spec("FS2-SD-08", "FS2-SD-09")
@ranks(2)
def test_full_state_dict_is_on_all_ranks_or_on_the_cpu_of_rank_0() -> None:
    model, expected = sharded(), named(seeded())
    state = get_model_state_dict(model, options=FULL)
    if dist.get_rank() == 0:
        assert {(type(value), value.device.type) for value in state.values()} == {(torch.Tensor, "cpu")}
        assert_same(state, {name: value.cpu() for name, value in expected.items()})
    else:
        assert state == {}
    on_all_ranks = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert {type(value) for value in on_all_ranks.values()} == {plain_tensor()}
    assert_same(on_all_ranks, expected)


def two_places() -> nn.Sequential:
    block = Block()
    return nn.Sequential(block, nn.Linear(WIDTH, WIDTH), block)


@pytest.mark.spec("PROG-08")
@pytest.mark.parametrize("is_unit", [True, False])
@ranks(2)
def test_full_state_dict_of_module_in_two_places_loads(is_unit: bool) -> None:
    plain, model = seeded(two_places, 1), seeded(two_places, 2)
    if is_unit:
        fully_shard(model[0])
    fully_shard(model)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, plain.state_dict(), options=options)
    found, expected = get_model_state_dict(model, options=options), plain.state_dict()
    assert list(found) == list(expected)
    assert_same(found, expected, bitwise=True)
    assert torch.equal(model(batch()), plain(batch()))


@pytest.mark.spec("FS2-SD-12")
@ranks(4)
def test_distributed_checkpoint_is_loaded_under_another_mesh_without_sending_values(tmp_path: Path) -> None:
    source, target = sharded(), sharded(seeded(seed=5), mesh=grid_mesh())
    with Wire() as wire:
        dcp.save({"model": get_model_state_dict(source)}, checkpoint_id=tmp_path)
        state = {"model": get_model_state_dict(target)}
        dcp.load(state, checkpoint_id=tmp_path)
        set_model_state_dict(target, state["model"])
    assert wire.values == []
    assert_same(full_values(target), full_values(source))
