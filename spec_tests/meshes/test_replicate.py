"""``replicate``: every rank has all parameters, and gradients are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._composable.replicate_with_fsdp as torch_replicate
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils import clip_grad_norm_

import minifsdp
from spec_tests.harness import device, ranks
from spec_tests.subject import trace

# The library of the policies and of `fully_shard`, and the function.
LIBRARIES: dict[str, tuple[Any, Any]] = {
    "minifsdp": (minifsdp, minifsdp.replicate),
    "torch": (torch_fsdp, torch_replicate.replicate),
}
either = pytest.mark.parametrize("library", LIBRARIES)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Sequential(nn.Linear(12, 12), nn.Tanh()), nn.Linear(12, 8)).to(device())


def batches(step: int) -> Tensor:
    """One batch for each rank."""
    dice = torch.Generator().manual_seed(step)
    return torch.randn(dist.get_world_size(), 4, 8, generator=dice).to(device())


@pytest.mark.spec("NEW-32")
@either
@ranks(2)
def test_a_replicated_model_trains_like_one_process_on_all_batches(library: str) -> None:
    _, replicate = LIBRARIES[library]
    model, reference = plain(), plain()
    replicate(model[1])
    assert replicate(model) is model
    ours = torch.optim.AdamW(model.parameters(), 0.1)
    theirs = torch.optim.AdamW(reference.parameters(), 0.1)

    for step in range(3):
        model(batches(step)[dist.get_rank()]).square().mean().backward()
        reference(batches(step)).square().mean().backward()
        norm = clip_grad_norm_(model.parameters(), 0.01)
        torch.testing.assert_close(norm.full_tensor(), clip_grad_norm_(reference.parameters(), 0.01))
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()

    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert one.placements == (Replicate(),)
        assert one.to_local().shape == other.shape
        torch.testing.assert_close(one.full_tensor(), other)


@pytest.mark.spec("NEW-32")
@either
@ranks(2)
def test_micro_batches_without_synchronization_are_averaged_once(library: str) -> None:
    _, replicate = LIBRARIES[library]
    model, reference = plain(), plain()
    replicate(model)

    model.set_requires_gradient_sync(False)
    model(batches(0)[dist.get_rank()]).square().mean().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.set_requires_gradient_sync(True)
    model(batches(1)[dist.get_rank()]).square().mean().backward()

    for step in range(2):
        reference(batches(step)).square().mean().backward()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@pytest.mark.spec("NEW-32")
@either
@ranks(2)
def test_mixed_precision_computes_in_bfloat16_and_averages_in_float32(library: str) -> None:
    fsdp, replicate = LIBRARIES[library]
    model = plain()
    seen = []
    model[0].register_forward_hook(lambda *given: seen.append(given[-1].dtype))
    replicate(model, mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    model(batches(0)[dist.get_rank()]).square().mean().backward()

    assert seen == [torch.bfloat16]
    expected = 0.0
    for part in batches(0):
        half = plain().to(torch.bfloat16)
        half(part.bfloat16()).square().mean().backward()
        expected = expected + half[0].weight.grad.float() / 2
    assert model[0].weight.grad.dtype is torch.float32
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), expected, rtol=2**-7, atol=1e-3)


@pytest.mark.spec("NEW-32")
@either
@ranks(2)
def test_a_replicated_layer_inside_a_sharded_model_keeps_all_its_values(library: str) -> None:
    fsdp, replicate = LIBRARIES[library]
    model, reference = plain(), plain()
    replicate(model[1])
    fsdp.fully_shard(model)

    model(batches(0)[dist.get_rank()]).square().mean().backward()
    reference(batches(0)).square().mean().backward()

    assert model[1][0].weight.placements == (Replicate(),)
    assert model[0].weight.placements == (Shard(0),)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@pytest.mark.spec("NEW-32")
@either
@ranks(2)
def test_the_class_and_the_state_of_a_replicated_module(library: str) -> None:
    fsdp, replicate = LIBRARIES[library]
    model = replicate(plain())
    assert type(model).__name__ == "ReplicateSequential"
    assert isinstance(model, fsdp.FSDPModule)
    assert isinstance(model, nn.Sequential)
    assert type(model[:2]) is nn.Sequential
    assert model[0].weight.device_mesh.mesh_dim_names == ("replicate",)
    assert replicate.state(model)._fsdp_param_group.mesh_info.replicate_mesh_dim == 0
    with pytest.raises(AssertionError, match="only be applied to a module once"):
        replicate(model)
    with pytest.raises(RuntimeError, match=r"Cannot apply .?replicate\(\).? on a [Mm]odule already managed"):
        replicate(fsdp.fully_shard(plain()))


@pytest.mark.spec("NEW-32")
@ranks(2)
def test_the_names_of_the_classes_are_those_of_torch() -> None:
    assert isinstance(minifsdp.replicate(plain()), minifsdp.ReplicateModule)
    assert minifsdp.ReplicateModule.__name__ == torch_replicate.ReplicateModule.__name__


@pytest.mark.spec("NEW-32")
@either
@ranks(4)
def test_a_mesh_with_two_dimensions_is_an_error(library: str) -> None:
    _, replicate = LIBRARIES[library]
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("copies", "cut"))
    with pytest.raises(ValueError, match="replicate expects a 1D DeviceMesh"):
        replicate(plain(), mesh=mesh)
    one = replicate(plain(), mesh=mesh["copies"])
    assert one[0].weight.device_mesh.size() == 2


@pytest.mark.spec("NEW-32")
@ranks(2)
def test_dimensions_to_shard_over_are_an_error_of_replicate() -> None:
    mesh = init_device_mesh(device().type, (2,), mesh_dim_names=("data",))
    with pytest.raises(ValueError, match=r"requires replicate-only dims.*use fully_shard"):
        minifsdp.replicate(plain(), mesh=mesh, dp_mesh_dims=minifsdp.DataParallelMeshDims(shard="data"))


@pytest.mark.spec("NEW-32")
@ranks(2)
def test_a_step_issues_one_all_reduce_for_each_unit_and_no_all_gather() -> None:
    model = plain()
    minifsdp.replicate(model[1])
    minifsdp.replicate(model)
    with trace.record() as recorder:
        model(batches(0)[dist.get_rank()]).sum().backward()
    sent = [event for event in recorder.events if event.kind in ("AG", "RS", "AR")]
    sizes = [
        sum(p.numel() for p in model[1].parameters()),
        sum(p.numel() for p in (*model[0].parameters(), *model[2].parameters())),
    ]
    assert [event.kind for event in sent] == ["AR", "AR"]
    assert [event.ranks for event in sent] == [(0, 1), (0, 1)]
    assert sorted(event.num_bytes for event in sent) == sorted(4 * size for size in sizes)
