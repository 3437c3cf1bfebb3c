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

from spec_tests.checkpoint.checkpoints import assert_same_state, flat_or_original, make, quiet, set_form, train, wrapped
from spec_tests.harness import ranks
from spec_tests.models.running import Wire
from spec_tests.subject import FullyShardedDataParallel as FSDP

each_class = pytest.mark.parametrize("form", ["sharded", "dtensor"])


def group_of(size: int) -> dist.ProcessGroup:
    """This rank's group of ``size`` consecutive ranks. Every rank must call it."""
    groups = [dist.new_group(list(range(start, start + size))) for start in range(0, dist.get_world_size(), size)]
    dist.barrier()
    return groups[dist.get_rank() // size]


def trained(form: str, seed: int = 0, **options: Any) -> tuple[FSDP, torch.optim.Optimizer]:
    """A model and its optimizer, after two steps with the same batch on all ranks."""
    model = wrapped(make(seed), **options)
    set_form(model, form)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, [10 * seed, 10 * seed + 1], ranks=[0])
    return model, optimizer


def states_of(model: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}


@pytest.mark.spec("SD-SHARD-04", "OSD-LOAD-08", "OSD-06", "OSD-10")
@pytest.mark.parametrize(
    ("written", "read", "keep"), [(4, 2, False), (4, 1, True), (2, 4, True), (1, 4, False), (4, 4, True)]
)
@each_class
@ranks(4)
def test_checkpoint_is_read_by_other_number_of_ranks(
    keep: bool, form: str, written: int, read: int, tmp_path: Path
) -> None:
    writers, readers = group_of(written), group_of(read)
    model, optimizer = trained(form, process_group=writers, use_orig_params=keep)
    again, restored = trained(form, seed=1, process_group=readers, use_orig_params=keep)
    saved, loaded = states_of(model, optimizer), states_of(again, restored)
    # Each group saves its own checkpoint. All are equal, and every rank loads that of the first group.
    with quiet(), Wire() as wire:
        dcp.save(saved, checkpoint_id=tmp_path / str(dist.get_rank() // written), process_group=writers)
        dist.barrier()
        dcp.load(loaded, checkpoint_id=tmp_path / "0", process_group=readers)
    assert wire.values == [], "no rank sent a parameter or a moment"
    again.load_state_dict(loaded["model"])
    FSDP.optim_state_dict_to_load(again, restored, loaded["optim"], load_directly=True)
    for each in (model, again):
        set_form(each, "full")
    found, expected = states_of(again, restored), states_of(model, optimizer)
    assert_same_state({"": found["model"]}, {"": expected["model"]})
    assert_same_state(found["optim"]["state"], expected["optim"]["state"])
    dist.barrier()


@pytest.mark.spec("SD-SHARD-04", "OSD-LOAD-03")
@pytest.mark.parametrize("reads_states_apart", [False, True])
@flat_or_original
@ranks(2)
def test_fresh_optimizer_continues_bitwise(keep: bool, reads_states_apart: bool, tmp_path: Path) -> None:
    """A fresh optimizer has no states to load into: its states are read separately, or made by a step."""
    model, optimizer = trained("sharded", use_orig_params=keep)
    again = wrapped(make(7), use_orig_params=keep)
    restored = torch.optim.Adam(again.parameters(), lr=0.01)
    set_form(again, "sharded")
    if not reads_states_apart:
        for parameter in again.parameters():
            parameter.grad = torch.zeros_like(parameter)
        restored.step()
    loaded = states_of(again, restored)
    with quiet():
        dcp.save(states_of(model, optimizer), checkpoint_id=tmp_path)
        if reads_states_apart:
            reader = dcp.FileSystemReader(tmp_path)
            loaded = {"model": loaded["model"]}
            dcp.load(loaded, checkpoint_id=tmp_path)
            loaded |= load_sharded_optimizer_state_dict(loaded["model"], "optim", reader)
        else:
            dcp.load(loaded, checkpoint_id=tmp_path)
    again.load_state_dict(loaded["model"])
    FSDP.optim_state_dict_to_load(again, restored, loaded["optim"], load_directly=True)
    assert train(again, restored, [5, 6]) == train(model, optimizer, [5, 6])


@pytest.mark.spec("SD-SHARD-05")
@ranks(2)
def test_torch_save_on_one_rank_writes_only_its_shards() -> None:
    model, _ = trained("dtensor")
    stored = io.BytesIO()
    torch.save({name: value.to_local() for name, value in model.state_dict().items()}, stored)
    stored.seek(0)
    mine = sum(value.numel() for value in torch.load(stored).values())
    of_all_ranks = torch.tensor(mine)
    dist.all_reduce(of_all_ranks)
    assert mine < of_all_ranks == sum(parameter.numel() for parameter in make().parameters())
