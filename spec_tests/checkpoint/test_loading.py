"""State dicts of ``fully_shard``: manually with ``DTensor``, and with torch's functions.

minifsdp only provides the parameters; these tests check that torch's own functions work with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from spec_tests import subject
from spec_tests.harness import device, ranks
from spec_tests.models import modules, running, sharding

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def on_meta() -> Any:
    with torch.device("meta"):
        return sharding.sharded(modules.Stack())


def assert_full_values(model: Any, expected: Any) -> None:
    """Checks the parameters bit by bit. Every rank must call it."""
    found = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    torch.testing.assert_close(found, dict(expected), rtol=0.0, atol=0.0, check_device=False)


@pytest.mark.spec("FS2-SD-01", "FS2-SD-12", "FS2-SD-13")
@ranks(2)
def test_state_dict_has_dtensors_under_plain_names_and_is_loaded_without_communication() -> None:
    model, target = sharding.sharded(), sharding.sharded(modules.seeded(seed=5))
    # The setting of the wrapper has no effect.
    with (
        running.Wire() as wire,
        subject.FullyShardedDataParallel.state_dict_type(model, subject.StateDictType.FULL_STATE_DICT),
    ):
        state = model.state_dict()
        assert target.load_state_dict(state) == ([], [])
    assert wire.sent == []
    assert list(state) == list(modules.seeded().state_dict())
    assert not isinstance(subject.fully_shard(nn.BatchNorm1d(4)).state_dict()["running_mean"], DTensor)
    for name, parameter in model.named_parameters():
        assert state[name].placements == parameter.placements
        assert state[name].to_local().data_ptr() == parameter.to_local().data_ptr()
    assert_full_values(target, modules.seeded().state_dict())


@pytest.mark.spec("FS2-SD-01")
@ranks(2)
def test_state_dict_is_sharded_while_units_are_unsharded() -> None:
    model, plain = sharding.sharded(reshard_after_forward=False), modules.seeded()
    with torch.no_grad():
        model(running.batch())
    model.blocks[1].unshard()
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor)
        assert torch.equal(value.full_tensor(), plain.get_parameter(name))


# --- manually ---


@pytest.mark.spec("FS2-SD-02", "FS2-SD-03", "FS2-SD-09")
@pytest.mark.parametrize("is_grid", [False, True])
@ranks(4)
def test_full_state_dict_is_saved_and_loaded_manually(is_grid: bool, tmp_path: Path) -> None:
    source, target = sharding.sharded(mesh=sharding.grid_mesh() if is_grid else None), on_meta()
    # All ranks all-gather the tensors one by one; rank 0 keeps them.
    kept = {}
    for name, value in source.state_dict().items():
        unsharded = value.full_tensor()
        if dist.get_rank() == 0:
            kept[name] = unsharded.cpu()
    if dist.get_rank() == 0:
        torch.save(kept, tmp_path / "model.pt")
    dist.barrier()
    full = torch.load(tmp_path / "model.pt", mmap=True, weights_only=True, map_location="cpu")
    torch.testing.assert_close(full, dict(modules.seeded().state_dict()), rtol=0.0, atol=0.0, check_device=False)
    mine = {}
    for name, placed in target.state_dict().items():
        mine[name] = nn.Parameter(distribute_tensor(full[name].to(device()), placed.device_mesh, placed.placements))
    target.load_state_dict(mine, assign=True)
    assert_full_values(target, modules.seeded().state_dict())
    target(running.batch()).sum().backward()


@pytest.mark.spec("FS2-SD-04")
@ranks(2)
def test_loading_into_meta_parameters_without_assign_is_refused() -> None:
    with pytest.raises((RuntimeError, ValueError), match="assign"):
        on_meta().load_state_dict(sharding.sharded().state_dict())


@pytest.mark.spec("FS2-SD-05", "NEW-21")
@pytest.mark.parametrize("is_on_meta", [False, True])
@ranks(2)
def test_plain_tensors_are_refused_with_remedy_and_while_debugging_sharded(is_on_meta: bool) -> None:
    model = on_meta() if is_on_meta else sharding.sharded(modules.seeded(seed=5))
    with pytest.raises((RuntimeError, ValueError), match="set_model_state_dict"):
        model.load_state_dict(modules.seeded().state_dict(), assign=is_on_meta)
    with running.detailed_debugging():
        model.load_state_dict(modules.seeded().state_dict(), assign=is_on_meta)
    assert_full_values(model, modules.seeded().state_dict())


@pytest.mark.spec("FS2-SD-14")
@pytest.mark.parametrize(("wrong", "assign"), [("ranks", False), ("ranks", True), ("placements", True)])
@ranks(2)
def test_dtensors_over_other_ranks_are_refused_before_anything_is_copied(wrong: str, assign: bool) -> None:
    model, state = sharding.sharded(modules.seeded(seed=5)), sharding.sharded().state_dict()
    # The last tensor, so that all others would be copied before the error.
    last = list(state)[-1]
    mesh, unsharded, shape = state[last].device_mesh, state[last].full_tensor(), tuple(state[last].shape)
    replicated = distribute_tensor(unsharded, mesh, [Replicate()], src_data_rank=None)
    turned = distribute_tensor(unsharded, DeviceMesh(mesh.device_type, [1, 0]), [Shard(0)], src_data_rank=None)
    state[last] = turned if wrong == "ranks" else replicated
    with pytest.raises(RuntimeError, match=r"torch\.distributed\.checkpoint") as caught:
        model.load_state_dict(state, assign=assign)
    for part in (
        f"rank {dist.get_rank()}: load_state_dict expected {last!r} of shape {shape}",
        "on ranks [0, 1] with placements (Shard(dim=0),)",
        f"found shape {shape} on ranks {[1, 0] if wrong == 'ranks' else [0, 1]} with placements",
    ):
        assert part in str(caught.value)
    assert_full_values(model, modules.seeded(seed=5).state_dict())
    if not assign:
        model.load_state_dict({**state, last: replicated})
        assert_full_values(model, modules.seeded().state_dict())


# --- with torch's functions ---


@pytest.mark.spec("FS2-SD-15", "FS2-SD-06", "MIG-12")
@pytest.mark.parametrize("state", ["sharded", "after an evaluation", "before a backward", "meta"])
@pytest.mark.parametrize("from_rank_0", [False, True])
@ranks(2)
def test_full_state_dicts_are_loaded_by_all_ranks_or_from_rank_0(from_rank_0: bool, state: str) -> None:
    model = on_meta().to_empty(device=device()) if state == "meta" else sharding.sharded(modules.seeded(seed=5))
    if state in ("after an evaluation", "before a backward"):
        with torch.set_grad_enabled(state == "before a backward"):
            model(running.batch())
        # A forward recorded by autograd keeps the root unsharded for its backward.
        assert all(isinstance(p, DTensor) for p in model.parameters()) is (state == "after an evaluation")
    given = {} if from_rank_0 and dist.get_rank() else modules.seeded().state_dict()
    set_model_state_dict(model, given, options=FROM_RANK_0 if from_rank_0 else FULL)
    assert torch.equal(model(running.batch()), modules.seeded()(running.batch()))
    if state != "before a backward":
        model(running.batch()).sum().backward()
        assert_full_values(model, modules.seeded().state_dict())


@pytest.mark.spec("FS2-SD-07")
@ranks(2)
def test_broadcast_accepts_only_full_dictionaries() -> None:
    with pytest.raises(ValueError, match="full_state_dict"):
        set_model_state_dict(sharding.sharded(), {}, options=StateDictOptions(broadcast_from_rank0=True))


@pytest.mark.spec("PROG-08")
@pytest.mark.parametrize("is_unit", [True, False])
@ranks(2)
def test_full_state_dict_of_module_in_two_places_loads(is_unit: bool) -> None:
    def build() -> nn.Sequential:
        block = modules.Block()
        return nn.Sequential(block, nn.Linear(6, 6), block)

    plain, model = modules.seeded(build, 1), modules.seeded(build, 2)
    if is_unit:
        subject.fully_shard(model[0])
    subject.fully_shard(model)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, plain.state_dict(), options=options)
    found = get_model_state_dict(model, options=options)
    assert list(found) == list(plain.state_dict())
    torch.testing.assert_close(dict(found), dict(plain.state_dict()), rtol=0.0, atol=0.0)
    assert torch.equal(model(running.batch()), plain(running.batch()))
