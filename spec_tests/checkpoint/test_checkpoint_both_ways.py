"""Checkpoints move from minifsdp to torch's training methods and back, and training continues unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from spec_tests.checkpoint import checkpoints
from spec_tests.checkpoint.checkpoints import make, set_form, train
from spec_tests.harness import device, ranks
from spec_tests.subject import FullyShardedDataParallel as FSDP

TORCH = torch_fsdp.FullyShardedDataParallel


def in_torch(model: nn.Module, **options: Any) -> Any:
    policy = torch_fsdp.wrap.ModuleWrapPolicy({nn.Sequential})
    return TORCH(model, auto_wrap_policy=policy, device_id=device(), **options)


def in_place(model: Any) -> nn.Module:
    for part in (model.first, model.second, model):
        torch_fsdp.fully_shard(part)
    return model


METHODS: dict[str, Callable[[Any], nn.Module]] = {
    "fsdp1-flat": in_torch,
    "fsdp1-original": lambda model: in_torch(model, use_orig_params=True),
    "fully_shard": in_place,
    "ddp": DistributedDataParallel,
    "plain": lambda model: model,
}
FORMS = [*((name, "full") for name in METHODS), *((name, "sharded") for name in [*METHODS][:3])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.spec("SD-FULL-02", "SD-FULL-08", "SD-SHARD-01", "SD-SHARD-03", "OSD-03", "OSD-04", "OSD-06")
@pytest.mark.spec("OSD-LOAD-01", "OSD-LOAD-03")
@pytest.mark.parametrize(("name", "form"), FORMS)
@checkpoints.flat_or_original
@ranks(2)
def test_torch_continues_our_training_and_we_continue_that_of_torch(keep: bool, name: str, form: str) -> None:
    """With two ranks the losses are bitwise equal, since a mean of two numbers has no order."""
    ours, again = (checkpoints.wrapped(make(seed), use_orig_params=keep) for seed in (0, 5))
    theirs = METHODS[name](make(7))
    optimizer, restored, their_optimizer = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ours, again, theirs))
    train(ours, optimizer, [0, 1])
    set_form(ours, "dtensor" if (name, form) == ("fully_shard", "sharded") else form)
    weights, states = ours.state_dict(), FSDP.optim_state_dict(ours, optimizer)
    options = StateDictOptions(full_state_dict=form == "full")
    set_state_dict(theirs, their_optimizer, model_state_dict=weights, optim_state_dict=states, options=options)
    # A single process computes the mean loss over all ranks, and no rank's own loss.
    expected = train(theirs, their_optimizer, [2, 3], ranks=range(2) if name == "plain" else ())
    assert train(ours, optimizer, [2, 3]) == expected or name == "plain"
    weights, states = get_state_dict(theirs, their_optimizer, options=options)
    set_form(again, form)
    again.load_state_dict(weights)
    for each in (again, ours):
        set_form(each, "full")
    checkpoints.assert_same_state(again.state_dict(), ours.state_dict())
    # On the CPU, torch's wrapper saves one buffer for all states of an original parameter (seen with torch 2.13).
    if (name, form) != ("fsdp1-original", "full"):
        set_form(again, form)
        FSDP.optim_state_dict_to_load(again, restored, states, load_directly=True)
        assert train(again, restored, [4, 5]) == train(ours, optimizer, [4, 5])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.spec("SD-SHARD-03")
@ranks(2)
def test_sharded_bfloat16_checkpoint_of_torch_is_read_although_a_rank_has_no_row_of_a_parameter() -> None:
    theirs, ours = in_torch(make().bfloat16()), checkpoints.wrapped(make(7).bfloat16())
    set_form(ours, "sharded")
    with TORCH.state_dict_type(theirs, torch_fsdp.StateDictType.SHARDED_STATE_DICT):
        ours.load_state_dict(theirs.state_dict())
    set_form(ours, "full")
    checkpoints.assert_same_state(ours.state_dict(), make().bfloat16().state_dict())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.spec("SD-FULL-02", "SD-FULL-08", "SD-SHARD-01", "SD-LOCAL-01", "SD-LOCAL-03")
@pytest.mark.parametrize("form", ["full", "sharded", "local"])
@checkpoints.flat_or_original
@ranks(2)
def test_column_major_weights_move_in_both_directions(keep: bool, form: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).to(device())
    for parameter in plain.parameters():
        parameter.data = parameter.data.t().contiguous().t()
    expected = plain.state_dict()
    theirs, *both = (copy.deepcopy(plain) for _ in range(3))
    theirs = in_torch(theirs)
    ours, other = (checkpoints.wrapped(each, use_orig_params=keep) for each in both)
    for parameter in (*theirs.parameters(), *other.parameters()):
        parameter.data.zero_()
    TORCH.set_state_dict_type(theirs, torch_fsdp.StateDictType[checkpoints.FORMS[form][0].name])
    set_form(ours, form)
    theirs.load_state_dict({name.replace("flat_", "_flat_"): value for name, value in ours.state_dict().items()})
    with TORCH.summon_full_params(theirs):
        checkpoints.assert_same_state(theirs.module.state_dict(), expected)
    # torch refuses to save these matrices in sharded form.
    if form != "sharded":
        set_form(other, form)
        other.load_state_dict(theirs.state_dict())
        set_form(other, "full")
        checkpoints.assert_same_state(other.state_dict(), expected)
