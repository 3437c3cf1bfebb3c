"""Optimizer states that do not fit: all ranks refuse them, and nothing changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.checkpoint.checkpoints import (
    FULL,
    SHARDED,
    assert_same_state,
    flat_or_original,
    make,
    quiet,
    step,
    trained,
    wrapped,
)
from spec_tests.harness import device, ranks
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardedOptimStateDictConfig

States = dict[str, Any]


def refused_everywhere(model: FSDP, optimizer: torch.optim.Optimizer, states: States, *parts: str) -> None:
    """Checks that all ranks raise, all messages have all parts, and nothing has changed."""
    weights, own = full_values(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError) as caught:
        FSDP.optim_state_dict_to_load(model, optimizer, states, load_directly=True)
    for part in (f"rank {dist.get_rank()}: the state dict is refused on every rank", *parts):
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"
    assert_same_state(optimizer.state_dict()["state"], own["state"])
    assert optimizer.state_dict()["param_groups"] == own["param_groups"]
    assert_same(full_values(model), weights, bitwise=True)


def remove(states: States, state: str, *names: str) -> None:
    for name in names:
        del states["state"][name][state]


UNIT = ("second.0.weight", "second.0.bias")
NO_SHARD_FOUND = "expected a shard of torch.float32, as on other ranks, found none"
Changes = list[tuple[Callable[[States], Any], list[str]]]
TO_FULL_DICTS: Changes = [
    (lambda s: s["state"].pop("head.bias"), ["key 'head.bias': expected states", "found none"]),
    (
        lambda s: s["param_groups"][0]["params"].remove("scale"),
        ["key 'scale': expected in a parameter group", "found in none"],
    ),
    (lambda s: s["state"].update(nobody=s["state"]["scale"]), ["key 'nobody': expected no such parameter"]),
    (
        lambda s: s["state"]["head.weight"].update(exp_avg=torch.ones(5, 2)),
        ["'exp_avg' of 'head.weight': expected shape (2, 5), found (5, 2)"],
    ),
    (lambda s: s["state"].update(scale=torch.ones(1)), ["key 'scale': expected a dict of states, found a Tensor"]),
    (lambda s: s.clear(), ["expected the key 'state', found []"]),
]
TO_FULL_DICTS_OF_FLAT_PARAMETERS: Changes = [
    (
        lambda s: s["state"]["head.bias"]["step"].add_(1),
        ["'step'", "expected 2.0 (torch.float32)", "found 3.0 (torch.float32)"],
    ),
    (lambda s: remove(s, "exp_avg", "head.bias"), ["'exp_avg' of 'head.bias': expected", "found none"]),
]
# The remaining states of that rank are valid on their own, as in a run that never created the missing states.
TO_SHARDED_DICTS: Changes = [
    (lambda s: remove(s, "exp_avg", *UNIT), [f"optimizer state 'exp_avg' of 'second.0.weight': {NO_SHARD_FOUND}"]),
    (
        lambda s: s["state"].update({name: {} for name in UNIT}),
        [f"optimizer state 'exp_avg' of 'second.0.bias': {NO_SHARD_FOUND}"],
    ),
]
TO_SHARDED_DICTS_OF_ORIGINAL_PARAMETERS: Changes = [
    (
        lambda s: remove(s, "exp_avg_sq", "head.weight"),
        [f"optimizer state 'exp_avg_sq' of 'head.weight': {NO_SHARD_FOUND}"],
    )
]


@pytest.mark.spec("OSD-LOAD-01", "OSD-LOAD-03", "OSD-06")
@flat_or_original
@ranks(2)
def test_invalid_or_missing_state_on_one_rank_is_refused_on_all(keep: bool) -> None:
    model, optimizer = trained(use_orig_params=keep)
    of_full = TO_FULL_DICTS + ([] if keep else TO_FULL_DICTS_OF_FLAT_PARAMETERS)
    of_sharded = TO_SHARDED_DICTS + (TO_SHARDED_DICTS_OF_ORIGINAL_PARAMETERS if keep else [])
    for form, changes in ((FULL, of_full), (SHARDED, of_sharded)):
        with FSDP.state_dict_type(model, form):
            for change, parts in changes:
                states = FSDP.optim_state_dict(model, optimizer)
                if dist.get_rank() == 1:
                    change(states)
                refused_everywhere(model, optimizer, states, "rank 1: ", *parts)
            states = FSDP.optim_state_dict(model, optimizer)
            assert FSDP.optim_state_dict_to_load(model, optimizer, states), "no rank waits"


@pytest.mark.spec("OSD-LOAD-01", "OSD-06")
@ranks(2)
def test_rows_with_another_dtype_on_one_rank_are_refused() -> None:
    model, optimizer = trained()
    FSDP.set_state_dict_type(model, SHARDED, None, ShardedOptimStateDictConfig(_use_dtensor=True))
    states = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 1:
        for name in UNIT:
            states["state"][name]["exp_avg"] = states["state"][name]["exp_avg"].double()
    part = "rank 0: optimizer state 'exp_avg' of 'second.0.weight': expected a shard of torch.float64"
    refused_everywhere(model, optimizer, states, part)


@pytest.mark.spec("OSD-LOAD-01", "OSD-10")
@flat_or_original
@ranks(2)
def test_state_dict_of_another_type_than_the_current_one_is_refused(keep: bool) -> None:
    model, optimizer = trained(use_orig_params=keep)
    full = FSDP.optim_state_dict(model, optimizer)
    with FSDP.state_dict_type(model, SHARDED):
        sharded = FSDP.optim_state_dict(model, optimizer)
        with pytest.raises(RuntimeError, match=r"'exp_avg' of .*expected a ShardedTensor or DTensor, found a full"):
            FSDP.optim_state_dict_to_load(model, optimizer, full)
    with pytest.raises(RuntimeError, match=r"'exp_avg' of .*expected a full tensor, found a ShardedTensor"):
        FSDP.optim_state_dict_to_load(model, optimizer, sharded)


@pytest.mark.spec("OSD-LOAD-01")
@ranks(2)
def test_parameters_of_one_flat_parameter_in_two_groups_are_refused() -> None:
    plain = make()
    matrices = {"params": [p for p in plain.parameters() if p.ndim > 1]}
    vectors = {"params": [p for p in plain.parameters() if p.ndim <= 1], "lr": 0.5}
    optimizer = torch.optim.Adam([matrices, vectors], lr=0.01)
    step(plain, optimizer, 0, all_ranks=True)
    with quiet():
        states = FSDP.optim_state_dict(plain, optimizer)
    model, flat = trained(steps=0)
    refused_everywhere(
        model, flat, states, "expected all of its parameters in one group of the dict", "in groups [0, 1]"
    )
    with_originals = wrapped(make(), use_orig_params=True)
    weights = {"params": [p for n, p in with_originals.named_parameters() if n.endswith("weight")]}
    others = {"params": [p for n, p in with_originals.named_parameters() if not n.endswith("weight")]}
    grouped = torch.optim.Adam([weights, others], lr=0.01)
    FSDP.optim_state_dict_to_load(with_originals, grouped, states, load_directly=True)
    assert [group["lr"] for group in grouped.param_groups] == [0.01, 0.5]


@pytest.mark.spec("OSD-LOAD-01")
@flat_or_original
@ranks(2)
def test_dict_without_a_parameter_outside_of_all_units_is_refused(keep: bool) -> None:
    inside = FSDP(nn.Linear(3, 4), use_orig_params=keep, device_id=device())
    model = nn.Sequential(inside, nn.Linear(4, 2).to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model(torch.ones(2, 3, device=device())).sum().backward()
    optimizer.step()
    states = FSDP.optim_state_dict(model, optimizer)
    states["param_groups"][0]["params"].remove("1.bias")
    del states["state"]["1.bias"]
    with pytest.raises(RuntimeError, match=r"key '1.bias': expected in a parameter group"):
        FSDP.optim_state_dict_to_load(model, optimizer, states)


@pytest.mark.spec("OSD-LOAD-07")
@ranks(2)
def test_a_model_without_units_is_refused() -> None:
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"rank \d.*contains no FullyShardedDataParallel"):
        FSDP.optim_state_dict_to_load(model, optimizer, {"state": {}, "param_groups": []})


@pytest.mark.spec("OSD-LOAD-09")
@ranks(2)
def test_untransformed_optimizer_dict_of_rank_0_gives_all_ranks_its_moments() -> None:
    """The optimizer accepts the wrong dict without an error. `optim_state_dict_to_load` refuses it."""
    model, optimizer = trained()
    right = FSDP.optim_state_dict(model, optimizer)["state"]
    box = [optimizer.state_dict()]
    dist.broadcast_object_list(box, src=0)
    with pytest.raises(RuntimeError, match="expected names of parameters as keys, found the numbers"):
        FSDP.optim_state_dict_to_load(model, optimizer, box[0])
    optimizer.load_state_dict(box[0])
    wrong = FSDP.optim_state_dict(model, optimizer)["state"]
    assert not torch.equal(wrong["head.weight"]["exp_avg"], right["head.weight"]["exp_avg"])
