"""Loading optimizer states: results, communication, optimizers that are keyed by names, and unusual parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.checkpoint import checkpoints
from spec_tests.checkpoint.checkpoints import (
    assert_same_state,
    flat_or_original,
    make,
    set_form,
    train,
    trained,
    wrapped,
)
from spec_tests.checkpoint.refusals import caught_warnings
from spec_tests.harness import device, ranks
from spec_tests.models.sharding import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, grid
from spec_tests.models.values import assert_same, full_values
from spec_tests.oracles import count_collectives
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer, size: int = 3, **arguments: Any) -> None:
    """One step of a model that `train` does not fit."""
    model(torch.ones(2, size, device=device()), **arguments).sum().backward()
    optimizer.step()


@pytest.mark.spec("OSD-LOAD-01", "OSD-LOAD-03", "OSD-LOAD-04")
@pytest.mark.parametrize("load_directly", [False, True])
@flat_or_original
@ranks(2)
def test_optim_state_dict_to_load_returns_the_dict_of_the_optimizer(keep: bool, load_directly: bool) -> None:
    model, optimizer = trained(use_orig_params=keep)
    own, states = copy.deepcopy(optimizer.state_dict()), FSDP.optim_state_dict(model, optimizer)
    train(model, optimizer, [5])
    found = FSDP.optim_state_dict_to_load(model, optimizer, states, load_directly=load_directly)
    assert found["param_groups"] == own["param_groups"]
    checkpoints.assert_same_state(found["state"], own["state"])
    step = 2 if load_directly else 3
    assert all(entries["step"] == step for entries in optimizer.state_dict()["state"].values())


@pytest.mark.spec("OSD-LOAD-02")
@ranks(2)
def test_argument_order_of_the_examples_is_accepted_with_a_warning() -> None:
    model, optimizer = trained()
    states = FSDP.optim_state_dict(model, optimizer)
    with caught_warnings() as caught:
        found = FSDP.optim_state_dict_to_load(states, model, optimizer)
    assert [(w.category, w.filename) for w in caught] == [(FutureWarning, __file__)]
    assert "optim_state_dict_to_load(model, optim, optim_state_dict)" in str(caught[0].message)
    checkpoints.assert_same_state(found["state"], optimizer.state_dict()["state"])


@pytest.mark.spec("OSD-LOAD-05")
@pytest.mark.parametrize("nothing", [{}, None, {"state": {0: {}}, "param_groups": []}])
@flat_or_original
@ranks(2)
def test_with_rank0_only_the_first_ranks_dict_is_enough(keep: bool, nothing: Any) -> None:
    model, optimizer = trained(use_orig_params=keep)
    own, states = optimizer.state_dict(), FSDP.optim_state_dict(model, optimizer)
    states["state"]["of my own"] = torch.tensor(3.0)
    set_form(model, "rank 0")
    with count_collectives() as counts:
        found = FSDP.optim_state_dict_to_load(model, optimizer, states if dist.get_rank() == 0 else nothing)
    assert found["param_groups"] == own["param_groups"]
    assert found["state"].pop("of my own") == 3.0
    checkpoints.assert_same_state(found["state"], own["state"])
    # Two moments of three units are scattered. A broadcast would send each rank the data of other ranks too.
    assert counts.calls["scatter_"] == 6
    sent = sum(num_bytes for kind, num_bytes in counts.order if kind == "scatter_")
    of_all_ranks = 2 * sum(parameter.numel() for parameter in wrapped(make()).parameters())
    assert sent <= 2 * 4 * of_all_ranks


@pytest.mark.spec("OSD-LOAD-05")
@flat_or_original
@ranks(4)
def test_with_rank0_only_a_unit_of_other_ranks_is_refused(keep: bool) -> None:
    """Rank 0 is not in the group of the inner unit on ranks 2 and 3, so they cannot get its states from rank 0."""
    shared: dict[str, Any] = {"use_orig_params": keep, "device_id": device()}
    inner = FSDP(nn.Linear(4, 2), process_group=grid()[0], **shared)
    model = FSDP(nn.Sequential(nn.Linear(3, 4), inner), **shared)
    optimizer = torch.optim.Adam(model.parameters())
    train_once(model, optimizer)
    states = FSDP.optim_state_dict(model, optimizer)
    set_form(model, "rank 0")
    with pytest.raises(ValueError, match=r"unit '1': .* because the units have different process groups"):
        FSDP.optim_state_dict_to_load(model, optimizer, states)


@pytest.mark.spec("OSD-LOAD-08", "SD-FULL-11")
@pytest.mark.parametrize(
    "options",
    [
        {"use_orig_params": False, "process_group": "pair"},
        {"use_orig_params": True, "process_group": "pair"},
        {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "process_group": "pair"},
        {"auto_wrap_policy": None},
        {"sharding_strategy": NO_SHARD},
    ],
    ids=["flat", "original", "other units", "one unit", "no shards"],
)
@flat_or_original
@ranks(4)
def test_full_dicts_load_with_other_number_of_ranks_and_other_wrapping(keep: bool, options: dict[str, Any]) -> None:
    model, optimizer = trained(use_orig_params=keep)
    weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    options = {name: grid()[0] if value == "pair" else value for name, value in options.items()}
    again, restored = trained(steps=0, seed=3, **options)
    again.load_state_dict(weights)
    FSDP.optim_state_dict_to_load(again, restored, states, load_directly=True)
    checkpoints.assert_same_state(FSDP.optim_state_dict(again, restored)["state"], states["state"])
    found = again.state_dict()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.spec("OSD-08", "OSD-LOAD-01", "OSD-LOAD-03")
@pytest.mark.parametrize("form", ["full", "sharded"])
@flat_or_original
@ranks(2)
def test_groups_find_their_settings_by_the_names_in_them_or_by_their_place(form: str, keep: bool) -> None:
    """The third group has no parameters, so only its place identifies it."""

    def build(seed: int, lr: float) -> tuple[FSDP, torch.optim.Optimizer]:
        model = wrapped(make(seed), use_orig_params=keep)
        set_form(model, form)
        first = list(model.module.first.parameters())
        rest = [parameter for parameter in model.parameters() if all(parameter is not other for other in first)]
        groups = [{"params": rest}, {"params": first, "lr": 3 * lr}, {"params": [], "lr": 5 * lr}]
        return model, torch.optim.AdamW(groups, lr=lr)

    model, optimizer = build(0, 0.01)
    train(model, optimizer, [0])
    states = FSDP.optim_state_dict(model, optimizer)
    of_rest, of_first, empty = states["param_groups"]
    names = [name for name, _ in make().named_parameters()]
    assert of_first["params"] == [name for name in names if name.startswith("first")]
    assert sorted(of_rest["params"] + of_first["params"]) == sorted(names)
    states["param_groups"] = [of_first, of_rest, empty]
    again, restored = build(1, 0.5)
    again.load_state_dict(model.state_dict())
    FSDP.optim_state_dict_to_load(again, restored, states, load_directly=True)
    assert [group["lr"] for group in restored.param_groups] == [0.01, 0.03, 0.05]
    assert train(again, restored, [1]) == train(model, optimizer, [1])


@flat_or_original
@pytest.mark.spec("PROG-93")
@ranks(2)
def test_each_rank_loads_its_own_full_dicts_in_any_order(keep: bool) -> None:
    both = [trained(seed=seed, use_orig_params=keep) for seed in (0, 1)]
    saved = [(model.state_dict(), FSDP.optim_state_dict(model, optimizer)) for model, optimizer in both]
    before = [full_values(model) for model, _ in both]
    for number in (0, 1) if dist.get_rank() else (1, 0):
        (model, optimizer), (weights, states) = both[number], saved[number]
        model.load_state_dict(weights)
        FSDP.optim_state_dict_to_load(model, optimizer, states, load_directly=True)
    for (model, optimizer), expected in zip(both, before, strict=True):
        assert_same(full_values(model), expected, bitwise=True)
        train(model, optimizer, [2])


# --- optimizers that are keyed by names ---


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}]


def freeze(model: Any) -> None:
    model.first.requires_grad_(False)


def tie(model: Any) -> None:
    model.second = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).to(device())
    model.second[1].weight = model.second[0].weight


@pytest.mark.filterwarnings("ignore")
@pytest.mark.spec("OSD-LOAD-06")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@pytest.mark.parametrize("case", ["one group", "two groups", "frozen", "tied", "ignored", "before a backward"])
@flat_or_original
@ranks(2)
def test_an_optimizer_that_is_keyed_by_names_loads_the_states_that_it_has(keep: bool, case: str, strategy: Any) -> None:
    """After a step, an optimizer has states for the parameters with a gradient, so not for those without elements."""
    from torch.distributed.optim import _NamedOptimizer

    plain = make()
    {"frozen": freeze, "tied": tie}.get(case, lambda model: None)(plain)
    options = {"ignored_states": list(plain.head.parameters())} if case == "ignored" else {}
    model = wrapped(plain, use_orig_params=keep, sharding_strategy=strategy, **options)
    groups = two_groups(model) if case == "two groups" else None
    named = _NamedOptimizer(model.named_parameters(), torch.optim.Adam, groups, lr=0.01)
    train_once(model, named)
    own = copy.deepcopy(named.state_dict()["state"])
    states = FSDP.optim_state_dict(model, named)
    if case == "one group":
        assert sorted(states["state"]) == sorted(dict(make().named_parameters()))
    if case == "before a backward":
        # With some strategies, the parameters stay unsharded.
        model(torch.ones(2, 3, device=device()))
    found = FSDP.optim_state_dict_to_load(model, named, states, is_named_optimizer=True)
    checkpoints.assert_same_state(found["state"], own)
    named.load_state_dict(found)
    checkpoints.assert_same_state(named.state_dict()["state"], own)


# --- unusual parameters ---


@pytest.mark.spec("OSD-04", "OSD-08")
@pytest.mark.parametrize("form", ["full", "rank 0"])
@flat_or_original
@ranks(2)
def test_frozen_ignored_and_unused_parameters_are_saved_and_loaded(keep: bool, form: str) -> None:
    def build(seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
        plain = make(seed)
        plain.first.requires_grad_(False)
        model = wrapped(plain, ignored_states=list(plain.head.parameters()), use_orig_params=keep)
        set_form(model, form)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    (model, optimizer), (again, restored) = build(0), build(1)
    assert FSDP.optim_state_dict(model, optimizer).get("state", {}) == {}
    train_once(model, optimizer, skip=True)
    states = FSDP.optim_state_dict(model, optimizer)
    if states:
        assert sorted(states["state"]) == ["head.bias", "head.weight", "scale"]
        assert sorted(states["param_groups"][0]["params"]) == sorted(dict(make().named_parameters()))
        ignored = optimizer.state[model.module.head.weight]["exp_avg"]
        assert torch.equal(states["state"]["head.weight"]["exp_avg"], ignored.cpu())
    FSDP.optim_state_dict_to_load(again, restored, states, load_directly=True)
    checkpoints.assert_same_state(restored.state_dict()["state"], optimizer.state_dict()["state"])


class Odd(nn.Module):
    """Has a parameter without dimensions and, if ``has_more``, one without elements and one of five elements."""

    def __init__(self, has_more: bool) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3)) if has_more else None
        self.weight = nn.Parameter(torch.ones(5)) if has_more else None

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scalar
        return x if self.weight is None else x * self.weight.sum() + self.nothing.sum()


@pytest.mark.spec("OSD-LOAD-01")
@pytest.mark.parametrize("has_more", [False, True])
@pytest.mark.parametrize("form", ["full", "sharded"])
@flat_or_original
@ranks(2)
def test_parameters_without_dimensions_or_elements(keep: bool, form: str, has_more: bool) -> None:
    model = FSDP(Odd(has_more).to(device()), use_orig_params=keep)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_once(model, optimizer)
    set_form(model, form)
    states = FSDP.optim_state_dict(model, optimizer)
    assert states["state"]["scalar"]["exp_avg"].shape == ()
    if has_more and not keep:
        # As in a plain optimizer. An optimizer of original parameters has no state for it.
        assert states["state"].pop("nothing")["exp_avg"].shape == (0, 3)
    found = FSDP.optim_state_dict_to_load(model, optimizer, states)["state"]
    checkpoints.assert_same_state(found, optimizer.state_dict()["state"])


@pytest.mark.spec("OSD-LOAD-01")
@flat_or_original
@ranks(2)
def test_empty_entry_means_param_never_had_state(keep: bool) -> None:
    model, optimizer = trained(use_orig_params=keep)
    states = FSDP.optim_state_dict(model, optimizer)
    states["state"]["head.bias"] = {}
    again, restored = trained(steps=0, use_orig_params=keep)
    FSDP.optim_state_dict_to_load(again, restored, states, load_directly=True)
    found = FSDP.optim_state_dict(again, restored)["state"]
    if keep:
        assert "head.bias" not in found
    else:
        assert torch.equal(found["head.bias"]["exp_avg"], torch.zeros(2))
    assert torch.equal(found["head.weight"]["exp_avg"], states["state"]["head.weight"]["exp_avg"])


# --- states that do not fit: all ranks refuse them, and nothing changes ---


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
