"""``torch.distributed.checkpoint`` with the sharded dicts of the wrapper."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

from spec_tests.checkpoint.checkpoints import flat_or_original, make, quiet, set_form, train, trained, wrapped
from spec_tests.harness import ranks
from spec_tests.subject import FullyShardedDataParallel as FSDP


def states_of(model: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}


@pytest.mark.spec("SD-SHARD-04", "OSD-LOAD-03")
@pytest.mark.parametrize("reads_states_apart", [False, True])
@flat_or_original
@ranks(2)
def test_fresh_optimizer_continues_bitwise(keep: bool, reads_states_apart: bool, tmp_path: Path) -> None:
    """A fresh optimizer has no states to load into: its states are read separately, or made by a step."""
    model, optimizer = trained(use_orig_params=keep)
    again, restored = trained(steps=0, seed=7, use_orig_params=keep)
    for each in (model, again):
        set_form(each, "sharded")
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
    model = wrapped(make())
    set_form(model, "dtensor")
    stored = io.BytesIO()
    torch.save({name: value.to_local() for name, value in model.state_dict().items()}, stored)
    stored.seek(0)
    mine = sum(value.numel() for value in torch.load(stored).values())
    of_all_ranks = torch.tensor(mine)
    dist.all_reduce(of_all_ranks)
    assert mine < of_all_ranks == sum(parameter.numel() for parameter in make().parameters())
