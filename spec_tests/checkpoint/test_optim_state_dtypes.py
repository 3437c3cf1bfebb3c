"""Optimizer states of several dtypes. Each state keeps its dtype, and all ranks must agree on the dtype."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.checkpoint.checkpoints import FULL, SHARDED, assert_same_state, flat_or_original, gathered, trained
from spec_tests.harness import ranks
from spec_tests.models.sharding import FULL_SHARD, NO_SHARD
from spec_tests.subject import FullOptimStateDictConfig, ShardedOptimStateDictConfig, ShardingStrategy
from spec_tests.subject import FullyShardedDataParallel as FSDP

FORMS: dict[str, tuple[Any, Any]] = {
    "full": (FULL, FullOptimStateDictConfig()),
    "rank0-only": (FULL, FullOptimStateDictConfig(rank0_only=True)),
    "sharded": (SHARDED, ShardedOptimStateDictConfig()),
    "dtensor": (SHARDED, ShardedOptimStateDictConfig(_use_dtensor=True)),
}
# float32 cannot represent this value.
THIRD = 1 / 3


def saved_and_loadable(model: FSDP, optimizer: Any, given: Any, form: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states by name with whole tensors, and the states for the optimizer."""
    kind, config = FORMS[form]
    with FSDP.state_dict_type(model, kind, None, config):
        found = FSDP.optim_state_dict(model, optimizer, given)
        loadable = FSDP.optim_state_dict_to_load(model, optimizer, found)["state"]
    states = found["state"] if found else {}
    whole = {name: {key: gathered(value) for key, value in entries.items()} for name, entries in states.items()}
    return whole, loadable


@pytest.mark.spec("OSD-04", "OSD-06", "OSD-LOAD-01")
@pytest.mark.parametrize("form", FORMS)
@flat_or_original
@ranks(2)
def test_state_keeps_its_dtype_when_saved_and_loaded(keep: bool, form: str) -> None:
    model, optimizer = trained(steps=1, use_orig_params=keep)
    full = FSDP.optim_state_dict(model, optimizer)["state"]
    given = copy.deepcopy(optimizer.state_dict())
    numbers = {
        "double": torch.tensor(THIRD, dtype=torch.float64),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "whole": torch.tensor(3, dtype=torch.int32),
        "truth": torch.tensor(True),
        "complex": torch.tensor(1 + 2j, dtype=torch.complex64),
    }
    for entries in given["state"].values():
        entries.update(exp_avg=entries["exp_avg"].bfloat16(), note=2.5, nothing=None, **copy.deepcopy(numbers))
    whole, loadable = saved_and_loadable(model, optimizer, given, form)
    expected = {
        name: {**entries, "exp_avg": entries["exp_avg"].bfloat16(), "note": 2.5, "nothing": None, **numbers}
        for name, entries in full.items()
    }
    if whole:
        assert_same_state(whole, expected)
    assert_same_state(loadable, given["state"])


def change(entries: dict[str, Any], name: str) -> None:
    """Converts a state of the biases to bfloat16, and sets a value of the weights that bfloat16 cannot represent."""
    if name.endswith("bias"):
        entries["exp_avg"] = entries["exp_avg"].bfloat16()
    else:
        entries["exp_avg"] = torch.full_like(entries["exp_avg"], THIRD)


def changed(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The dict of the optimizer of original parameters, with two dtypes for one state."""
    given = copy.deepcopy(optimizer.state_dict())
    names = [name for name, _ in model.named_parameters()]
    for number, entries in given["state"].items():
        change(entries, names[number])
    return given


@pytest.mark.spec("OSD-08", "OSD-04", "OSD-LOAD-01")
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@pytest.mark.parametrize("form", FORMS)
@ranks(2)
def test_parameters_of_one_unit_may_have_a_state_in_different_dtypes(form: str, strategy: ShardingStrategy) -> None:
    """With original parameters, an optimizer may use different dtypes for biases and weights."""
    model, optimizer = trained(steps=1, use_orig_params=True, sharding_strategy=strategy)
    expected = copy.deepcopy(FSDP.optim_state_dict(model, optimizer)["state"])
    for name, entries in expected.items():
        change(entries, name)
    given = changed(model, optimizer)
    whole, loadable = saved_and_loadable(model, optimizer, given, form)
    if whole:
        assert_same_state(whole, expected)
    assert_same_state(loadable, given["state"])


@pytest.mark.spec("OSD-08", "OSD-LOAD-01")
@pytest.mark.parametrize("form", ["full", "rank0-only", "sharded"])
@ranks(2)
def test_a_flat_parameter_cannot_have_a_state_in_two_dtypes(form: str) -> None:
    model, optimizer = trained(steps=1)
    # The combination is valid with original parameters, so such a dict can exist.
    original, of_originals = trained(steps=1, use_orig_params=True)
    kind, config = FORMS[form]
    for wrapper in (model, original):
        FSDP.set_state_dict_type(wrapper, kind)
    states = FSDP.optim_state_dict(model, optimizer)
    mixed = FSDP.optim_state_dict(original, of_originals, changed(original, of_originals))
    with FSDP.state_dict_type(model, kind, None, config):
        with pytest.raises(RuntimeError, match=r"'exp_avg': a flat parameter stores it only once"):
            FSDP.optim_state_dict_to_load(model, optimizer, mixed)
        assert FSDP.optim_state_dict_to_load(model, optimizer, states), "the two can train together"
