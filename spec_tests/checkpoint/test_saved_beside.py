"""State dicts of schedulers and gradient scalers next to the model's, the older functions, and renamed keys."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from spec_tests import subject
from spec_tests.checkpoint.checkpoints import flat_or_original, fully_sharded, make, quiet, train_alike, wrapped
from spec_tests.harness import device, ranks
from spec_tests.models.modules import Block, Tied, seeded
from spec_tests.models.running import batch
from spec_tests.models.sharding import HYBRID_SHARD, grid_mesh
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy, OptimStateKeyType, ShardedGradScaler

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SCHEDULES: dict[str, Any] = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


class Run:
    """A model and everything that a resumed training needs."""

    def __init__(self, api: str, schedule: str, seed: int) -> None:
        plain = make(seed)
        is_wrapped = api != "fully_shard"
        self.model = wrapped(plain, use_orig_params=api == "original") if is_wrapped else fully_sharded(plain)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = SCHEDULES[schedule](self.optimizer)
        self.scaler = ShardedGradScaler(device().type, init_scale=64.0, growth_interval=2)

    def steps(self, first: int, last: int) -> list[tuple[float, float, float]]:
        found = []
        for number in range(first, last):
            self.optimizer.zero_grad()
            loss = self.model(batch(number, width=3)).square().mean()
            # The scaler skips the step with an infinite loss.
            self.scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            value = float(loss.detach())
            # All ranks need the same rate, so a scheduler that reads the loss gets the same value on all.
            self.schedule.step(*([1.0] if hasattr(self.schedule, "patience") else []))
            found.append((value, self.optimizer.param_groups[0]["lr"], self.scaler.get_scale()))
        return found

    def saved(self, options: StateDictOptions) -> Any:
        beside = self.schedule.state_dict(), self.scaler.state_dict()
        return copy.deepcopy((subject.get_state_dict(self.model, self.optimizer, options=options), beside))

    def load(self, saved: Any, options: StateDictOptions) -> None:
        (weights, states), (schedule, scaler) = saved
        subject.set_state_dict(
            self.model, self.optimizer, model_state_dict=weights, optim_state_dict=states, options=options
        )
        self.schedule.load_state_dict(schedule)
        self.scaler.load_state_dict(scaler)


@pytest.mark.parametrize(
    ("api", "schedule", "full"),
    [
        ("flat", "cosine", True),
        ("original", "cycle", False),
        ("fully_shard", "plateau", True),
        ("flat", "plateau", False),
    ],
)
@pytest.mark.spec("PROG-96")
@ranks(2)
def test_a_run_resumes_with_its_scheduler_and_scaler(api: str, schedule: str, full: bool) -> None:
    options = StateDictOptions(full_state_dict=full)
    with quiet():
        run, resumed = Run(api, schedule, 0), Run(api, schedule, 1)
        run.steps(0, 4)
        resumed.load(run.saved(options), options)
        assert resumed.steps(4, 8) == run.steps(4, 8)
    assert_same(full_values(resumed.model), full_values(run.model), bitwise=True)


def tied(keep: bool, hybrid: bool, seed: int) -> Any:
    options: dict[str, Any] = {"device_mesh": grid_mesh(), "sharding_strategy": HYBRID_SHARD} if hybrid else {}
    policy = ModuleWrapPolicy({Block})
    return wrapped(seeded(plain_tied, seed), auto_wrap_policy=policy, use_orig_params=keep, **options)


def plain_tied() -> nn.Module:
    return Tied(3)


@pytest.mark.parametrize("hybrid", [False, True], ids=["sharded", "hybrid"])
@flat_or_original
@pytest.mark.spec("PROG-94")
@ranks(4)
def test_older_functions_agree_with_a_plain_optimizer(keep: bool, hybrid: bool) -> None:
    plain = seeded(plain_tied, 0)
    oracle = torch.optim.Adam(plain.parameters(), lr=0.01)
    model = tied(keep, hybrid, 0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_alike(plain, oracle, (0, 1))
    train_alike(model, optimizer, (0, 1))
    weights, own = model.state_dict(), copy.deepcopy(oracle.state_dict())
    train_alike(plain, oracle, (2, 3))
    mine = FSDP.full_optim_state_dict(model, optimizer)
    of_all = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    named = FSDP.rekey_optim_state_dict(own, OptimStateKeyType.PARAM_NAME, seeded(plain_tied, 0))
    ways: list[Any] = [
        lambda other, fresh: FSDP.shard_full_optim_state_dict(of_all, other, optim=fresh),
        lambda other, fresh: FSDP.scatter_full_optim_state_dict(mine or None, other, optim=fresh),
        lambda other, fresh: FSDP.flatten_sharded_optim_state_dict(
            FSDP.sharded_optim_state_dict(model, optimizer), other, fresh
        ),
        lambda other, fresh: FSDP.shard_full_optim_state_dict(named, other, optim=fresh),
        lambda other, fresh: FSDP.optim_state_dict_to_load(other, fresh, of_all, load_directly=True),
    ]
    for way in ways:
        other = tied(keep, hybrid, 1)
        fresh = torch.optim.Adam(other.parameters(), lr=1.0)
        other.load_state_dict(weights)
        fresh.load_state_dict(way(other, fresh))
        train_alike(other, fresh, (2, 3))
        assert_same(full_values(other), dict(plain.named_parameters()))
    unwrapped = seeded(plain_tied, 1)
    unwrapped.load_state_dict(weights)
    fresh = torch.optim.Adam(unwrapped.parameters(), lr=1.0)
    fresh.load_state_dict(FSDP.rekey_optim_state_dict(of_all, OptimStateKeyType.PARAM_ID, unwrapped))
    train_alike(unwrapped, fresh, (2, 3))
    assert_same(dict(unwrapped.named_parameters()), dict(plain.named_parameters()))


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
        out: Tensor = self.hidden(x)
        return out


def renaming() -> nn.Module:
    return nn.Sequential(Renaming(), nn.Linear(3, 2))


@pytest.mark.parametrize(("units", "full"), [(True, True), (True, False), (False, True), (False, False)])
@flat_or_original
@pytest.mark.spec("PROG-95")
@ranks(2)
def test_a_module_may_rename_its_keys(keep: bool, units: bool, full: bool) -> None:
    options: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({Renaming}) if units else None}
    model, other = (wrapped(seeded(renaming, seed), use_orig_params=keep, **options) for seed in (0, 1))
    optimizer, fresh = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, other))
    train_alike(model, optimizer, (0,))
    form = StateDictOptions(full_state_dict=full)
    with quiet():
        weights, states = subject.get_state_dict(model, optimizer, options=form)
        assert sorted(weights) == sorted(renaming().state_dict())
        subject.set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=states, options=form)
    train_alike(model, optimizer, (1, 2))
    train_alike(other, fresh, (1, 2))
    assert_same(full_values(other), full_values(model), bitwise=True)
