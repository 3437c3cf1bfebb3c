"""Private names of torch's ``fully_shard``, read as libraries read them, on torch's and on ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable_state import _get_module_state

import minifsdp
from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, loss_of

POLICIES: list[dict[str, Any]] = [
    {},
    {"param_dtype": torch.bfloat16},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
]


def known_of(model: nn.Module) -> list[tuple[Any, ...] | None]:
    """What a library reads, module by module."""
    return [None if (s := _get_module_state(m)) is None else facts_of(s) for m in model.modules()]


def facts_of(state: Any) -> tuple[Any, ...]:
    group = state._fsdp_param_group
    dtypes = None if group is None else (group._orig_dtype, group._reduce_dtype, group.mp_policy.reduce_dtype)
    return state._is_root, state._mp_policy.param_dtype, len(state._fsdp_param_groups), dtypes


def made_by(library: Any, policy: dict[str, Any]) -> nn.Module:
    model = seeded()
    for block in model.blocks[:2]:
        library.fully_shard(block, mp_policy=library.MixedPrecisionPolicy(**policy))
    model.blocks[1].requires_grad_(requires_grad=False)
    return library.fully_shard(model, mp_policy=library.MixedPrecisionPolicy(**policy))


@ranks(2)
def check_same_as_torch(policy: dict[str, Any]) -> None:
    ours, theirs = made_by(minifsdp, policy), made_by(torch_fsdp, policy)
    # torch finds the dtypes, and who is the root, when the first forward begins.
    assert {_get_module_state(ours)._is_root, _get_module_state(theirs)._is_root} == {None}
    for model in (ours, theirs):
        loss_of(model(batch())).backward()
    assert known_of(ours) == known_of(theirs)
    assert sum(fact is not None for fact in known_of(ours)) == 3


@pytest.mark.parametrize("policy", POLICIES, ids=["plain", "param", "reduce wider", "both"])
@pytest.mark.spec("FS2-29")
def test_the_registry_of_states_answers_what_torchs_answers(policy: dict[str, Any]) -> None:
    check_same_as_torch(policy=policy)


@pytest.mark.spec("FS2-29")
@ranks(2)
def test_a_module_without_parameters_has_a_state_without_a_group() -> None:
    inner = minifsdp.fully_shard(nn.Linear(2, 2, device=device()))
    model = minifsdp.fully_shard(nn.Sequential(inner))
    model(torch.ones(1, 2, device=device()))
    assert _get_module_state(model) is minifsdp.fully_shard.state(model)
    assert facts_of(_get_module_state(model))[0] is True
    assert _get_module_state(model)._fsdp_param_group is None
    assert _get_module_state(inner)._is_root is False
