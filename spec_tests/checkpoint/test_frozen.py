"""A run with frozen parameters resumes from its own state dicts, with the same or other layers frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.checkpoint.checkpoints import (
    FULL,
    SHARDED,
    assert_same_state,
    full_or_sharded,
    make,
    quiet,
    step,
    wrapped,
)
from spec_tests.harness import ranks
from spec_tests.models.sharding import FLAT_STRATEGIES
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy, ShardingStrategy, StateDictType

frozen_warnings_are_expected = pytest.mark.filterwarnings("ignore:.*frozen")


def build(seed: int, strategy: ShardingStrategy, freeze: str) -> tuple[Any, torch.optim.Optimizer]:
    plain: nn.Module = make(seed)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(freeze not in name)
    model = wrapped(plain, use_orig_params=True, sharding_strategy=strategy)
    # The optimizer has all parameters, also the frozen ones, as in most scripts.
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


@frozen_warnings_are_expected
@pytest.mark.spec("OSD-08", "OSD-LOAD-03")
@full_or_sharded
@pytest.mark.parametrize("freeze", ["bias", "weight"])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_units_with_some_frozen_parameters_resume_from_their_own_dict(
    strategy: ShardingStrategy, freeze: str, form: Any
) -> None:
    model, optimizer = build(0, strategy, freeze)
    step(model, optimizer, 0)
    again, restored = build(1, strategy, freeze)
    for wrapper in (model, again):
        FSDP.set_state_dict_type(wrapper, form)
    saved = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    again.load_state_dict(saved[0])
    restored.load_state_dict(FSDP.optim_state_dict_to_load(again, restored, saved[1]))
    assert_same_state(restored.state_dict()["state"], optimizer.state_dict()["state"])
    for number in (1, 2):
        assert step(again, restored, number) == step(model, optimizer, number)


@frozen_warnings_are_expected
@pytest.mark.spec("OSD-08", "PROG-65")
@ranks(2)
def test_a_frozen_flat_unit_needs_no_states_of_parameters_that_were_frozen_before() -> None:
    model, optimizer = build(0, ShardingStrategy.FULL_SHARD, "second.0.bias")
    step(model, optimizer, 0)
    saved = FSDP.optim_state_dict(model, optimizer)
    plain: Any = make(1)
    for parameter in plain.second.parameters():
        parameter.requires_grad_(False)
    again = wrapped(plain)
    restored = torch.optim.Adam(again.parameters(), lr=0.01)
    restored.load_state_dict(FSDP.optim_state_dict_to_load(again, restored, saved))
    step(again, restored, 1)
    found, expected = FSDP.optim_state_dict(again, restored)["state"], saved["state"]
    trained = {name for name in expected if "second." not in name}
    assert trained < expected.keys()
    assert {name for name in found if found[name]["step"] == 2} == trained


def part_of(frozen: bool) -> Any:
    model = make()
    model.first.requires_grad_(not frozen)
    return model


def plain_run(unfreezes: bool) -> nn.Module:
    model, resumed = part_of(frozen=True), part_of(frozen=not unfreezes)
    optimizer, fresh = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, resumed))
    for number in range(2):
        step(model, optimizer, number, everybody=True)
    resumed.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    for number in range(2, 5):
        step(resumed, fresh, number, everybody=True)
    return resumed


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@pytest.mark.parametrize(("keep", "units"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("unfreezes", [True, False])
@pytest.mark.spec("PROG-65")
@ranks(2)
def test_layers_may_be_unfrozen_when_a_run_is_resumed(
    unfreezes: bool, keep: bool, units: bool, strategy: ShardingStrategy, kind: StateDictType
) -> None:
    options: dict[str, Any] = {"use_orig_params": keep, "sharding_strategy": strategy}
    # Without units of their own, frozen parameters share the root's unit with others.
    options["auto_wrap_policy"] = ModuleWrapPolicy({nn.Sequential}) if units else None
    # A unit with frozen and trained parameters causes a warning about memory.
    with quiet():
        model, resumed = (wrapped(part_of(frozen), **options) for frozen in (True, not unfreezes))
        optimizer, fresh = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, resumed))
        for number in range(2):
            step(model, optimizer, number)
        for either in (model, resumed):
            FSDP.set_state_dict_type(either, kind)
        weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        resumed.load_state_dict(weights)
        FSDP.optim_state_dict_to_load(resumed, fresh, states, load_directly=True)
        for number in range(2, 5):
            step(resumed, fresh, number)
    FSDP.set_state_dict_type(resumed, FULL)
    assert_same(full_values(resumed), dict(plain_run(unfreezes).named_parameters()))
