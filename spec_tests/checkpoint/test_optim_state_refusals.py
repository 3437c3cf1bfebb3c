"""Optimizer states that do not fit: all ranks refuse them, and nothing changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.checkpoint.checkpoints import assert_same_state, flat_or_original, make, set_form, train, trained
from spec_tests.harness import device, ranks
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullyShardedDataParallel as FSDP

States = dict[str, Any]


def remove(key: str, *names: str) -> Callable[[States], None]:
    return lambda states: [states["state"][name].pop(key) for name in names]  # type: ignore[return-value]


UNIT = ("second.0.weight", "second.0.bias")
NO_SHARD_FOUND = "expected a shard of torch.float32, as on other ranks, found none"
# The form, a change of the dict on rank 1, and the message.
MISFITS: dict[str, tuple[str, Callable[[States], Any], str]] = {
    "no states": ("full", lambda s: s["state"].pop("head.bias"), "key 'head.bias': expected states"),
    "in no group": (
        "full",
        lambda s: s["param_groups"][0]["params"].remove("scale"),
        "key 'scale': expected in a parameter group, found in none",
    ),
    "another parameter": (
        "full",
        lambda s: s["state"].update(nobody=s["state"]["scale"]),
        "key 'nobody': expected no such parameter",
    ),
    "shape": (
        "full",
        lambda s: s["state"]["head.weight"].update(exp_avg=torch.ones(5, 2)),
        "'exp_avg' of 'head.weight': expected shape (2, 5), found (5, 2)",
    ),
    "a tensor": (
        "full",
        lambda s: s["state"].update(scale=torch.ones(1)),
        "key 'scale': expected a dict of states, found a Tensor",
    ),
    "empty": ("full", lambda s: s.clear(), "expected the key 'state', found []"),
    "step": ("full", lambda s: s["state"]["head.bias"]["step"].add_(1), "expected 2.0 (torch.float32)"),
    "one moment": ("full", remove("exp_avg", "head.bias"), "'exp_avg' of 'head.bias': expected"),
    # The remaining states of that rank are valid on their own, as in a run that never created the missing states.
    "rows": ("sharded", remove("exp_avg", *UNIT), f"optimizer state 'exp_avg' of 'second.0.weight': {NO_SHARD_FOUND}"),
    "a unit": (
        "sharded",
        lambda s: s["state"].update({name: {} for name in UNIT}),
        f"optimizer state 'exp_avg' of 'second.0.bias': {NO_SHARD_FOUND}",
    ),
    "rows of one parameter": (
        "sharded",
        remove("exp_avg_sq", "head.weight"),
        f"optimizer state 'exp_avg_sq' of 'head.weight': {NO_SHARD_FOUND}",
    ),
    "dtype of rows": (
        "dtensor",
        lambda s: [s["state"][name].update(exp_avg=s["state"][name]["exp_avg"].double()) for name in UNIT],
        "rank 0: optimizer state 'exp_avg' of 'second.0.weight': expected a shard of torch.float64",
    ),
}
# An optimizer of original parameters may have separate steps and states for each of them.
VALID = {("step", True), ("one moment", True), ("dtype of rows", True), ("rows of one parameter", False)}
CASES = [(case, keep) for case in MISFITS for keep in (False, True) if (case, keep) not in VALID]


@pytest.mark.spec("OSD-LOAD-01", "OSD-LOAD-03", "OSD-06")
@pytest.mark.parametrize(("case", "keep"), CASES)
@ranks(2)
def test_invalid_or_missing_state_on_rank_1_is_refused_on_all(case: str, keep: bool) -> None:
    form, change, message = MISFITS[case]
    model, optimizer = trained(use_orig_params=keep)
    weights, own = full_values(model), copy.deepcopy(optimizer.state_dict())
    set_form(model, form)
    states = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 1:
        change(states)
    with pytest.raises(RuntimeError, match="the state dict is refused on every rank") as caught:
        FSDP.optim_state_dict_to_load(model, optimizer, states, load_directly=True)
    text = str(caught.value)
    assert text.startswith(f"rank {dist.get_rank()}: ")
    assert "rank 1: " in text or form == "dtensor"
    assert message in text
    assert_same_state(optimizer.state_dict()["state"], own["state"])
    assert optimizer.state_dict()["param_groups"] == own["param_groups"]
    assert_same(full_values(model), weights, bitwise=True)
    assert FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer)), "no rank waits"


@pytest.mark.spec("OSD-LOAD-01", "OSD-10")
@flat_or_original
@ranks(2)
def test_states_of_another_form_than_the_current_one_are_refused(keep: bool) -> None:
    model, optimizer = trained(use_orig_params=keep)
    full = FSDP.optim_state_dict(model, optimizer)
    set_form(model, "sharded")
    sharded = FSDP.optim_state_dict(model, optimizer)
    with pytest.raises(RuntimeError, match=r"'exp_avg' of .*expected a ShardedTensor or DTensor, found a full"):
        FSDP.optim_state_dict_to_load(model, optimizer, full)
    set_form(model, "full")
    with pytest.raises(RuntimeError, match=r"'exp_avg' of .*expected a full tensor, found a ShardedTensor"):
        FSDP.optim_state_dict_to_load(model, optimizer, sharded)


@pytest.mark.spec("OSD-LOAD-01")
@flat_or_original
@ranks(2)
def test_only_original_parameters_of_one_unit_may_be_in_two_groups(keep: bool) -> None:
    def two_groups(model: nn.Module) -> torch.optim.Optimizer:
        weights = {"params": [p for n, p in model.named_parameters() if n.endswith("weight")]}
        others = {"params": [p for n, p in model.named_parameters() if not n.endswith("weight")], "lr": 0.5}
        return torch.optim.Adam([weights, others], lr=0.01)

    original, _ = trained(steps=0, use_orig_params=True)
    optimizer = two_groups(original)
    train(original, optimizer, [0])
    states = FSDP.optim_state_dict(original, optimizer)
    model, flat = trained(steps=0, use_orig_params=keep)
    if keep:
        fresh = two_groups(model)
        FSDP.optim_state_dict_to_load(model, fresh, states, load_directly=True)
        assert [group["lr"] for group in fresh.param_groups] == [0.01, 0.5]
        return
    with pytest.raises(
        RuntimeError, match=r"expected all of its parameters in one group of the dict.* groups \[0, 1\]"
    ):
        FSDP.optim_state_dict_to_load(model, flat, states)


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
