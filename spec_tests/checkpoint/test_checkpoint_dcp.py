"""``torch.distributed.checkpoint``: any number of ranks saves and loads sharded dicts without an all-gather."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

from spec_tests.checkpoint import checkpoints
from spec_tests.checkpoint.checkpoints import (
    FULL,
    SHARDED,
    assert_same_state,
    flat_or_original,
    make,
    quiet,
    step,
    train_alike,
    wrapped,
)
from spec_tests.harness import ranks
from spec_tests.models.running import Wire
from spec_tests.models.sharding import HYBRID_SHARD, grid
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardedOptimStateDictConfig, ShardedStateDictConfig

kinds = pytest.mark.parametrize("use_dtensor", [False, True], ids=["sharded-tensor", "dtensor"])


def groups_of(size: int) -> dist.ProcessGroup:
    """This rank's group of ``size`` consecutive ranks. Every rank must call it."""
    groups = [dist.new_group(list(range(start, start + size))) for start in range(0, dist.get_world_size(), size)]
    dist.barrier()
    return groups[dist.get_rank() // size]


def trained(group: dist.ProcessGroup | None, use_dtensor: bool = False, seed: int = 0, **options: Any) -> Any:
    """A model on a group and its optimizer, after two steps with the same batch on all ranks."""
    model = wrapped(make(seed), process_group=group, **options)
    configs = ShardedStateDictConfig(_use_dtensor=use_dtensor), ShardedOptimStateDictConfig(_use_dtensor=use_dtensor)
    FSDP.set_state_dict_type(model, SHARDED, *configs)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_alike(model, optimizer, range(10 * seed, 10 * seed + 2))
    return model, optimizer


def full_of(model: FSDP, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    with FSDP.state_dict_type(model, FULL):
        return model.state_dict(), FSDP.optim_state_dict(model, optimizer)["state"]


def save(model: FSDP, optimizer: torch.optim.Optimizer, where: Path, group: dist.ProcessGroup | None) -> None:
    checkpoint = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    with quiet(), Wire() as wire:
        dcp.save(checkpoint, checkpoint_id=where, process_group=group)
    assert wire.values == [], "no rank sent a parameter or a moment"


def load(model: FSDP, optimizer: torch.optim.Optimizer, where: Path, group: dist.ProcessGroup | None) -> None:
    """Loads into the model's state dicts, which define the shards that each rank needs."""
    weights = model.state_dict()
    states = FSDP.optim_state_dict(model, optimizer)
    checkpoint = {"model": weights, "optim": states}
    with quiet(), Wire() as wire:
        dcp.load(checkpoint, checkpoint_id=where, process_group=group)
    assert wire.values == []
    model.load_state_dict(checkpoint["model"])
    FSDP.optim_state_dict_to_load(model, optimizer, checkpoint["optim"], load_directly=True)


def assert_restored(model: FSDP, optimizer: torch.optim.Optimizer, weights: Any, states: Any) -> None:
    found_weights, found_states = full_of(model, optimizer)
    assert found_weights.keys() == weights.keys()
    assert all(torch.equal(found_weights[name], weights[name]) for name in weights)
    assert_same_state(found_states, states)
    dist.barrier()


@pytest.mark.spec("SD-SHARD-04", "OSD-LOAD-08", "OSD-06", "OSD-10")
@pytest.mark.parametrize(
    ("written", "read", "keep"), [(4, 2, False), (4, 1, True), (2, 4, True), (1, 4, False), (4, 4, True)]
)
@kinds
@ranks(4)
def test_checkpoint_is_read_by_other_number_of_ranks(
    keep: bool, use_dtensor: bool, written: int, read: int, tmp_path: Path
) -> None:
    writers, readers = groups_of(written), groups_of(read)
    model, optimizer = trained(writers, use_dtensor, use_orig_params=keep)
    # Each group saves its own checkpoint. All are equal, and every rank loads that of the first group.
    save(model, optimizer, tmp_path / str(dist.get_rank() // written), writers)
    weights, states = full_of(model, optimizer)
    dist.barrier()
    again, restored = trained(readers, use_dtensor, seed=1, use_orig_params=keep)
    load(again, restored, tmp_path / "0", readers)
    assert_restored(again, restored, weights, states)


@pytest.mark.spec("SD-SHARD-04", "HYB-10")
@kinds
@ranks(4)
def test_a_hybrid_model_is_written_and_read(use_dtensor: bool, tmp_path: Path) -> None:
    groups = grid()
    dist.barrier()
    model, optimizer = trained(groups, use_dtensor, sharding_strategy=HYBRID_SHARD)
    save(model, optimizer, tmp_path, None)
    again, restored = trained(groups, use_dtensor, seed=1, sharding_strategy=HYBRID_SHARD)
    load(again, restored, tmp_path, None)
    assert_restored(again, restored, *full_of(model, optimizer))


@pytest.mark.spec("SD-SHARD-04", "OSD-LOAD-03")
@pytest.mark.parametrize("reads_states_apart", [False, True])
@flat_or_original
@ranks(2)
def test_fresh_optimizer_continues_bitwise(keep: bool, reads_states_apart: bool, tmp_path: Path) -> None:
    """A fresh optimizer has no states to load into before its first step, so its states are read separately."""
    model, optimizer = trained(None, use_orig_params=keep)
    save(model, optimizer, tmp_path, None)
    again, restored = checkpoints.trained(steps=0, seed=7, use_orig_params=keep)
    FSDP.set_state_dict_type(again, SHARDED)
    if reads_states_apart:
        weights = again.state_dict()
        with quiet():
            dcp.load({"model": weights}, checkpoint_id=tmp_path)
            again.load_state_dict(weights)
            states = load_sharded_optimizer_state_dict(weights, "optim", dcp.FileSystemReader(tmp_path))["optim"]
        FSDP.optim_state_dict_to_load(again, restored, states, load_directly=True)
    else:
        load(again, restored, tmp_path, None)
        assert not restored.state, "libraries that load in this way resume so, see docs/troubleshoot.md"
        for parameter in again.parameters():
            parameter.grad = torch.zeros_like(parameter)
        restored.step()
        load(again, restored, tmp_path, None)
    for number in (5, 6):
        assert step(again, restored, number) == step(model, optimizer, number)


@pytest.mark.spec("SD-SHARD-05")
@ranks(2)
def test_torch_save_on_one_rank_writes_only_its_shards() -> None:
    model, _ = trained(None, use_dtensor=True)
    state = model.state_dict()
    stored = io.BytesIO()
    torch.save({name: value.to_local() for name, value in state.items()}, stored)
    stored.seek(0)
    mine = sum(value.numel() for value in torch.load(stored).values())
    whole = sum(parameter.numel() for parameter in make().parameters())
    counts = [None, None]
    dist.all_gather_object(counts, mine)
    assert sum(counts) == whole
    assert mine < whole
