"""A run with frozen parameters is resumed with the same or fewer of them frozen, and compared with a plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spec_tests.checkpoint.checkpoints import FULL, full_or_sharded, make, quiet, step, wrapped
from spec_tests.harness import ranks
from spec_tests.models.sharding import FLAT_STRATEGIES
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy, ShardingStrategy, StateDictType


def part_of(freeze: str | None, seed: int = 0) -> Any:
    """The model, with the parameters frozen whose names contain ``freeze``."""
    model = make(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(freeze is None or freeze not in name)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    # The optimizer has all parameters, also the frozen ones, as in most scripts.
    return torch.optim.Adam(model.parameters(), lr=0.01)


def plain_run(freeze: str, freeze_later: str | None) -> nn.Module:
    model, resumed = part_of(freeze), part_of(freeze_later)
    optimizer, fresh = adam(model), adam(resumed)
    for number in range(2):
        step(model, optimizer, number, all_ranks=True)
    resumed.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    for number in range(2, 5):
        step(resumed, fresh, number, all_ranks=True)
    return resumed


@pytest.mark.spec("OSD-08", "OSD-LOAD-03", "PROG-65")
@full_or_sharded
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@pytest.mark.parametrize(
    ("keep", "freeze", "units"),
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
    unfreezes: bool, keep: bool, freeze: str, units: bool, strategy: ShardingStrategy, form: StateDictType
) -> None:
    options: dict[str, Any] = {"use_orig_params": keep, "sharding_strategy": strategy}
    options["auto_wrap_policy"] = ModuleWrapPolicy({nn.Sequential}) if units else None
    freeze_later = None if unfreezes else freeze
    # A unit with frozen and trained parameters causes a warning about memory.
    with quiet():
        model, resumed = wrapped(part_of(freeze), **options), wrapped(part_of(freeze_later, seed=1), **options)
        optimizer, fresh = adam(model), adam(resumed)
        for number in range(2):
            step(model, optimizer, number)
        for either in (model, resumed):
            FSDP.set_state_dict_type(either, form)
        weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        resumed.load_state_dict(weights)
        FSDP.optim_state_dict_to_load(resumed, fresh, states, load_directly=True)
        for number in range(2, 5):
            step(resumed, fresh, number)
    FSDP.set_state_dict_type(resumed, FULL)
    assert_same(full_values(resumed), dict(plain_run(freeze, freeze_later).named_parameters()))


@pytest.mark.filterwarnings("ignore:.*frozen")
@pytest.mark.spec("OSD-08", "PROG-65")
@ranks(2)
def test_a_frozen_flat_unit_needs_no_states_of_parameters_that_were_frozen_before() -> None:
    model = wrapped(part_of("second.0.bias"), use_orig_params=True)
    optimizer = adam(model)
    step(model, optimizer, 0)
    saved = FSDP.optim_state_dict(model, optimizer)
    again = wrapped(part_of("second.", seed=1))
    restored = adam(again)
    restored.load_state_dict(FSDP.optim_state_dict_to_load(again, restored, saved))
    step(again, restored, 1)
    found, expected = FSDP.optim_state_dict(again, restored)["state"], saved["state"]
    trained = {name for name in expected if "second." not in name}
    assert trained < expected.keys()
    assert {name for name in found if found[name]["step"] == 2} == trained
