"""Checkpoints move from torch's training methods to minifsdp and back, and training continues unchanged.

In each test, one library trains for two steps. The other one loads its checkpoint into a model with different values,
and both continue training. With two ranks the losses are bitwise equal, since a mean of two numbers has no order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from spec_tests.checkpoint.checkpoints import FORMS, flat_or_original, in_torch, make, quiet, set_form, train, wrapped
from spec_tests.harness import ranks
from spec_tests.models.modules import seeded
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullyShardedDataParallel as FSDP

TORCH = torch_fsdp.FullyShardedDataParallel


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
SHARDED = [(name, "sharded") for name in ("fsdp1-flat", "fsdp1-original", "fully_shard")]
READERS = [*((name, "full") for name in METHODS), *SHARDED]
# Full dicts of torch's wrapper with original parameters are omitted: on the CPU all states of a parameter share one
# buffer there and have the values of the last state (seen with torch 2.13).
WRITERS = [row for row in READERS if row != ("fsdp1-original", "full")]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def assert_both_continue(ours: Any, theirs: Any, name: str) -> None:
    # A single process computes the mean loss over all ranks, and no rank's own loss.
    losses = train(*ours, range(2, 5))
    expected = train(*theirs, range(2, 5), ranks=range(2) if name == "plain" else ())
    assert losses == expected or name == "plain"
    set_form(ours[0], "full")
    weights = ours[0].state_dict()
    expected_weights, _ = get_state_dict(*theirs, options=StateDictOptions(full_state_dict=True))
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[key], expected_weights[key]) for key in weights)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.spec("SD-FULL-08", "SD-SHARD-03", "OSD-LOAD-01", "OSD-LOAD-03")
@pytest.mark.parametrize(("name", "form"), WRITERS)
@flat_or_original
@ranks(2)
def test_checkpoint_of_torch_is_read(keep: bool, name: str, form: str) -> None:
    theirs, ours = METHODS[name](make()), wrapped(make(7), use_orig_params=keep)
    their_optimizer, optimizer = adam(theirs), adam(ours)
    train(theirs, their_optimizer, [0, 1], ranks=range(2) if name == "plain" else ())
    options = StateDictOptions(full_state_dict=form == "full")
    weights, states = get_state_dict(theirs, their_optimizer, options=options)
    set_form(ours, form)
    ours.load_state_dict(weights)
    FSDP.optim_state_dict_to_load(ours, optimizer, states, load_directly=True)
    assert_both_continue((ours, optimizer), (theirs, their_optimizer), name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.spec("SD-FULL-02", "SD-SHARD-01", "OSD-03", "OSD-04", "OSD-06")
@pytest.mark.parametrize(("name", "form"), READERS)
@flat_or_original
@ranks(2)
def test_torch_reads_our_checkpoint(keep: bool, name: str, form: str) -> None:
    theirs, ours = METHODS[name](make(7)), wrapped(make(), use_orig_params=keep)
    their_optimizer, optimizer = adam(theirs), adam(ours)
    train(ours, optimizer, [0, 1])
    set_form(ours, "dtensor" if (name, form) == ("fully_shard", "sharded") else form)
    weights, states = ours.state_dict(), FSDP.optim_state_dict(ours, optimizer)
    options = StateDictOptions(full_state_dict=form == "full")
    set_state_dict(theirs, their_optimizer, model_state_dict=weights, optim_state_dict=states, options=options)
    assert_both_continue((ours, optimizer), (theirs, their_optimizer), name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.spec("SD-SHARD-03")
@ranks(2)
def test_sharded_bfloat16_checkpoint_of_torch_is_read_although_a_rank_has_no_row_of_a_parameter() -> None:
    theirs, ours = in_torch(make().bfloat16()), wrapped(make(7).bfloat16())
    set_form(ours, "sharded")
    with TORCH.state_dict_type(theirs, torch_fsdp.StateDictType.SHARDED_STATE_DICT):
        ours.load_state_dict(theirs.state_dict())
    assert_same(full_values(ours), dict(make().bfloat16().named_parameters()), bitwise=True)


def columns(seed: int = 0) -> nn.Module:
    """A model with matrices in column-major order."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.t().contiguous().t()
    return model


@pytest.mark.spec("SD-FULL-02", "SD-FULL-08", "SD-SHARD-01", "SD-LOCAL-01", "SD-LOCAL-03")
@pytest.mark.parametrize("form", ["full", "sharded", "local"])
@flat_or_original
@ranks(2)
def test_column_major_weights_move_in_both_directions(keep: bool, form: str) -> None:
    expected = dict(columns().named_parameters())
    with quiet():
        theirs, ours = in_torch(columns(7)), wrapped(columns(), use_orig_params=keep)
        TORCH.set_state_dict_type(theirs, torch_fsdp.StateDictType[FORMS[form][0].name])
        set_form(ours, form)
        theirs.load_state_dict({name.replace("flat_", "_flat_"): value for name, value in ours.state_dict().items()})
        with TORCH.summon_full_params(theirs):
            assert_same(dict(theirs.named_parameters()), expected, bitwise=True)
        # torch refuses to save these matrices in sharded form.
        if form != "sharded":
            other = wrapped(columns(7), use_orig_params=keep)
            set_form(other, form)
            other.load_state_dict(theirs.state_dict())
            assert_same(full_values(other), expected, bitwise=True)
