"""Loading optimizer states: training continues unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from spec_tests.checkpoint.checkpoints import (
    FULL,
    OPTIMIZERS,
    SHARDED,
    assert_same_state,
    flat_or_original,
    full_or_sharded,
    in_torch,
    make,
    quiet,
    step,
    trained,
    wrapped,
)
from spec_tests.checkpoint.refusals import caught_warnings
from spec_tests.harness import device, ranks
from spec_tests.models.running import batch
from spec_tests.models.sharding import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, grid
from spec_tests.oracles import count_collectives
from spec_tests.subject import FullOptimStateDictConfig, FullStateDictConfig, ModuleWrapPolicy
from spec_tests.subject import FullyShardedDataParallel as FSDP

RANK0_ONLY = FullOptimStateDictConfig(rank0_only=True)


def resume(model: FSDP, optimizer: torch.optim.Optimizer, weights: dict[str, Any], states: dict[str, Any]) -> None:
    model.load_state_dict(weights)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer, size: int = 3, **arguments: Any) -> None:
    """One step of a model that `step` does not fit."""
    model(torch.ones(2, size, device=device()), **arguments).sum().backward()
    optimizer.step()


@pytest.mark.spec("OSD-LOAD-03", "OSD-10")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@full_or_sharded
@flat_or_original
@ranks(2)
def test_restored_state_continues_training_bitwise(kind: str, form: Any, keep: bool) -> None:
    model, optimizer = trained(kind, use_orig_params=keep)
    again, restored = trained(kind, steps=0, seed=7, use_orig_params=keep)
    for wrapper in (model, again):
        FSDP.set_state_dict_type(wrapper, form)
    resume(again, restored, model.state_dict(), FSDP.optim_state_dict(model, optimizer))
    for number in (2, 3):
        assert step(again, restored, number) == step(model, optimizer, number)
    expected = FSDP.optim_state_dict(model, optimizer)["state"]
    FSDP.set_state_dict_type(model, FULL), FSDP.set_state_dict_type(again, FULL)
    assert expected.keys() == FSDP.optim_state_dict(again, restored)["state"].keys()
    ours, other = model.state_dict(), again.state_dict()
    assert all(torch.equal(ours[name], other[name]) for name in ours)


@pytest.mark.spec("OSD-LOAD-01", "OSD-LOAD-03", "OSD-LOAD-04")
@flat_or_original
@ranks(2)
def test_optim_state_dict_to_load_returns_the_dict_of_the_optimizer_as_in_torch(keep: bool) -> None:
    """Compares states with torch only for flat parameters, because torch pads between original parameters."""
    model, optimizer = trained(use_orig_params=keep)
    own, states = copy.deepcopy(optimizer.state_dict()), FSDP.optim_state_dict(model, optimizer)
    with quiet():
        other = in_torch(make(), use_orig_params=keep)
        theirs = OPTIMIZERS["adam"](other.parameters())
        expected = other.optim_state_dict_to_load(other, theirs, copy.deepcopy(states))
    step(model, optimizer, 5)
    for load_directly in (False, True):
        found = FSDP.optim_state_dict_to_load(model, optimizer, states, load_directly=load_directly)
        assert found["param_groups"] == own["param_groups"] == expected["param_groups"]
        assert_same_state(found["state"], own["state"])
        if not keep:
            assert_same_state(found["state"], expected["state"])
    assert_same_state(optimizer.state_dict()["state"], own["state"])


@pytest.mark.spec("OSD-LOAD-02")
@ranks(2)
def test_argument_order_of_the_examples_is_accepted_with_a_warning() -> None:
    model, optimizer = trained()
    states = FSDP.optim_state_dict(model, optimizer)
    with caught_warnings() as caught:
        found = FSDP.optim_state_dict_to_load(states, model, optimizer)
    assert [w.category for w in caught] == [FutureWarning]
    assert "optim_state_dict_to_load(model, optim, optim_state_dict)" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert_same_state(found["state"], optimizer.state_dict()["state"])


@pytest.mark.spec("OSD-LOAD-05")
@pytest.mark.parametrize("nothing", [{}, None, {"state": {0: {}}, "param_groups": []}])
@flat_or_original
@ranks(2)
def test_with_rank0_only_the_first_ranks_dict_is_enough(keep: bool, nothing: Any) -> None:
    model, optimizer = trained(use_orig_params=keep)
    own, states = optimizer.state_dict(), FSDP.optim_state_dict(model, optimizer)
    states["state"]["of my own"] = torch.tensor(3.0)
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(), RANK0_ONLY)
    with count_collectives() as counts:
        found = FSDP.optim_state_dict_to_load(model, optimizer, states if dist.get_rank() == 0 else nothing)
    assert found["param_groups"] == own["param_groups"]
    assert found["state"].pop("of my own") == 3.0
    assert_same_state(found["state"], own["state"])
    # Two moments of three units are scattered. A broadcast would send each rank the data of other ranks too.
    assert counts.calls["scatter_"] == 6
    sent = sum(num_bytes for kind, num_bytes in counts.order if kind == "scatter_")
    local_shards = [parameter.numel() for parameter in wrapped(make()).parameters()]
    assert sent <= 2 * 4 * 2 * sum(local_shards), "only the pieces of each rank"


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
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(), RANK0_ONLY)
    with pytest.raises(ValueError, match=r"unit '1': .* because the units have different process groups"):
        FSDP.optim_state_dict_to_load(model, optimizer, states)


@pytest.mark.spec("OSD-LOAD-06")
@flat_or_original
@ranks(2)
def test_an_optimizer_that_is_keyed_by_names_saves_and_loads_states(keep: bool) -> None:
    model = wrapped(make(), use_orig_params=keep, sharding_strategy=SHARD_GRAD_OP)
    with quiet():
        from torch.distributed.optim import _NamedOptimizer

        groups = [{"params": model.parameters()}]
        named = _NamedOptimizer(model.named_parameters(), torch.optim.Adam, groups, model, lr=0.01)

    def train() -> None:
        # zero_grad() of that class uses attributes that only other optimizers have. It needs all gradients.
        model.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        train_once(model, named)

    train()
    own, states = named.state_dict(), copy.deepcopy(FSDP.optim_state_dict(model, named))
    assert sorted(states["state"]) == sorted(dict(make().named_parameters()))
    for _ in range(2):
        found = FSDP.optim_state_dict_to_load(model, named, states, is_named_optimizer=True)
        # That class sorts the names.
        sorted_groups = [{**group, "params": sorted(group["params"])} for group in found["param_groups"]]
        assert sorted_groups == own["param_groups"]
        # Includes parameters without elements on this rank, because such optimizers require every name.
        assert found["state"].keys() == dict(model.named_parameters()).keys()
        assert_same_state({name: found["state"][name] for name in own["state"]}, own["state"])
        # Then the parameters stay unsharded, because no backward follows.
        model(batch(width=3))
    train()
    named.load_state_dict(FSDP.optim_state_dict_to_load(model, named, states, is_named_optimizer=True))
    assert_same_state(FSDP.optim_state_dict(model, named)["state"], states["state"])


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:]}]


def frozen(model: Any) -> dict[str, Any]:
    model.first.requires_grad_(False)
    return {}


def tied(model: Any) -> dict[str, Any]:
    model.second[0] = nn.Linear(5, 5, device=device())
    model.second.append(nn.Linear(5, 5, device=device()))
    model.second[-1].weight = model.second[0].weight
    return {}


# By name of the case, a change of the model that returns options of the wrapper, and the groups of the optimizer.
NAMED = {
    "one group": (lambda _: {}, lambda _: None),
    "two groups": (lambda _: {}, two_groups),
    "frozen": (frozen, lambda _: None),
    "tied": (tied, lambda _: None),
    "ignored": (lambda model: {"ignored_states": list(model.head.parameters())}, lambda _: None),
}


def saved_and_loaded(model: Any, groups: Any = None, width: int = 3) -> list[dict[str, Any]]:
    """The states of an optimizer with names as keys after a step, and after it has saved and loaded them."""
    with quiet():
        from torch.distributed.optim import _NamedOptimizer

        named = _NamedOptimizer(model.named_parameters(), torch.optim.Adam, groups, lr=0.01)
        train_once(model, named, size=width)
        own = copy.deepcopy(named.state_dict()["state"])
        found = model.optim_state_dict_to_load(model, named, model.optim_state_dict(model, named), True)
        named.load_state_dict(found)
    assert found["state"].keys() == own.keys()
    return [own, named.state_dict()["state"]]


@pytest.mark.spec("OSD-LOAD-06")
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@pytest.mark.parametrize("case", NAMED)
@flat_or_original
@ranks(2)
def test_an_optimizer_that_is_keyed_by_names_loads_the_states_that_it_has(keep: bool, case: str, strategy: Any) -> None:
    """After a step, an optimizer has states for the parameters with a gradient, so not for those without elements."""
    change, groups_of = NAMED[case]
    plain = make()
    options = change(plain)
    model = wrapped(plain, use_orig_params=keep, sharding_strategy=strategy, **options)
    before, after = saved_and_loaded(model, groups_of(model))
    assert_same_state(after, before)


@pytest.mark.spec("OSD-LOAD-06")
@pytest.mark.parametrize("width", [8, 64])
@ranks(2)
def test_an_optimizer_that_is_keyed_by_names_has_the_entries_of_torch(width: int) -> None:
    """Compares names. With flat parameters, torch raises KeyError, and with original ones it loads other values."""
    kinds = FSDP, torch_fsdp.FullyShardedDataParallel
    models = [kind(nn.Linear(width, 8, device=device()), use_orig_params=True, device_id=device()) for kind in kinds]
    ours, theirs = (saved_and_loaded(model, width=width) for model in models)
    assert [sorted(state) for state in ours] == [sorted(state) for state in theirs]


class OneIdle(nn.Module):
    """A unit that is sharded and never used, in a model that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 3), FSDP(nn.Linear(3, 3), device_id=device())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.spec("OSD-LOAD-01")
@ranks(2)
def test_full_states_of_no_shard_units_are_allowed_in_a_sharded_dict() -> None:
    model = FSDP(OneIdle(), sharding_strategy=NO_SHARD, device_id=device())
    optimizer = torch.optim.Adam(model.parameters())
    train_once(model, optimizer)
    own = copy.deepcopy(optimizer.state_dict()["state"])
    with FSDP.state_dict_type(model, SHARDED):
        states = FSDP.optim_state_dict(model, optimizer)
        FSDP.optim_state_dict_to_load(model, optimizer, states, load_directly=True)
    assert_same_state(optimizer.state_dict()["state"], own)


@pytest.mark.spec("OSD-LOAD-08", "SD-FULL-11")
@flat_or_original
@ranks(4)
def test_optimizer_state_loads_with_other_number_of_ranks_and_other_wrapping(keep: bool) -> None:
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    model, optimizer = trained(use_orig_params=keep)
    weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    for options in (
        {"use_orig_params": keep, "process_group": mine},
        {"use_orig_params": not keep, "process_group": mine},
        {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "process_group": mine},
        {"auto_wrap_policy": None},
        {"sharding_strategy": NO_SHARD},
    ):
        again, restored = trained(steps=0, seed=3, **options)
        resume(again, restored, weights, states)
        assert_same_state(FSDP.optim_state_dict(again, restored)["state"], states["state"])
        found = again.state_dict()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
    dist.barrier()


@pytest.mark.spec("OSD-08", "OSD-LOAD-01", "OSD-LOAD-03")
@full_or_sharded
@flat_or_original
@ranks(2)
def test_groups_find_their_settings_by_the_names_in_them_or_by_their_place(form: Any, keep: bool) -> None:
    """The third group has no parameters, so only its place identifies it."""

    def build(seed: int, lr: float) -> tuple[FSDP, torch.optim.Optimizer]:
        model = wrapped(make(seed), use_orig_params=keep)
        FSDP.set_state_dict_type(model, form)
        first = list(model.module.first.parameters())
        rest = [parameter for parameter in model.parameters() if all(parameter is not other for other in first)]
        groups = [{"params": rest}, {"params": first, "lr": 3 * lr}, {"params": [], "lr": 5 * lr}]
        return model, torch.optim.AdamW(groups, lr=lr)

    model, optimizer = build(0, 0.01)
    step(model, optimizer, 0)
    states = FSDP.optim_state_dict(model, optimizer)
    of_rest, of_first, empty = states["param_groups"]
    names = [name for name, _ in make().named_parameters()]
    assert of_first["params"] == [name for name in names if name.startswith("first")]
    assert sorted(of_rest["params"] + of_first["params"]) == sorted(names)
    assert [group["lr"] for group in states["param_groups"]] == [0.01, 0.03, 0.05]
    states["param_groups"] = [of_first, of_rest, empty]
    again, restored = build(1, 0.5)
    resume(again, restored, model.state_dict(), states)
    assert [group["lr"] for group in restored.param_groups] == [0.01, 0.03, 0.05]
    assert step(again, restored, 1) == step(model, optimizer, 1)


@pytest.mark.spec("OSD-04", "OSD-08")
@flat_or_original
@ranks(2)
def test_frozen_ignored_and_unused_parameters_are_saved_and_loaded(keep: bool) -> None:
    def build(seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
        plain = make(seed)
        plain.first.requires_grad_(False)
        model = wrapped(plain, ignored_states=list(plain.head.parameters()), use_orig_params=keep)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    model, optimizer = build(0)
    assert FSDP.optim_state_dict(model, optimizer)["state"] == {}
    train_once(model, optimizer, skip=True)
    states = FSDP.optim_state_dict(model, optimizer)
    assert sorted(states["state"]) == ["head.bias", "head.weight", "scale"]
    assert sorted(states["param_groups"][0]["params"]) == sorted(dict(make().named_parameters()))
    assert torch.equal(
        states["state"]["head.weight"]["exp_avg"], optimizer.state[model.module.head.weight]["exp_avg"].cpu()
    )
    for config in (FullOptimStateDictConfig(), RANK0_ONLY):
        again, restored = build(1)
        for wrapper in (model, again):
            FSDP.set_state_dict_type(wrapper, FULL, None, config)
        resume(again, restored, model.state_dict(), FSDP.optim_state_dict(model, optimizer))
        assert_same_state(restored.state_dict()["state"], optimizer.state_dict()["state"])


class Odd(nn.Module):
    """Has a parameter without dimensions and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scalar * self.weight.sum() + self.nothing.sum()


@pytest.mark.spec("OSD-LOAD-01")
@flat_or_original
@ranks(2)
def test_a_parameter_without_dimensions_and_one_without_elements(keep: bool) -> None:
    model = FSDP(Odd().to(device()), use_orig_params=keep)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_once(model, optimizer)
    for form in (FULL, SHARDED):
        with FSDP.state_dict_type(model, form):
            states = FSDP.optim_state_dict(model, optimizer)
            assert states["state"]["scalar"]["exp_avg"].shape == ()
            if not keep:
                # As in a plain optimizer. An optimizer of original parameters has no state for it.
                assert states["state"].pop("nothing")["exp_avg"].shape == (0, 3)
            found = FSDP.optim_state_dict_to_load(model, optimizer, states)["state"]
            assert_same_state(found, optimizer.state_dict()["state"])


class Scalar(nn.Module):
    """Has only one element, without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.spec("OSD-LOAD-01")
@flat_or_original
@ranks(2)
def test_all_parameters_may_be_without_dimensions(keep: bool) -> None:
    model = FSDP(Scalar().to(device()), use_orig_params=keep)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_once(model, optimizer)
    found = FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer))["state"]
    assert_same_state(found, optimizer.state_dict()["state"])


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
