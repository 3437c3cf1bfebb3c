"""Loading optimizer states: results, communication, optimizers that are keyed by names, and unusual parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests import subject
from spec_tests.checkpoint import checkpoints
from spec_tests.harness import device, ranks
from spec_tests.models.running import Wire
from spec_tests.models.sharding import grid

FSDP = subject.FullyShardedDataParallel
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *_ = subject.ShardingStrategy


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer, **arguments: Any) -> None:
    """One step of a model that `train` does not fit."""
    model(torch.ones(2, 3, device=device()), **arguments).sum().backward()
    optimizer.step()


@pytest.mark.spec("OSD-LOAD-01", "OSD-LOAD-03", "OSD-LOAD-04")
@pytest.mark.parametrize("load_directly", [False, True])
@checkpoints.flat_or_original
@ranks(2)
def test_optim_state_dict_to_load_returns_the_dict_of_the_optimizer(keep: bool, load_directly: bool) -> None:
    model, optimizer = checkpoints.trained(use_orig_params=keep)
    own, states = copy.deepcopy(optimizer.state_dict()), FSDP.optim_state_dict(model, optimizer)
    checkpoints.train(model, optimizer, [5])
    found = FSDP.optim_state_dict_to_load(model, optimizer, states, load_directly=load_directly)
    assert found["param_groups"] == own["param_groups"]
    checkpoints.assert_same_state(found["state"], own["state"])
    step = 2 if load_directly else 3
    assert all(entries["step"] == step for entries in optimizer.state_dict()["state"].values())


@pytest.mark.spec("OSD-LOAD-02")
@ranks(2)
def test_argument_order_of_the_examples_is_accepted_with_a_warning() -> None:
    model, optimizer = checkpoints.trained()
    states = FSDP.optim_state_dict(model, optimizer)
    named = r"optim_state_dict_to_load\(model, optim, optim_state_dict\)"
    with pytest.warns(FutureWarning, match=named) as caught:
        found = FSDP.optim_state_dict_to_load(states, model, optimizer)
    assert [warning.filename for warning in caught] == [__file__]
    checkpoints.assert_same_state(found["state"], optimizer.state_dict()["state"])


@pytest.mark.spec("OSD-LOAD-05")
@pytest.mark.parametrize("nothing", [{}, None, {"state": {0: {}}, "param_groups": []}])
@checkpoints.flat_or_original
@ranks(2)
def test_with_rank0_only_the_first_ranks_dict_is_enough(keep: bool, nothing: Any) -> None:
    model, optimizer = checkpoints.trained(use_orig_params=keep)
    own, states = optimizer.state_dict(), FSDP.optim_state_dict(model, optimizer)
    states["state"]["of my own"] = torch.tensor(3.0)
    checkpoints.set_form(model, "rank 0")
    with Wire() as wire:
        found = FSDP.optim_state_dict_to_load(model, optimizer, states if dist.get_rank() == 0 else nothing)
    assert found["param_groups"] == own["param_groups"]
    assert found["state"].pop("of my own") == 3.0
    checkpoints.assert_same_state(found["state"], own["state"])
    # Two moments of three units are scattered. A broadcast would send each rank the data of other ranks too.
    scattered = [numel for kind, numel in wire.sent if kind == "scatter_"]
    assert len(scattered) == 6
    assert sum(scattered) <= 2 * (sum(parameter.numel() for parameter in checkpoints.make().parameters()) + 3)


@pytest.mark.spec("OSD-LOAD-05")
@checkpoints.flat_or_original
@ranks(4)
def test_with_rank0_only_a_unit_of_other_ranks_is_refused(keep: bool) -> None:
    """Rank 0 is not in the group of the inner unit on ranks 2 and 3, so they cannot get its states from rank 0."""
    inner = FSDP(nn.Linear(4, 2), grid()[0], use_orig_params=keep, device_id=device())
    model = FSDP(nn.Sequential(nn.Linear(3, 4), inner), use_orig_params=keep, device_id=device())
    optimizer = torch.optim.Adam(model.parameters())
    train_once(model, optimizer)
    states = FSDP.optim_state_dict(model, optimizer)
    checkpoints.set_form(model, "rank 0")
    with pytest.raises(ValueError, match=r"unit '1': .* because the units have different process groups"):
        FSDP.optim_state_dict_to_load(model, optimizer, states)


# Options of the model that loads.
WRAPPINGS: dict[str, dict[str, Any]] = {
    "flat": {"use_orig_params": False},
    "original": {"use_orig_params": True},
    "other units": {"auto_wrap_policy": subject.ModuleWrapPolicy({nn.Linear})},
    "one unit": {"auto_wrap_policy": None},
    "no shards": {"sharding_strategy": NO_SHARD},
}


@pytest.mark.spec("OSD-LOAD-08", "OSD-SHARD-03", "SD-FULL-11")
@pytest.mark.parametrize("wrapping", WRAPPINGS)
@checkpoints.flat_or_original
@ranks(4)
def test_full_dicts_load_with_other_number_of_ranks_and_other_wrapping(keep: bool, wrapping: str) -> None:
    model, optimizer = checkpoints.trained(use_orig_params=keep)
    weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    again, restored = checkpoints.trained(steps=0, seed=3, process_group=grid()[0], **WRAPPINGS[wrapping])
    again.load_state_dict(weights)
    FSDP.optim_state_dict_to_load(again, restored, states, load_directly=True)
    checkpoints.assert_same_state(again.state_dict(), weights)
    checkpoints.assert_same_state(FSDP.optim_state_dict(again, restored)["state"], states["state"])
    with checkpoints.quiet():
        older = FSDP.shard_full_optim_state_dict(states, again, optim=restored)
    checkpoints.assert_same_state(older["state"], restored.state_dict()["state"])


@pytest.mark.spec("OSD-08", "OSD-LOAD-01", "OSD-LOAD-03")
@pytest.mark.parametrize("form", ["full", "sharded"])
@checkpoints.flat_or_original
@ranks(2)
def test_groups_find_their_settings_by_the_names_in_them_or_by_their_place(form: str, keep: bool) -> None:
    """The third group has no parameters, so only its place identifies it."""

    def build(seed: int, lr: float) -> tuple[FSDP, torch.optim.Optimizer]:
        model = checkpoints.wrapped(checkpoints.make(seed), use_orig_params=keep)
        checkpoints.set_form(model, form)
        first = list(model.module.first.parameters())
        rest = [parameter for parameter in model.parameters() if all(parameter is not other for other in first)]
        groups = [{"params": rest}, {"params": first, "lr": 3 * lr}, {"params": [], "lr": 5 * lr}]
        return model, torch.optim.AdamW(groups, lr=lr)

    model, optimizer = build(0, 0.01)
    checkpoints.train(model, optimizer, [0])
    states = FSDP.optim_state_dict(model, optimizer)
    of_rest, of_first, empty = states["param_groups"]
    names = [name for name, _ in checkpoints.make().named_parameters()]
    assert of_first["params"] == [name for name in names if name.startswith("first")]
    assert sorted(of_rest["params"] + of_first["params"]) == sorted(names)
    states["param_groups"] = [of_first, of_rest, empty]
    again, restored = build(1, 0.5)
    again.load_state_dict(model.state_dict())
    FSDP.optim_state_dict_to_load(again, restored, states, load_directly=True)
    assert [group["lr"] for group in restored.param_groups] == [0.01, 0.03, 0.05]
    assert checkpoints.train(again, restored, [1]) == checkpoints.train(model, optimizer, [1])


@pytest.mark.spec("PROG-93")
@checkpoints.flat_or_original
@ranks(2)
def test_each_rank_loads_its_own_full_dicts_in_any_order(keep: bool) -> None:
    """A full dict needs no other rank, so a rank may load two models in another order than its peer."""
    both = [checkpoints.trained(seed=seed, use_orig_params=keep) for seed in (0, 1)]
    saved = [(model.state_dict(), FSDP.optim_state_dict(model, optimizer)) for model, optimizer in both]
    for number in (0, 1) if dist.get_rank() else (1, 0):
        (model, optimizer), (weights, states) = both[number], saved[number]
        model.load_state_dict(weights)
        FSDP.optim_state_dict_to_load(model, optimizer, states, load_directly=True)
    for (model, optimizer), (weights, _) in zip(both, saved, strict=True):
        checkpoints.assert_same_state(model.state_dict(), weights)
        checkpoints.train(model, optimizer, [2])


# --- optimizers that are keyed by names ---


@pytest.mark.filterwarnings("ignore")
@pytest.mark.spec("OSD-LOAD-06")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@pytest.mark.parametrize("case", ["one group", "two groups", "frozen", "tied", "ignored", "before a backward"])
@checkpoints.flat_or_original
@ranks(2)
def test_an_optimizer_that_is_keyed_by_names_loads_the_states_that_it_has(keep: bool, case: str, strategy: Any) -> None:
    """After a step, an optimizer has states for the parameters with a gradient, so not for those without elements."""
    from torch.distributed.optim import _NamedOptimizer

    plain: Any = checkpoints.make()
    if case == "frozen":
        plain.first.requires_grad_(False)
    if case == "tied":
        plain.second = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).to(device())
        plain.second[1].weight = plain.second[0].weight
    options = {"ignored_states": list(plain.head.parameters())} if case == "ignored" else {}
    model = checkpoints.wrapped(plain, use_orig_params=keep, sharding_strategy=strategy, **options)
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.1}, {"params": others}] if case == "two groups" else None
    named = _NamedOptimizer(model.named_parameters(), torch.optim.Adam, groups, lr=0.01)
    train_once(model, named)
    own = copy.deepcopy(named.state_dict()["state"])
    states = FSDP.optim_state_dict(model, named)
    if case == "one group":
        assert sorted(states["state"]) == sorted(dict(checkpoints.make().named_parameters()))
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
@checkpoints.flat_or_original
@ranks(2)
def test_frozen_ignored_and_unused_parameters_are_saved_and_loaded(keep: bool, form: str) -> None:
    def build(seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
        plain = checkpoints.make(seed)
        plain.first.requires_grad_(False)
        model = checkpoints.wrapped(plain, ignored_states=list(plain.head.parameters()), use_orig_params=keep)
        checkpoints.set_form(model, form)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    (model, optimizer), (again, restored) = build(0), build(1)
    assert FSDP.optim_state_dict(model, optimizer).get("state", {}) == {}
    train_once(model, optimizer, skip=True)
    states = FSDP.optim_state_dict(model, optimizer)
    if states:
        assert sorted(states["state"]) == ["head.bias", "head.weight", "scale"]
        assert sorted(states["param_groups"][0]["params"]) == sorted(dict(checkpoints.make().named_parameters()))
        ignored = optimizer.state[model.module.head.weight]["exp_avg"]
        assert torch.equal(states["state"]["head.weight"]["exp_avg"], ignored.cpu())
    FSDP.optim_state_dict_to_load(again, restored, states, load_directly=True)
    checkpoints.assert_same_state(restored.state_dict()["state"], optimizer.state_dict()["state"])


class Odd(nn.Module):
    """Has a parameter without dimensions, one without elements and one of five elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scalar * self.weight.sum() + self.nothing.sum()


@pytest.mark.spec("OSD-LOAD-01")
@pytest.mark.parametrize("form", ["full", "sharded"])
@checkpoints.flat_or_original
@ranks(2)
def test_parameters_without_dimensions_or_elements(keep: bool, form: str) -> None:
    model = FSDP(Odd().to(device()), use_orig_params=keep)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_once(model, optimizer)
    checkpoints.set_form(model, form)
    states = FSDP.optim_state_dict(model, optimizer)
    assert states["state"]["scalar"]["exp_avg"].shape == ()
    if not keep:
        # As in a plain optimizer. An optimizer of original parameters has no state for it.
        assert states["state"].pop("nothing")["exp_avg"].shape == (0, 3)
    found = FSDP.optim_state_dict_to_load(model, optimizer, states)["state"]
    checkpoints.assert_same_state(found, optimizer.state_dict()["state"])


@pytest.mark.spec("OSD-LOAD-01")
@checkpoints.flat_or_original
@ranks(2)
def test_empty_entry_means_param_never_had_state(keep: bool) -> None:
    model, optimizer = checkpoints.trained(use_orig_params=keep)
    states = FSDP.optim_state_dict(model, optimizer)
    states["state"]["head.bias"] = {}
    again, restored = checkpoints.trained(steps=0, use_orig_params=keep)
    FSDP.optim_state_dict_to_load(again, restored, states, load_directly=True)
    found = FSDP.optim_state_dict(again, restored)["state"]
    if keep:
        assert "head.bias" not in found
    else:
        assert torch.equal(found["head.bias"]["exp_avg"], torch.zeros(2))
    assert torch.equal(found["head.weight"]["exp_avg"], states["state"]["head.weight"]["exp_avg"])


# --- states that do not fit: all ranks refuse them, and nothing changes ---


def number_all(states: dict[Any, Any]) -> None:
    """As in the state dict of the optimizer, which only this rank has saved correctly."""
    for number, name in enumerate([*states]):
        states[number] = states.pop(name)


FLAT, ORIGINAL, BOTH = ["flat"], ["original"], ["flat", "original"]
UNIT = ("second.0.weight", "second.0.bias")
NO_SHARD_FOUND = "expected a shard of torch.float32, as on other ranks, found none"
HEAD = "head.weight"
# By name: the form, whether the parameters are flat or original ones, a change of the states on rank 1, and the
# message. An optimizer of original parameters may have separate steps and states for each of them.
MISFITS: dict[str, tuple[str, list[str], Callable[[dict[str, Any]], Any], str]] = {
    "no states": ("full", BOTH, lambda s: s.pop(HEAD), "key 'head.weight': expected states"),
    "another parameter": ("full", BOTH, lambda s: s.update(nobody=s["scale"]), "'nobody': expected no such parameter"),
    "shape": ("full", BOTH, lambda s: s[HEAD].update(exp_avg=torch.ones(5)), "expected shape (2, 5), found (5,)"),
    "a tensor": ("full", BOTH, lambda s: s.update(scale=torch.ones(1)), "expected a dict of states, found a Tensor"),
    "numbers": ("full", BOTH, number_all, "expected names of parameters as keys, found the numbers"),
    "step": ("full", FLAT, lambda s: s[HEAD]["step"].add_(1), "expected 2.0 (torch.float32)"),
    "one moment": ("full", FLAT, lambda s: s[HEAD].pop("exp_avg"), "'exp_avg' of 'head.weight': expected"),
    # The remaining states of that rank are valid on their own, as in a run that never created the missing states.
    "rows": ("sharded", BOTH, lambda s: [s[name].pop("exp_avg") for name in UNIT], NO_SHARD_FOUND),
    "a unit": ("sharded", BOTH, lambda s: s.update({name: {} for name in UNIT}), NO_SHARD_FOUND),
    "rows of one parameter": ("sharded", ORIGINAL, lambda s: s[HEAD].pop("exp_avg_sq"), NO_SHARD_FOUND),
    "dtype": (
        "dtensor",
        FLAT,
        lambda s: [s[name].update(exp_avg=s[name]["exp_avg"].double()) for name in UNIT],
        "rank 0: optimizer state 'exp_avg' of 'second.0.weight': expected a shard of torch.float64",
    ),
}
CASES = [(case, parameters) for case, (_, each, _, _) in MISFITS.items() for parameters in each]


@pytest.mark.spec("OSD-LOAD-01", "OSD-LOAD-03", "OSD-06")
@pytest.mark.parametrize(("case", "parameters"), CASES)
@ranks(2)
def test_invalid_or_missing_state_on_rank_1_is_refused_on_all(case: str, parameters: str) -> None:
    form, _, change, message = MISFITS[case]
    model, optimizer = checkpoints.trained(use_orig_params=parameters == "original")
    own = copy.deepcopy(optimizer.state_dict())
    checkpoints.set_form(model, form)
    states = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 1:
        change(states["state"])
    with pytest.raises(RuntimeError, match="the state dict is refused on every rank") as caught:
        FSDP.optim_state_dict_to_load(model, optimizer, states, load_directly=True)
    text = str(caught.value)
    assert text.startswith(f"rank {dist.get_rank()}: ")
    assert "rank 1: " in text or form == "dtensor"
    assert message in text
    checkpoints.assert_same_state(optimizer.state_dict()["state"], own["state"])
    assert FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer)), "no rank waits"


@pytest.mark.spec("OSD-LOAD-01")
@checkpoints.flat_or_original
@ranks(2)
def test_a_dict_without_the_group_of_a_parameter_or_without_states_is_refused(keep: bool) -> None:
    inside = FSDP(nn.Linear(3, 4), use_orig_params=keep, device_id=device())
    model = nn.Sequential(inside, nn.Linear(4, 2).to(device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    train_once(model, optimizer)
    # The second parameter is outside of all units.
    for name in ("0.bias", "1.bias"):
        states = FSDP.optim_state_dict(model, optimizer)
        states["param_groups"][0]["params"].remove(name)
        with pytest.raises(RuntimeError, match=rf"key '{name}': expected in a parameter group, found in none"):
            FSDP.optim_state_dict_to_load(model, optimizer, states)
    with pytest.raises(RuntimeError, match=r"expected the key 'state', found \[\]"):
        FSDP.optim_state_dict_to_load(model, optimizer, {})


@pytest.mark.spec("OSD-LOAD-01", "OSD-10")
@checkpoints.flat_or_original
@ranks(2)
def test_states_of_another_form_than_the_current_one_are_refused(keep: bool) -> None:
    model, optimizer = checkpoints.trained(use_orig_params=keep)
    full = FSDP.optim_state_dict(model, optimizer)
    checkpoints.set_form(model, "sharded")
    sharded = FSDP.optim_state_dict(model, optimizer)
    with pytest.raises(RuntimeError, match=r"'exp_avg' of .*expected a ShardedTensor or DTensor, found a full"):
        FSDP.optim_state_dict_to_load(model, optimizer, full)
    checkpoints.set_form(model, "full")
    with pytest.raises(RuntimeError, match=r"'exp_avg' of .*expected a full tensor, found a ShardedTensor"):
        FSDP.optim_state_dict_to_load(model, optimizer, sharded)


@pytest.mark.spec("OSD-LOAD-01")
@checkpoints.flat_or_original
@ranks(2)
def test_only_original_parameters_of_one_unit_may_be_in_two_groups(keep: bool) -> None:
    def two_groups(model: nn.Module) -> torch.optim.Optimizer:
        weights = {"params": [p for n, p in model.named_parameters() if n.endswith("weight")]}
        others = {"params": [p for n, p in model.named_parameters() if not n.endswith("weight")], "lr": 0.5}
        return torch.optim.Adam([weights, others], lr=0.01)

    original, (model, flat) = (
        checkpoints.wrapped(checkpoints.make(), use_orig_params=True),
        checkpoints.trained(steps=0, use_orig_params=keep),
    )
    optimizer = two_groups(original)
    checkpoints.train(original, optimizer, [0])
    states = FSDP.optim_state_dict(original, optimizer)
    if keep:
        fresh = two_groups(model)
        FSDP.optim_state_dict_to_load(model, fresh, states, load_directly=True)
        assert [group["lr"] for group in fresh.param_groups] == [0.01, 0.5]
    else:
        with pytest.raises(RuntimeError, match=r"parameters in one group of the dict.* groups \[0, 1\]"):
            FSDP.optim_state_dict_to_load(model, flat, states)


@pytest.mark.spec("OSD-LOAD-07")
@ranks(2)
def test_a_model_without_units_is_refused() -> None:
    model = checkpoints.make()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"rank \d.*contains no FullyShardedDataParallel"):
        FSDP.optim_state_dict_to_load(model, optimizer, {"state": {}, "param_groups": []})
