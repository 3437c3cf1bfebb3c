"""Optimizer states of several dtypes. Each state keeps its dtype, and all ranks must agree on the dtype."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spec_tests.checkpoint.checkpoints import (
    FULL,
    SHARDED,
    assert_same_state,
    flat_or_original,
    gathered,
    make,
    step,
    wrapped,
)
from spec_tests.harness import ranks
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


def trained(**options: Any) -> tuple[FSDP, torch.optim.Optimizer]:
    model = wrapped(make(), **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step(model, optimizer, 0)
    return model, optimizer


@pytest.mark.spec("OSD-04", "OSD-06", "OSD-LOAD-01")
@pytest.mark.parametrize("form", FORMS)
@flat_or_original
@ranks(2)
def test_scalar_state_keeps_its_dtype_when_saved_and_loaded(keep: bool, form: str) -> None:
    model, optimizer = trained(use_orig_params=keep)
    given = copy.deepcopy(optimizer.state_dict())
    numbers = {
        "double": torch.tensor(THIRD, dtype=torch.float64),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "whole": torch.tensor(3, dtype=torch.int32),
        "truth": torch.tensor(True),
        "complex": torch.tensor(1 + 2j, dtype=torch.complex64),
    }
    for entries in given["state"].values():
        entries.update(copy.deepcopy(numbers))
    kind, config = FORMS[form]
    with FSDP.state_dict_type(model, kind, None, config):
        found = FSDP.optim_state_dict(model, optimizer, given)
        loadable = FSDP.optim_state_dict_to_load(model, optimizer, found)
    written = found["state"].values() if found else []
    for entries in [*written, *loadable["state"].values()]:
        for key, number in numbers.items():
            assert (entries[key].dtype, entries[key].shape) == (number.dtype, number.shape), key
            assert torch.equal(entries[key].cpu(), number), key
    assert_same_state(loadable["state"], given["state"])


@pytest.mark.spec("OSD-08", "OSD-04", "OSD-LOAD-01")
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("form", FORMS)
@ranks(2)
def test_parameters_of_one_unit_may_have_a_state_in_different_dtypes(form: str, strategy: ShardingStrategy) -> None:
    """With original parameters, an optimizer may use different dtypes for biases and weights."""
    model, optimizer = trained(use_orig_params=True, sharding_strategy=strategy)
    expected = copy.deepcopy(FSDP.optim_state_dict(model, optimizer)["state"])
    names = {number: name for number, (name, _) in enumerate(model.named_parameters())}
    given = copy.deepcopy(optimizer.state_dict())
    for number, entries in given["state"].items():
        change(entries, names[number])
    for name, entries in expected.items():
        change(entries, name)
    kind, config = FORMS[form]
    with FSDP.state_dict_type(model, kind, None, config):
        found = FSDP.optim_state_dict(model, optimizer, given)
        loadable = FSDP.optim_state_dict_to_load(model, optimizer, found)
    if found:
        whole = {name: {key: gathered(v).cpu() for key, v in of.items()} for name, of in found["state"].items()}
        assert_same_state(whole, expected)
    assert_same_state(loadable["state"], given["state"])


def change(entries: dict[str, Any], name: str) -> None:
    """Converts a state of the biases to bfloat16, and sets a value of the weights that bfloat16 cannot represent."""
    if name.endswith("bias"):
        entries["exp_avg"] = entries["exp_avg"].bfloat16()
    else:
        entries["exp_avg"] = torch.full_like(entries["exp_avg"], THIRD)


@pytest.mark.spec("OSD-08", "OSD-01")
@flat_or_original
@ranks(2)
def test_ranks_with_one_state_in_different_dtypes_all_refuse_to_write_it(keep: bool) -> None:
    model, optimizer = trained(use_orig_params=keep)
    given = copy.deepcopy(optimizer.state_dict())
    if dist.get_rank() == 1:
        for entries in given["state"].values():
            entries["exp_avg_sq"] = entries["exp_avg_sq"].double()
    with pytest.raises(RuntimeError) as caught:
        FSDP.optim_state_dict(model, optimizer, given)
    assert "optimizer state 'exp_avg_sq' of 'first.0.weight': expected" in str(caught.value)
    assert "torch.float32) as on rank 0, found" in str(caught.value)
    assert "torch.float64) on rank 1" in str(caught.value)
    assert FSDP.optim_state_dict(model, optimizer)["state"], "nobody waits for anybody"


@pytest.mark.spec("OSD-08", "OSD-01")
@flat_or_original
@ranks(2)
def test_ranks_with_equal_lists_of_tensors_in_different_dtypes_all_refuse_to_write_them(keep: bool) -> None:
    model, optimizer = trained(use_orig_params=keep)
    given = copy.deepcopy(optimizer.state_dict())
    for entries in given["state"].values():
        entries["factors"] = [torch.ones(2, dtype=torch.float64 if dist.get_rank() else torch.float32)]
    with pytest.raises(RuntimeError, match=r"optimizer state 'factors' of 'first\.0\.weight': expected .* on rank 1"):
        FSDP.optim_state_dict(model, optimizer, given)


@pytest.mark.spec("OSD-08", "OSD-LOAD-01")
@pytest.mark.parametrize("form", ["full", "rank0-only", "sharded"])
@ranks(2)
def test_a_flat_parameter_cannot_have_a_state_in_two_dtypes(form: str) -> None:
    model, optimizer = trained()
    kind, config = FORMS[form]
    with FSDP.state_dict_type(model, SHARDED if kind is SHARDED else FULL):
        states = FSDP.optim_state_dict(model, optimizer)
    # This combination is valid with original parameters, so such a dict can exist.
    original, of_originals = trained(use_orig_params=True)
    given = copy.deepcopy(of_originals.state_dict())
    names = {number: name for number, (name, _) in enumerate(original.named_parameters())}
    for number, entries in given["state"].items():
        change(entries, names[number])
    with FSDP.state_dict_type(original, SHARDED if kind is SHARDED else FULL):
        mixed = FSDP.optim_state_dict(original, of_originals, given)
    with FSDP.state_dict_type(model, kind, None, config):
        with pytest.raises(RuntimeError, match=r"'exp_avg': a flat parameter stores it only once"):
            FSDP.optim_state_dict_to_load(model, optimizer, mixed)
        assert FSDP.optim_state_dict_to_load(model, optimizer, states), "they can go on together"
