"""Loading optimizer states: training continues unchanged; all ranks refuse a state that does not fit."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from spec_tests.checkpoint.checkpoints import (
    FULL,
    SHARDED,
    assert_same_state,
    flat_or_original,
    make,
    quiet,
    step,
    wrapped,
)
from spec_tests.checkpoint.refusals import caught_warnings
from spec_tests.harness import device, ranks
from spec_tests.models.running import batch
from spec_tests.models.sharding import grid
from spec_tests.oracles import count_collectives
from spec_tests.subject import FullOptimStateDictConfig, FullStateDictConfig, ModuleWrapPolicy, ShardingStrategy
from spec_tests.subject import FullyShardedDataParallel as FSDP

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw-amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}
forms = pytest.mark.parametrize("form", [FULL, SHARDED], ids=["full", "sharded"])


def fresh(kind: str = "adam", seed: int = 0, **options: Any) -> tuple[FSDP, torch.optim.Optimizer]:
    model = wrapped(make(seed), **options)
    return model, OPTIMIZERS[kind](model.parameters())


def trained(kind: str = "adam", steps: int = 2, **options: Any) -> tuple[FSDP, torch.optim.Optimizer]:
    model, optimizer = fresh(kind, **options)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def resume(model: FSDP, optimizer: torch.optim.Optimizer, weights: dict[str, Any], states: dict[str, Any]) -> None:
    model.load_state_dict(weights)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))


@pytest.mark.spec("OSD-LOAD-01")
def test_the_signature_is_that_of_torch() -> None:
    theirs = torch_fsdp.FullyShardedDataParallel.optim_state_dict_to_load
    ours = inspect.signature(FSDP.optim_state_dict_to_load).parameters
    assert [(p.name, p.default) for p in ours.values()] == [
        (p.name, p.default) for p in inspect.signature(theirs).parameters.values()
    ]


@pytest.mark.spec("OSD-LOAD-03", "OSD-10")
@pytest.mark.parametrize("kind", OPTIMIZERS)
@forms
@flat_or_original
@ranks(2)
def test_restored_state_continues_training_bitwise(kind: str, form: Any, keep: bool) -> None:
    model, optimizer = trained(kind, use_orig_params=keep)
    again, restored = fresh(kind, seed=7, use_orig_params=keep)
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


@pytest.mark.spec("OSD-LOAD-01", "OSD-LOAD-03")
@flat_or_original
@ranks(2)
def test_optim_state_dict_to_load_returns_the_dict_of_the_optimizer(keep: bool) -> None:
    model, optimizer = trained(use_orig_params=keep)
    own = optimizer.state_dict()
    found = FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer))
    assert found["param_groups"] == own["param_groups"]
    assert_same_state(found["state"], own["state"])


@pytest.mark.spec("OSD-LOAD-01")
@flat_or_original
@ranks(2)
def test_optim_state_dict_to_load_equals_that_of_torch(keep: bool) -> None:
    """Compares states only with flat parameters, because torch pads between original parameters."""
    model, optimizer = trained(use_orig_params=keep)
    states = FSDP.optim_state_dict(model, optimizer)
    with quiet():
        wrapper = torch_fsdp.FullyShardedDataParallel
        other = wrapper(
            make(),
            auto_wrap_policy=torch_fsdp.wrap.ModuleWrapPolicy({nn.Sequential}),
            device_id=device(),
            use_orig_params=keep,
        )
        expected = wrapper.optim_state_dict_to_load(
            other, OPTIMIZERS["adam"](other.parameters()), copy.deepcopy(states)
        )
    found = FSDP.optim_state_dict_to_load(model, optimizer, states)
    assert found["param_groups"] == expected["param_groups"]
    if not keep:
        assert_same_state(found["state"], expected["state"])


@pytest.mark.spec("OSD-LOAD-02")
@ranks(2)
def test_argument_order_of_the_examples_is_accepted_with_a_warning() -> None:
    model, optimizer = trained()
    states = FSDP.optim_state_dict(model, optimizer)
    expected = FSDP.optim_state_dict_to_load(model, optimizer, states)
    with caught_warnings() as caught:
        found = FSDP.optim_state_dict_to_load(states, model, optimizer)
    assert [w.category for w in caught] == [FutureWarning]
    assert "optim_state_dict_to_load(model, optim, optim_state_dict)" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert_same_state(found["state"], expected["state"])


@pytest.mark.spec("OSD-LOAD-04")
@flat_or_original
@ranks(2)
def test_load_directly_loads_and_returns(keep: bool) -> None:
    model, optimizer = trained(use_orig_params=keep)
    states = FSDP.optim_state_dict(model, optimizer)
    own = copy.deepcopy(optimizer.state_dict())
    step(model, optimizer, 5)
    found = FSDP.optim_state_dict_to_load(model, optimizer, states, load_directly=True)
    assert_same_state(optimizer.state_dict()["state"], own["state"])
    assert_same_state(found["state"], own["state"])


@pytest.mark.spec("OSD-LOAD-05")
@pytest.mark.parametrize("nothing", [{}, None])
@flat_or_original
@ranks(2)
def test_with_rank0_only_the_first_ranks_dict_is_enough(keep: bool, nothing: Any) -> None:
    model, optimizer = trained(use_orig_params=keep)
    states = FSDP.optim_state_dict(model, optimizer)
    states["state"]["of my own"] = torch.tensor(3.0)
    expected = FSDP.optim_state_dict_to_load(model, optimizer, states)
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True))
    with count_collectives() as counts:
        found = FSDP.optim_state_dict_to_load(model, optimizer, states if dist.get_rank() == 0 else nothing)
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].pop("of my own") == expected["state"].pop("of my own") == 3.0
    assert_same_state(found["state"], expected["state"])
    # Two moments of three units are scattered. A broadcast would send each rank the data of other ranks too.
    assert counts.calls["scatter_"] == 6
    sent = sum(num_bytes for kind, num_bytes in counts.order if kind == "scatter_")
    local_shards = [parameter.numel() for parameter in wrapped(make()).parameters()]
    assert sent <= 2 * 4 * 2 * sum(local_shards), "no more than each rank's own pieces"


@pytest.mark.spec("OSD-LOAD-05")
@flat_or_original
@ranks(4)
def test_with_rank0_only_a_unit_of_other_ranks_is_refused(keep: bool) -> None:
    """Rank 0 is not in the group of the inner unit on ranks 2 and 3, so they cannot get its states from rank 0."""
    shared: dict[str, Any] = {"use_orig_params": keep, "device_id": device()}
    inner = FSDP(nn.Linear(4, 2), process_group=grid()[0], **shared)
    model = FSDP(nn.Sequential(nn.Linear(3, 4), inner), **shared)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3, device=device())).sum().backward()
    optimizer.step()
    states = FSDP.optim_state_dict(model, optimizer)
    FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True))
    with pytest.raises(ValueError, match=r"unit '1': .* because the units have different process groups"):
        FSDP.optim_state_dict_to_load(model, optimizer, states)


@pytest.mark.spec("OSD-LOAD-05", "HYB-10")
@flat_or_original
@ranks(4)
def test_state_dicts_of_all_types_restore_all_replicas_of_a_hybrid(keep: bool) -> None:
    groups = grid()
    dist.barrier()
    hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "process_group": groups}
    model, optimizer = trained(use_orig_params=keep, **hybrid)
    own = optimizer.state_dict()
    for form, config in [(FULL, None), (SHARDED, None), (FULL, FullOptimStateDictConfig(rank0_only=True))]:
        with FSDP.state_dict_type(model, form, None, config):
            states = FSDP.optim_state_dict(model, optimizer)
            again, restored = fresh(use_orig_params=keep, **hybrid)
            FSDP.set_state_dict_type(again, form, None, config)
            found = FSDP.optim_state_dict_to_load(again, restored, states)
        assert_same_state(found["state"], own["state"])


@pytest.mark.spec("OSD-LOAD-05")
@flat_or_original
@ranks(2)
def test_units_that_are_not_sharded_are_restored_from_the_first_rank(keep: bool) -> None:
    model, optimizer = trained("adafactor", use_orig_params=keep, sharding_strategy=ShardingStrategy.NO_SHARD)
    own = optimizer.state_dict()
    FSDP.set_state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True))
    states = FSDP.optim_state_dict(model, optimizer)
    assert_same_state(FSDP.optim_state_dict_to_load(model, optimizer, states)["state"], own["state"])
    FSDP.set_state_dict_type(model, SHARDED)
    states = FSDP.optim_state_dict(model, optimizer)
    assert_same_state(FSDP.optim_state_dict_to_load(model, optimizer, states)["state"], own["state"])


class NamedAdam:
    """An optimizer whose state dict uses the names of the wrapped model's parameters as keys."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.inner = torch.optim.Adam(self.names, lr=0.01)
        self.state, self.param_groups = self.inner.state, self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        own, names = self.inner.state_dict(), list(self.names.values())
        groups = [{**group, "params": [names[key] for key in group["params"]]} for group in own["param_groups"]]
        return {"state": {names[key]: value for key, value in own["state"].items()}, "param_groups": groups}

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        self.inner.step()


@pytest.mark.spec("OSD-LOAD-06")
@flat_or_original
@ranks(2)
def test_an_optimizer_that_is_keyed_by_names_gets_names(keep: bool) -> None:
    model = wrapped(make(), use_orig_params=keep)
    optimizer: Any = NamedAdam(model)
    step(model, optimizer, 0)
    states = FSDP.optim_state_dict(model, optimizer)
    assert sorted(states["state"]) == sorted(dict(make().named_parameters()))
    found = FSDP.optim_state_dict_to_load(model, optimizer, states, is_named_optimizer=True)
    own = optimizer.state_dict()
    assert found["param_groups"] == own["param_groups"]
    # Includes parameters without elements on this rank, because such optimizers require every name.
    assert found["state"].keys() == (dict(model.named_parameters()) if keep else own["state"]).keys()
    assert_same_state({name: found["state"][name] for name in own["state"]}, own["state"])


class OneIdle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 3), FSDP(nn.Linear(3, 3), device_id=device())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.spec("OSD-LOAD-01")
@ranks(2)
def test_full_states_of_no_shard_units_are_allowed_in_a_sharded_dict() -> None:
    model = FSDP(OneIdle(), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=device())
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3, device=device())).sum().backward()
    optimizer.step()
    own = copy.deepcopy(optimizer.state_dict()["state"])
    with FSDP.state_dict_type(model, SHARDED):
        states = FSDP.optim_state_dict(model, optimizer)
        FSDP.optim_state_dict_to_load(model, optimizer, states, load_directly=True)
    assert_same_state(optimizer.state_dict()["state"], own)


@pytest.mark.spec("OSD-LOAD-06")
@ranks(2)
def test_names_are_found_while_modules_show_full_views() -> None:
    model = wrapped(make(), use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    optimizer: Any = NamedAdam(model)
    step(model, optimizer, 0)
    own, states = optimizer.state_dict(), FSDP.optim_state_dict(model, optimizer)
    # The parameters stay unsharded, because no backward follows.
    model(batch(width=3))
    found = FSDP.optim_state_dict_to_load(model, optimizer, states, is_named_optimizer=True)
    assert_same_state({name: found["state"][name] for name in own["state"]}, own["state"])


@pytest.mark.spec("OSD-LOAD-06")
@ranks(2)
def test_named_optimizer_of_torch_saves_and_loads_states() -> None:
    with quiet():
        from torch.distributed.optim import _NamedOptimizer

        model = wrapped(make(), use_orig_params=True)
        named = _NamedOptimizer(
            model.named_parameters(), torch.optim.Adam, [{"params": model.parameters()}], model, lr=0.01
        )

    def train() -> None:
        # zero_grad() of that class uses attributes that only other optimizers have.
        model.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model(torch.ones(2, 3, device=device())).sum().backward()
        named.step()

    train()
    states = copy.deepcopy(FSDP.optim_state_dict(model, named))
    train()
    named.load_state_dict(FSDP.optim_state_dict_to_load(model, named, states, is_named_optimizer=True))
    assert_same_state(FSDP.optim_state_dict(model, named)["state"], states["state"])


@pytest.mark.spec("OSD-LOAD-07")
@ranks(2)
def test_a_model_without_units_is_refused() -> None:
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"rank \d.*contains no FullyShardedDataParallel"):
        FSDP.optim_state_dict_to_load(model, optimizer, {"state": {}, "param_groups": []})


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


@pytest.mark.spec("OSD-LOAD-08", "SD-FULL-11")
@flat_or_original
@ranks(4)
def test_optimizer_state_loads_with_other_number_of_ranks_and_other_wrapping(keep: bool) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model, optimizer = trained(use_orig_params=keep)
    weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    mine = groups[dist.get_rank() // 2]
    for options in (
        {"use_orig_params": keep, "process_group": mine},
        {"use_orig_params": not keep, "process_group": mine},
        {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "process_group": mine},
        {"auto_wrap_policy": None},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
    ):
        again, restored = fresh(seed=3, **options)
        resume(again, restored, weights, states)
        assert_same_state(FSDP.optim_state_dict(again, restored)["state"], states["state"])
        found = again.state_dict()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
    dist.barrier()


@pytest.mark.spec("OSD-08", "OSD-LOAD-03")
@forms
@flat_or_original
@ranks(2)
def test_groups_find_their_settings_by_the_names_in_them(form: Any, keep: bool) -> None:
    def build(seed: int, lr: float) -> tuple[FSDP, torch.optim.Optimizer]:
        model = wrapped(make(seed), use_orig_params=keep)
        first = list(model.module.first.parameters())
        rest = [parameter for parameter in model.parameters() if all(parameter is not other for other in first)]
        return model, torch.optim.AdamW([{"params": rest}, {"params": first, "lr": 3 * lr}], lr=lr)

    model, optimizer = build(0, 0.01)
    step(model, optimizer, 0)
    again, restored = build(1, 0.5)
    FSDP.set_state_dict_type(model, form), FSDP.set_state_dict_type(again, form)
    states = FSDP.optim_state_dict(model, optimizer)
    states["param_groups"].reverse()
    resume(again, restored, model.state_dict(), states)
    assert [group["lr"] for group in restored.param_groups] == [0.01, 0.03]
    assert step(again, restored, 1) == step(model, optimizer, 1)


@pytest.mark.spec("OSD-LOAD-01", "OSD-LOAD-03")
@flat_or_original
@ranks(2)
def test_a_group_without_parameters_finds_its_settings_by_its_place(keep: bool) -> None:
    (model, optimizer), (other, restored) = fresh(use_orig_params=keep), fresh(use_orig_params=keep)
    optimizer.add_param_group({"params": [], "lr": 0.3})
    restored.add_param_group({"params": [], "lr": 0.5})
    states = FSDP.optim_state_dict(model, optimizer)
    restored.load_state_dict(FSDP.optim_state_dict_to_load(other, restored, states))
    assert [group["lr"] for group in restored.param_groups] == [0.01, 0.3]


@pytest.mark.spec("OSD-08")
@flat_or_original
@ranks(2)
def test_optim_state_dict_to_load_supports_frozen_ignored_and_unused_parameters(keep: bool) -> None:
    def build(seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
        plain = make(seed)
        plain.first.requires_grad_(False)
        ignored = list(plain.head.parameters())
        policy = ModuleWrapPolicy({nn.Sequential})
        model = FSDP(plain, auto_wrap_policy=policy, ignored_states=ignored, use_orig_params=keep)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    model, optimizer = build(0)
    model(torch.ones(2, 3, device=device()), skip=True).sum().backward()
    optimizer.step()
    for rank0_only in (False, True):
        again, restored = build(1)
        for wrapper in (model, again):
            FSDP.set_state_dict_type(wrapper, FULL, None, FullOptimStateDictConfig(rank0_only=rank0_only))
        resume(again, restored, model.state_dict(), FSDP.optim_state_dict(model, optimizer))
        assert_same_state(restored.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.spec("OSD-LOAD-01")
@ranks(2)
def test_a_parameter_without_dimensions_and_one_without_elements() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.nothing = nn.Parameter(torch.empty(0, 3))
            self.weight = nn.Parameter(torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scalar * self.weight.sum() + self.nothing.sum()

    for keep in (False, True):
        model = FSDP(Odd().to(device()), use_orig_params=keep)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model(torch.ones(1, device=device())).sum().backward()
        optimizer.step()
        own = optimizer.state_dict()["state"]
        for form in (FULL, SHARDED):
            with FSDP.state_dict_type(model, form):
                states = FSDP.optim_state_dict(model, optimizer)
                assert states["state"]["scalar"]["exp_avg"].shape == ()
                assert_same_state(FSDP.optim_state_dict_to_load(model, optimizer, states)["state"], own)


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


# --- states that do not fit ---


def refused_everywhere(model: FSDP, optimizer: torch.optim.Optimizer, states: dict[str, Any], *parts: str) -> None:
    """Checks that all ranks raise, all messages name the failing rank, and nothing has changed."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    own = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError) as caught:
        FSDP.optim_state_dict_to_load(model, optimizer, states, load_directly=True)
    for part in (f"rank {dist.get_rank()}: the state dict is refused on every rank", *parts):
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"
    assert_same_state(optimizer.state_dict()["state"], own["state"])
    assert optimizer.state_dict()["param_groups"] == own["param_groups"]
    after = model.state_dict()
    assert all(torch.equal(after[name], weights[name]) for name in weights)


@pytest.mark.spec("OSD-LOAD-01", "OSD-LOAD-03")
@flat_or_original
@ranks(2)
def test_invalid_state_on_one_rank_is_refused_on_all(keep: bool) -> None:
    model, optimizer = trained(use_orig_params=keep)
    rank = dist.get_rank()

    def broken(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        states = FSDP.optim_state_dict(model, optimizer)
        if rank == 1:
            change(states)
        return states

    def check(change: Callable[[dict[str, Any]], Any], *parts: str) -> None:
        refused_everywhere(model, optimizer, broken(change), "rank 1: ", *parts)

    check(lambda s: s["state"].pop("head.bias"), "key 'head.bias': expected states", "found none")
    check(
        lambda s: s["param_groups"][0]["params"].remove("scale"),
        "key 'scale': expected in a parameter group",
        "found in none",
    )
    check(lambda s: s["state"].update(nobody=s["state"]["scale"]), "key 'nobody': expected no such parameter")
    check(
        lambda s: s["state"]["head.weight"].update(exp_avg=torch.ones(5, 2)),
        "'exp_avg' of 'head.weight': expected shape (2, 5), found (5, 2)",
    )
    check(lambda s: s["state"].update(scale=torch.ones(1)), "key 'scale': expected a dict of states, found a Tensor")
    check(lambda s: s.clear(), "expected the key 'state', found []")
    if not keep:
        check(
            lambda s: s["state"]["head.bias"]["step"].add_(1),
            "'step'",
            "expected 2.0 (torch.float32)",
            "found 3.0 (torch.float32)",
        )
        check(lambda s: s["state"]["head.bias"].pop("exp_avg"), "'exp_avg' of 'head.bias': expected", "found none")
    assert FSDP.optim_state_dict_to_load(model, optimizer, broken(lambda s: None)), "nobody waits for anybody"


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


@pytest.mark.spec("OSD-LOAD-01", "OSD-06")
@flat_or_original
@ranks(2)
def test_states_missing_on_one_rank_are_refused_on_all(keep: bool) -> None:
    """The remaining states of that rank are valid on their own, as in a run that never created the missing states."""
    model, optimizer = trained(use_orig_params=keep)
    FSDP.set_state_dict_type(model, SHARDED)

    def without(*names: str, state: str) -> dict[str, Any]:
        states = FSDP.optim_state_dict(model, optimizer)
        for name in names if dist.get_rank() == 1 else ():
            del states["state"][name][state]
        return states

    def check(states: dict[str, Any], *parts: str) -> None:
        own = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(RuntimeError) as caught:
            FSDP.optim_state_dict_to_load(model, optimizer, states, load_directly=True)
        for part in ("the state dict is refused on every rank", *parts):
            assert part in str(caught.value), f"{part!r} is not in: {caught.value}"
        assert_same_state(optimizer.state_dict()["state"], own["state"])
        dist.barrier()

    unit = ["second.0.weight", "second.0.bias"]
    expected = "expected a shard of torch.float32, as on other ranks, found none"
    check(without(*unit, state="exp_avg"), f"rank 1: optimizer state 'exp_avg' of 'second.0.weight': {expected}")
    if keep:
        check(
            without("head.weight", state="exp_avg_sq"),
            f"rank 1: optimizer state 'exp_avg_sq' of 'head.weight': {expected}",
        )
    states = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 1:
        states["state"].update({name: {} for name in unit})
    check(states, f"rank 1: optimizer state 'exp_avg' of 'second.0.bias': {expected}")
    assert FSDP.optim_state_dict_to_load(model, optimizer, without(state="exp_avg")), "nobody waits for anybody"


@pytest.mark.spec("OSD-LOAD-01", "OSD-LOAD-08")
@ranks(4)
def test_a_sharded_dict_of_another_number_of_ranks_is_refused() -> None:
    pair = dist.new_group([0, 1])
    model, optimizer = trained()
    with FSDP.state_dict_type(model, SHARDED):
        states = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() < 2:
        other, restored = fresh(process_group=pair)
        FSDP.set_state_dict_type(other, SHARDED)
        with pytest.raises(
            RuntimeError, match=r"rank 0: .*expected a shard of shape \(3, 3\) on this rank, found \(2, 3\)"
        ):
            FSDP.optim_state_dict_to_load(other, restored, states)
    dist.barrier()


@pytest.mark.spec("OSD-LOAD-01")
@ranks(2)
def test_parameters_of_one_flat_parameter_in_two_groups_are_refused() -> None:
    plain = make()
    weights = [p for p in plain.parameters() if p.ndim > 1]
    biases = [p for p in plain.parameters() if p.ndim <= 1]
    optimizer = torch.optim.Adam([{"params": weights}, {"params": biases, "lr": 0.5}], lr=0.01)
    step(plain, optimizer, 0, everybody=True)
    with quiet():
        states = FSDP.optim_state_dict(plain, optimizer)
    model, flat = fresh()
    refused_everywhere(
        model, flat, states, "expected all of its parameters in one group of the dict", "in groups [0, 1]"
    )
    with_originals = wrapped(make(), use_orig_params=True)
    grouped = torch.optim.Adam(
        [
            {"params": [p for n, p in with_originals.named_parameters() if n.endswith("weight")]},
            {"params": [p for n, p in with_originals.named_parameters() if not n.endswith("weight")]},
        ],
        lr=0.01,
    )
    FSDP.optim_state_dict_to_load(with_originals, grouped, states, load_directly=True)
    assert [group["lr"] for group in grouped.param_groups] == [0.01, 0.5]


@pytest.mark.spec("OSD-LOAD-01")
@flat_or_original
@ranks(2)
def test_empty_entry_means_param_never_had_state(keep: bool) -> None:
    model, optimizer = trained(use_orig_params=keep)
    states = FSDP.optim_state_dict(model, optimizer)
    states["state"]["head.bias"] = {}
    again, restored = fresh(use_orig_params=keep)
    FSDP.optim_state_dict_to_load(again, restored, states, load_directly=True)
    found = FSDP.optim_state_dict(again, restored)["state"]
    if keep:
        assert "head.bias" not in found
    else:
        assert torch.equal(found["head.bias"]["exp_avg"], torch.zeros(2))
    assert torch.equal(found["head.weight"]["exp_avg"], states["state"]["head.weight"]["exp_avg"])
