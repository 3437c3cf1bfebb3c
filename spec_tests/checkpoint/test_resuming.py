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
from spec_tests.checkpoint import checkpoints
from spec_tests.harness import device, ranks

FSDP = subject.FullyShardedDataParallel
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *_ = subject.ShardingStrategy
pytestmark = pytest.mark.filterwarnings("ignore")
# By name of the API: its options in the wrapper.
APIS: dict[str, dict[str, Any]] = {
    "flat": {},
    "original": {},
    "flat grad op": {"sharding_strategy": SHARD_GRAD_OP},
    "original no shard": {"sharding_strategy": NO_SHARD},
    "fully_shard": {},
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


@pytest.mark.spec("PROG-63", "PROG-92", "PROG-96", "MIG-20", "OSD-LOAD-03", "OSD-10", "FS2-SD-10")
@pytest.mark.parametrize(
    ("kind", "schedule"), [("adam", "cosine"), ("adamw-amsgrad", "cycle"), ("momentum", "plateau")]
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("saving", "loading"),
    [*((api, api) for api in APIS), ("flat", "original"), ("original", "fully_shard"), ("fully_shard", "original")],
)
@ranks(2)
def test_a_run_resumes_with_all_its_states(saving: str, loading: str, form: str, kind: str, schedule: str) -> None:
    """A training needs its model, optimizer, scheduler and gradient scaler."""
    # Dicts that are not full ones have the sharded tensors of the API.
    form = form if saving == loading else "full"
    runs = []
    for seed, api in enumerate((saving, loading)):
        model = checkpoints.sharded(api.split()[0], seed, **APIS[api])
        optimizer = checkpoints.OPTIMIZERS[kind](model.parameters())
        scaler = subject.ShardedGradScaler(device().type, init_scale=64.0, growth_interval=2)
        runs.append((model, optimizer, scaler, SCHEDULES[schedule](optimizer)))

    def steps(run: Any, first: int, last: int) -> list[Any]:
        """Losses, learning rates and scales."""
        model, optimizer, scaler, scheduler = run
        found = []
        for number in range(first, last):
            optimizer.zero_grad()
            loss = model(torch.linspace(-1, number, 9, device=device()).view(3, 3)).square().mean()
            # The scaler skips the step with an infinite loss.
            scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step(*([1.0] if schedule == "plateau" else []))
            found.append((loss.item(), optimizer.param_groups[0]["lr"], scaler.get_scale()))
        return found

    run, resumed = runs
    steps(run, 0, 4)
    save, load = FORMS[form]
    weights, states = copy.deepcopy(subject.get_state_dict(run[0], run[1], options=save))
    if form == "from rank 0" and dist.get_rank() == 1:
        assert (weights, states) == ({}, {})
    subject.set_state_dict(resumed[0], resumed[1], model_state_dict=weights, optim_state_dict=states, options=load)
    for index in (2, 3):
        resumed[index].load_state_dict(run[index].state_dict())
    # Losses of four steps show all weights and states.
    assert steps(resumed, 4, 8) == steps(run, 4, 8)


@pytest.mark.spec("SD-SHARD-04", "OSD-LOAD-03")
@checkpoints.flat_or_original
@ranks(2)
def test_fresh_optimizer_continues_bitwise(keep: bool, tmp_path: Path) -> None:
    """A fresh optimizer has no states to load into, so its states are read separately."""
    model, optimizer = checkpoints.trained(use_orig_params=keep)
    again, restored = checkpoints.trained(steps=0, seed=7, use_orig_params=keep)
    for each in (model, again):
        checkpoints.set_form(each, "sharded")
    saved = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path)
    loaded = {"model": again.state_dict()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    reader = dcp.FileSystemReader(tmp_path)
    states = load_sharded_optimizer_state_dict(loaded["model"], "optim", reader)["optim"]
    again.load_state_dict(loaded["model"])
    FSDP.optim_state_dict_to_load(again, restored, states, load_directly=True)
    assert checkpoints.train(again, restored, [5, 6]) == checkpoints.train(model, optimizer, [5, 6])


# --- frozen parameters ---


def frozen(part: str | None, seed: int = 0) -> Any:
    """The model, with the parameters frozen whose names contain ``part``."""
    model = checkpoints.make(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part is None or part not in name)
    return model


@pytest.mark.spec("OSD-08", "OSD-LOAD-03", "PROG-65")
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@pytest.mark.parametrize(
    ("keep", "part", "has_units"),
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
    unfreezes: bool, keep: bool, part: str, has_units: bool, strategy: Any, form: str
) -> None:
    options: dict[str, Any] = {"use_orig_params": keep, "sharding_strategy": strategy}
    if not has_units:
        options["auto_wrap_policy"] = None
    part_later = None if unfreezes else part
    plain, model = frozen(part), checkpoints.wrapped(frozen(part), **options)
    later = checkpoints.wrapped(frozen(part_later, seed=1), **options)
    # The optimizers have all parameters, also the frozen ones, as in most scripts.
    oracle, optimizer, fresh = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, model, later))
    checkpoints.train(plain, oracle, range(2), ranks=range(2))
    checkpoints.train(model, optimizer, range(2))
    for each in (model, later):
        checkpoints.set_form(each, form)
    later.load_state_dict(model.state_dict())
    FSDP.optim_state_dict_to_load(later, fresh, FSDP.optim_state_dict(model, optimizer), load_directly=True)
    if unfreezes:
        plain.requires_grad_()
    checkpoints.train(plain, oracle, range(2, 5), ranks=range(2))
    checkpoints.train(later, fresh, range(2, 5))
    checkpoints.set_form(later, "full")
    checkpoints.assert_same_state(later.state_dict(), plain.state_dict())


@pytest.mark.spec("OSD-08", "PROG-65")
@ranks(2)
def test_a_frozen_flat_unit_needs_no_states_of_parameters_that_were_frozen_before() -> None:
    model, again = (
        checkpoints.wrapped(frozen("second.0.bias"), use_orig_params=True),
        checkpoints.wrapped(frozen("second.", seed=1)),
    )
    optimizer, restored = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, again))
    checkpoints.train(model, optimizer, [0])
    saved = FSDP.optim_state_dict(model, optimizer)
    restored.load_state_dict(FSDP.optim_state_dict_to_load(again, restored, saved))
    checkpoints.train(again, restored, [1])
    found = FSDP.optim_state_dict(again, restored)["state"]
    assert "second.0.weight" in saved["state"]
    stepped = {name for name in found if found[name]["step"] == 2}
    assert stepped == {name for name in saved["state"] if "second." not in name}


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


@pytest.mark.spec("PROG-95")
@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("is_unit", [True, False])
@checkpoints.flat_or_original
@ranks(2)
def test_a_module_may_rename_its_keys(keep: bool, is_unit: bool, form: str) -> None:
    policy = subject.ModuleWrapPolicy({Renaming}) if is_unit else None
    plain = nn.Sequential(Renaming(), nn.Linear(3, 2))
    model, other = (
        checkpoints.wrapped(copy.deepcopy(plain), use_orig_params=keep, auto_wrap_policy=policy) for _ in range(2)
    )
    optimizer, fresh = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, other))
    checkpoints.train(model, optimizer, [0])
    save, load = FORMS[form]
    weights, states = subject.get_state_dict(model, optimizer, options=save)
    assert sorted(weights) == sorted(plain.state_dict())
    subject.set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=states, options=load)
    assert checkpoints.train(other, fresh, [1, 2]) == checkpoints.train(model, optimizer, [1, 2])


@pytest.mark.spec("OSD-04", "OSD-06", "OSD-LOAD-03")
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@pytest.mark.parametrize("form", ["full", "sharded"])
@checkpoints.flat_or_original
@ranks(2)
def test_optimizer_states_of_column_major_weights_are_saved_and_loaded(keep: bool, form: str, strategy: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).to(device())
    for parameter in plain.parameters():
        parameter.data = parameter.data.t().contiguous().t()
    ours, later = (
        checkpoints.wrapped(copy.deepcopy(plain), sharding_strategy=strategy, use_orig_params=keep) for _ in range(2)
    )
    # A fused optimizer uses the elements in the order of their memory.
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01, fused=True) for model in (plain, ours, later)]
    checkpoints.train(plain, optimizers[0], [0, 1], ranks=[0, 1])
    checkpoints.train(ours, optimizers[1], [0, 1])
    for each in (ours, later):
        checkpoints.set_form(each, form)
    states = FSDP.optim_state_dict(ours, optimizers[1])
    if strategy is NO_SHARD or form == "full":
        for name, parameter in plain.named_parameters():
            for key, value in optimizers[0].state[parameter].items():
                torch.testing.assert_close(states["state"][name][key], value, check_device=False)
                # As in a checkpoint of a model with row-major matrices.
                states["state"][name][key] = states["state"][name][key].contiguous()
    later.load_state_dict(ours.state_dict())
    FSDP.optim_state_dict_to_load(later, optimizers[2], states, load_directly=True)
    checkpoints.train(plain, optimizers[0], [2], ranks=[0, 1])
    checkpoints.train(later, optimizers[2], [2])
    checkpoints.set_form(later, "full")
    # A fused kernel rounds differently at the end of a shard.
    torch.testing.assert_close(dict(later.state_dict()), dict(plain.state_dict()))
