"""A run that is resumed with other layers frozen, compared with the same run of a plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.checkpoint.checkpoints import FULL, SHARDED, make, quiet, step, wrapped
from spec_tests.harness import ranks
from spec_tests.models.sharding import FLAT_STRATEGIES
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy, ShardingStrategy, StateDictType


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


@ranks(2)
def check_resumed(unfreezes: bool, keep: bool, units: bool, strategy: ShardingStrategy, kind: StateDictType) -> None:
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


@pytest.mark.parametrize("kind", [FULL, SHARDED])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@pytest.mark.parametrize(("keep", "units"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("unfreezes", [True, False])
@pytest.mark.spec("PROG-65")
def test_layers_may_be_unfrozen_when_a_run_is_resumed(
    unfreezes: bool, keep: bool, units: bool, strategy: ShardingStrategy, kind: StateDictType
) -> None:
    check_resumed(unfreezes=unfreezes, keep=keep, units=units, strategy=strategy, kind=kind)
