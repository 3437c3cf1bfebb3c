"""Private attributes of torch's ``fully_shard`` that libraries read, with both torch and minifsdp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable_state import _get_module_state
from torch.distributed.device_mesh import init_device_mesh

import minifsdp
from spec_tests import subject
from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, loss_of
from spec_tests.models.torch_names import param_groups

# Each policy, and `_reduce_dtype` of a group of float32 parameters that are trained.
POLICIES: list[tuple[dict[str, Any], torch.dtype | None]] = [
    ({}, None),
    ({"param_dtype": torch.bfloat16}, None),
    ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, torch.float32),
    ({"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}, None),
]
# torch 2.15 has other attributes, and its `_reduce_dtype` is never None.
HAS_DTYPES = not hasattr(torch_fsdp, "GradientReductionHandle")


def known_of(model: nn.Module) -> list[tuple[Any, ...]]:
    """The attributes that a library reads, for each module with a state."""
    states = [(_get_module_state(module), module) for module in model.modules()]
    return [facts_of(state, module) for state, module in states if state is not None]


def facts_of(state: Any, module: nn.Module) -> tuple[Any, ...]:
    group = state._fsdp_param_group
    # Nothing is reduced in a frozen group. torch has no dtypes for it before 2.14.
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    dtypes = dtypes_of(group) if HAS_DTYPES and group is not None and is_trained else None
    return state._is_root, state._mp_policy.param_dtype, len(param_groups(state)), dtypes


def dtypes_of(group: Any) -> tuple[torch.dtype | None, ...]:
    return group._orig_dtype, group._reduce_dtype, group.mp_policy.reduce_dtype


def made_by(library: Any, policy: dict[str, Any]) -> nn.Module:
    model = seeded()
    for block in model.blocks[:2]:
        library.fully_shard(block, mp_policy=library.MixedPrecisionPolicy(**policy))
    model.blocks[1].requires_grad_(requires_grad=False)
    return library.fully_shard(model, mp_policy=library.MixedPrecisionPolicy(**policy))


@pytest.mark.parametrize(("policy", "reduces_in"), POLICIES, ids=["plain", "param", "reduce wider", "both"])
@pytest.mark.spec("FS2-29")
@ranks(2)
def test_state_registry_has_the_results_of_torch(policy: dict[str, Any], reduces_in: torch.dtype | None) -> None:
    ours, theirs = made_by(minifsdp, policy), made_by(torch_fsdp, policy)
    # torch determines the dtypes and the root when the first forward begins.
    assert {_get_module_state(ours)._is_root, _get_module_state(theirs)._is_root} == {None}
    for model in (ours, theirs):
        loss_of(model(batch())).backward()
    assert known_of(ours) == known_of(theirs)
    assert len(known_of(ours)) == 3, "the root and two blocks"
    trained, frozen = (_get_module_state(block)._fsdp_param_group for block in ours.blocks[:2])
    assert dtypes_of(trained) == (torch.float32, reduces_in, policy.get("reduce_dtype"))
    assert dtypes_of(frozen)[:2] == (None, None)


@pytest.mark.spec("FS2-29")
@ranks(2)
def test_a_module_without_parameters_has_a_state_without_a_group() -> None:
    inner = subject.fully_shard(nn.Linear(2, 2, device=device()))
    model = subject.fully_shard(nn.Sequential(inner))
    model(torch.ones(1, 2, device=device()))
    assert _get_module_state(model) is subject.fully_shard.state(model)
    assert facts_of(_get_module_state(model), model)[0] is True
    assert _get_module_state(model)._fsdp_param_group is None
    assert _get_module_state(inner)._is_root is False


# --- the mesh of a parameter group ---


def meshes_of(model: nn.Module) -> list[Any]:
    """The mesh of each state's group, and the mesh of that group after forward."""
    groups = [state._fsdp_param_group for m in model.modules() if (state := _get_module_state(m)) is not None]
    infos = [(group.mesh_info, group.post_forward_mesh_info) for group in groups]
    return [[None if info is None else facts_of_mesh(info) for info in both] for both in infos]


def facts_of_mesh(info: Any) -> tuple[Any, ...]:
    replicate = getattr(info, "replicate_mesh_size", None)
    return type(info).__name__, info.mesh.mesh.tolist(), info.shard_mesh_size, info.shard_mesh_rank, replicate


@pytest.mark.parametrize("choice", [None, True, False, 1, 2])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.spec("START-07")
@ranks(4)
def test_meshes_of_a_group_equal_those_of_torch(shape: tuple[int, ...], choice: bool | int | None) -> None:
    names = ("replicate", "shard")[-len(shape) :]
    models = []
    for library in (minifsdp, torch_fsdp):
        mesh = init_device_mesh(device().type, shape, mesh_dim_names=names)
        model = seeded()
        for block in model.blocks:
            library.fully_shard(block, mesh=mesh, reshard_after_forward=choice)
        models.append(library.fully_shard(model, mesh=mesh))
    ours, theirs = models
    assert meshes_of(ours) == meshes_of(theirs)
    for model in models:
        loss_of(model(batch())).backward()
    assert meshes_of(ours) == meshes_of(theirs)
    # The root keeps its unsharded parameters after forward.
    assert meshes_of(ours)[0][1] is None
    for model in models:
        model.set_reshard_after_forward(choice is False)
    assert meshes_of(ours) == meshes_of(theirs)
    with pytest.raises(AttributeError, match="post_forward_mesh_info"):
        _get_module_state(ours)._fsdp_param_group.post_forward_mesh_info = None
