"""Two equal models, such as an actor and a critic, that each rank loads in its own order."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from spec_tests import subject
from spec_tests.checkpoint.checkpoints import flat_or_original, fully_sharded, make, step, wrapped
from spec_tests.harness import ranks
from spec_tests.models.values import assert_same, full_values
from spec_tests.subject import FullyShardedDataParallel as FSDP

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
ALL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def trained(api: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    plain = make(seed)
    model = fully_sharded(plain) if api == "fully_shard" else wrapped(plain, use_orig_params=api == "original")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step(model, optimizer, 0)
    return model, optimizer


def given(values: dict[str, Any]) -> dict[str, Any]:
    return values if dist.get_rank() == 0 else {}


def values_of(model: Any, optimizer: Any) -> tuple[Any, Any]:
    if isinstance(model, FSDP):
        return model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    return subject.get_state_dict(model, optimizer, options=ALL)


def load_rows(model: Any, optimizer: Any, values: Any) -> None:
    model.load_state_dict(values[0])


def load_states(model: Any, optimizer: Any, values: Any) -> None:
    FSDP.optim_state_dict_to_load(model, optimizer, values[1], load_directly=True)


def assert_unchanged_and_usable(both: Any, before: list[dict[str, torch.Tensor]]) -> None:
    for (model, optimizer), expected in zip(both, before, strict=True):
        assert_same(full_values(model), expected, bitwise=True)
        step(model, optimizer, 1)


@flat_or_original
@pytest.mark.spec("PROG-93")
@ranks(2)
def test_each_rank_loads_its_own_full_dicts_in_any_order(keep: bool) -> None:
    both = [trained("original" if keep else "flat", seed) for seed in (0, 1)]
    saved = [values_of(*each) for each in both]
    before = [full_values(model) for model, _ in both]
    for number in (0, 1) if dist.get_rank() else (1, 0):
        load_rows(*both[number], saved[number])
        load_states(*both[number], saved[number])
    assert_unchanged_and_usable(both, before)


@flat_or_original
@pytest.mark.spec("PROG-92")
@ranks(2)
def test_rank_0_gives_the_weights_to_all_ranks(keep: bool) -> None:
    model, whole = wrapped(make(1), use_orig_params=keep), make().state_dict()
    result = subject.set_model_state_dict(model, given(dict(whole)), options=FROM_RANK_0)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same(full_values(model), dict(make().named_parameters()), bitwise=True)
    without = {name: value for name, value in whole.items() if name != "scale"}
    with pytest.raises(RuntimeError, match=re.escape('Missing key(s) in state_dict: "scale"')):
        subject.set_model_state_dict(model, given(without), options=FROM_RANK_0)
    with pytest.raises(ValueError, match="full_state_dict must be True"):
        subject.set_model_state_dict(model, whole, options=StateDictOptions(broadcast_from_rank0=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step(model, optimizer, 0)
    other = wrapped(make(2), use_orig_params=keep)
    fresh = torch.optim.Adam(other.parameters(), lr=1.0)
    weights, states = subject.get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    subject.set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=states, options=FROM_RANK_0)
    assert step(other, fresh, 1) == step(model, optimizer, 1)
    assert_same(full_values(other), full_values(model), bitwise=True)
