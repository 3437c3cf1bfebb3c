"""A training that is saved and resumed continues as if it had not been interrupted."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions

from spec_tests import subject
from spec_tests.checkpoint.checkpoints import (
    OPTIMIZERS,
    flat_or_original,
    make,
    quiet,
    set_form,
    train,
    trained,
    wrapped,
)
from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, loss_of
from spec_tests.models.sharding import FLAT_STRATEGIES, FULL_SHARD, NO_SHARD, SHARD_GRAD_OP
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy, ShardedGradScaler, fully_shard

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
WRAPPERS: dict[str, dict[str, Any]] = {
    "flat": {},
    "original": {"use_orig_params": True},
    "grad op": {"sharding_strategy": SHARD_GRAD_OP},
    "no shard": {"sharding_strategy": NO_SHARD, "use_orig_params": True},
}
# The options that save, and those that load.
FULL = StateDictOptions(full_state_dict=True)
FORMS = {
    "full": (FULL, FULL),
    "sharded": (StateDictOptions(), StateDictOptions()),
    "flattened": (StateDictOptions(flatten_optimizer_state_dict=True),) * 2,
    "from rank 0": (
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    ),
}
SCHEDULES: dict[str, Any] = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


def sharded(api: str, model: Any) -> Any:
    if api != "fully_shard":
        return wrapped(model, **WRAPPERS[api])
    for part in (model.first, model.second):
        fully_shard(part)
    return fully_shard(model)


class Run:
    """A model and everything that a resumed training needs."""

    def __init__(self, api: str, kind: str, schedule: str, seed: int) -> None:
        self.model = sharded(api, make(seed))
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.schedule = SCHEDULES[schedule](self.optimizer)
        self.scaler = ShardedGradScaler(device().type, init_scale=64.0, growth_interval=2)

    def steps(self, first: int, last: int) -> list[tuple[float, float, float]]:
        """Losses, learning rates and scales."""
        found = []
        for number in range(first, last):
            self.optimizer.zero_grad()
            loss = loss_of(self.model(batch(number, width=3)))
            # The scaler skips the step with an infinite loss.
            self.scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            # All ranks need the same rate, so a scheduler that reads the loss gets the same value on all.
            self.schedule.step(*([1.0] if hasattr(self.schedule, "patience") else []))
            found.append((float(loss.detach()), self.optimizer.param_groups[0]["lr"], self.scaler.get_scale()))
        return found


@pytest.mark.spec("PROG-63", "PROG-92", "PROG-96", "MIG-20", "OSD-LOAD-03", "OSD-10", "FS2-SD-10")
@pytest.mark.parametrize(
    ("kind", "schedule"), [("adam", "cosine"), ("adamw-amsgrad", "cycle"), ("momentum", "plateau")]
)
@pytest.mark.parametrize(
    ("saving", "loading", "form"),
    [
        *((api, api, form) for api in (*WRAPPERS, "fully_shard") for form in FORMS),
        ("flat", "original", "full"),
        ("original", "fully_shard", "full"),
        ("fully_shard", "original", "full"),
    ],
)
@ranks(2)
def test_a_run_resumes_with_all_its_states(saving: str, loading: str, form: str, kind: str, schedule: str) -> None:
    run, resumed = Run(saving, kind, schedule, seed=0), Run(loading, kind, schedule, seed=1)
    run.steps(0, 4)
    options, to_load = FORMS[form]
    with quiet():
        saved = copy.deepcopy(subject.get_state_dict(run.model, run.optimizer, options=options))
        if form == "from rank 0" and dist.get_rank() == 1:
            assert saved == ({}, {})
        subject.set_state_dict(
            resumed.model, resumed.optimizer, model_state_dict=saved[0], optim_state_dict=saved[1], options=to_load
        )
    resumed.schedule.load_state_dict(run.schedule.state_dict())
    resumed.scaler.load_state_dict(run.scaler.state_dict())
    assert resumed.steps(4, 8) == run.steps(4, 8)
    assert_same(full_values(resumed.model), full_values(run.model), bitwise=True)


def states_of(model: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}


@pytest.mark.spec("SD-SHARD-04", "OSD-LOAD-03")
@pytest.mark.parametrize("reads_states_apart", [False, True])
@flat_or_original
@ranks(2)
def test_fresh_optimizer_continues_bitwise(keep: bool, reads_states_apart: bool, tmp_path: Path) -> None:
    """A fresh optimizer has no states to load into: its states are read separately, or made by a step."""
    model, optimizer = trained(use_orig_params=keep)
    again, restored = trained(steps=0, seed=7, use_orig_params=keep)
    for each in (model, again):
        set_form(each, "sharded")
    if not reads_states_apart:
        for parameter in again.parameters():
            parameter.grad = torch.zeros_like(parameter)
        restored.step()
    loaded = states_of(again, restored)
    with quiet():
        dcp.save(states_of(model, optimizer), checkpoint_id=tmp_path)
        if reads_states_apart:
            reader = dcp.FileSystemReader(tmp_path)
            loaded = {"model": loaded["model"]}
            dcp.load(loaded, checkpoint_id=tmp_path)
            loaded |= load_sharded_optimizer_state_dict(loaded["model"], "optim", reader)
        else:
            dcp.load(loaded, checkpoint_id=tmp_path)
    again.load_state_dict(loaded["model"])
    FSDP.optim_state_dict_to_load(again, restored, loaded["optim"], load_directly=True)
    assert train(again, restored, [5, 6]) == train(model, optimizer, [5, 6])


# --- frozen parameters ---


def frozen(part: str | None, seed: int = 0) -> Any:
    """The model, with the parameters frozen whose names contain ``part``."""
    model = make(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part is None or part not in name)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    # The optimizer has all parameters, also the frozen ones, as in most scripts.
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.spec("OSD-08", "OSD-LOAD-03", "PROG-65")
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@pytest.mark.parametrize(
    ("keep", "part", "units"),
    [
        (True, "first.", True),
        (False, "first.", True),
        # Without units of their own, frozen parameters share the root's unit with others.
        (True, "first.", False),
        (True, "bias", True),
        (True, "weight", True),
    ],
)
@pytest.mark.parametrize("unfreezes", [True, False])
@ranks(2)
def test_a_run_is_resumed_with_the_same_or_no_frozen_parameters(
    unfreezes: bool, keep: bool, part: str, units: bool, strategy: Any, form: str
) -> None:
    plain, plain_later = frozen(part), frozen(None if unfreezes else part)
    options: dict[str, Any] = {"use_orig_params": keep, "sharding_strategy": strategy}
    options["auto_wrap_policy"] = ModuleWrapPolicy({nn.Sequential}) if units else None
    # A unit with frozen and trained parameters causes a warning about memory.
    with quiet():
        model, later = wrapped(frozen(part), **options), wrapped(frozen(None if unfreezes else part, 1), **options)
    optimizers, fresh = [adam(each) for each in (plain, model)], [adam(each) for each in (plain_later, later)]
    train(plain, optimizers[0], range(2), ranks=range(2))
    train(model, optimizers[1], range(2))
    plain_later.load_state_dict(plain.state_dict())
    fresh[0].load_state_dict(optimizers[0].state_dict())
    for each in (model, later):
        set_form(each, form)
    later.load_state_dict(model.state_dict())
    states = FSDP.optim_state_dict(model, optimizers[1])
    FSDP.optim_state_dict_to_load(later, fresh[1], states, load_directly=True)
    train(plain_later, fresh[0], range(2, 5), ranks=range(2))
    train(later, fresh[1], range(2, 5))
    set_form(later, "full")
    assert_same(full_values(later), dict(plain_later.named_parameters()))


@pytest.mark.filterwarnings("ignore:.*frozen")
@pytest.mark.spec("OSD-08", "PROG-65")
@ranks(2)
def test_a_frozen_flat_unit_needs_no_states_of_parameters_that_were_frozen_before() -> None:
    model, again = wrapped(frozen("second.0.bias"), use_orig_params=True), wrapped(frozen("second.", seed=1))
    optimizer, restored = adam(model), adam(again)
    train(model, optimizer, [0])
    saved = FSDP.optim_state_dict(model, optimizer)
    restored.load_state_dict(FSDP.optim_state_dict_to_load(again, restored, saved))
    train(again, restored, [1])
    found, expected = FSDP.optim_state_dict(again, restored)["state"], saved["state"]
    of_others = {name for name in expected if "second." not in name}
    assert of_others < expected.keys()
    assert {name for name in found if found[name]["step"] == 2} == of_others


# --- modules that rename their keys, and matrices in column-major order ---


class Renaming(nn.Module):
    """Its keys are ``weight`` and ``bias``, without ``hidden``."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 3)
        self._register_state_dict_hook(self._shorten)
        self._register_load_state_dict_pre_hook(self._lengthen)

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "hidden", "bias": "hidden"}

    @staticmethod
    def _shorten(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            state[prefix + name] = state.pop(f"{prefix}hidden.{name}")

    @staticmethod
    def _lengthen(state: Any, prefix: str, *_: Any) -> None:
        for name in ("weight", "bias"):
            if prefix + name in state:
                state[f"{prefix}hidden.{name}"] = state.pop(prefix + name)

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x)


def renaming() -> nn.Module:
    return nn.Sequential(Renaming(), nn.Linear(3, 2))


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("is_unit", [True, False])
@flat_or_original
@pytest.mark.spec("PROG-95")
@ranks(2)
def test_a_module_may_rename_its_keys(keep: bool, is_unit: bool, form: str) -> None:
    options: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({Renaming}) if is_unit else None}
    model, other = (wrapped(seeded(renaming, seed), use_orig_params=keep, **options) for seed in (0, 1))
    optimizer, fresh = adam(model), adam(other)
    train(model, optimizer, [0])
    with quiet():
        weights, states = subject.get_state_dict(model, optimizer, options=FORMS[form][0])
        assert sorted(weights) == sorted(renaming().state_dict())
        subject.set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=states, options=FORMS[form][1])
    assert train(other, fresh, [1, 2]) == train(model, optimizer, [1, 2])
    assert_same(full_values(other), full_values(model), bitwise=True)


def columns() -> nn.Module:
    """A model with matrices in column-major order."""
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))
    for parameter in model.parameters():
        parameter.data = parameter.data.t().contiguous().t()
    return model


@pytest.mark.spec("OSD-04", "OSD-06", "OSD-LOAD-03")
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@pytest.mark.parametrize("form", ["full", "sharded"])
@flat_or_original
@ranks(2)
def test_optimizer_states_of_column_major_weights_are_saved_and_loaded(keep: bool, form: str, strategy: Any) -> None:
    plain = seeded(columns, 0)
    ours, later = (
        wrapped(seeded(columns, seed), sharding_strategy=strategy, use_orig_params=keep) for seed in range(2)
    )
    # A fused optimizer uses the elements in the order of their memory.
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01, fused=True) for model in (plain, ours, later)]
    train(plain, optimizers[0], [0, 1], ranks=[0, 1])
    train(ours, optimizers[1], [0, 1])
    for each in (ours, later):
        set_form(each, form)
    states = FSDP.optim_state_dict(ours, optimizers[1])
    if strategy is NO_SHARD or form == "full":
        for name, parameter in plain.named_parameters():
            for key, value in optimizers[0].state[parameter].items():
                torch.testing.assert_close(states["state"][name][key], value, check_device=False)
                # As in a checkpoint of a model with row-major matrices.
                states["state"][name][key] = states["state"][name][key].contiguous()
    later.load_state_dict(ours.state_dict())
    FSDP.optim_state_dict_to_load(later, optimizers[2], states, load_directly=True)
    train(plain, optimizers[0], [2], ranks=[0, 1])
    train(later, optimizers[2], [2])
    assert_same(full_values(later), dict(plain.named_parameters()), bitwise=False)
