"""``replicate``: every rank has all parameters, and gradients are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._composable.replicate_with_fsdp as torch_replicate
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils import clip_grad_norm_

import minifsdp
from spec_tests.harness import device, ranks
from spec_tests.models import running, values
from spec_tests.models.gradients import assert_trains_like
from spec_tests.subject import trace

# The library of the policies and of `fully_shard`, and the function.
LIBRARIES: dict[str, tuple[Any, Any]] = {
    "minifsdp": (minifsdp, minifsdp.replicate),
    "torch": (torch_fsdp, torch_replicate.replicate),
}
either = pytest.mark.parametrize("library", LIBRARIES)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Sequential(nn.Linear(12, 12), nn.Tanh()), nn.Linear(12, 6)).to(device())


@pytest.mark.spec("NEW-32")
@either
@ranks(2)
def test_a_replicated_model_trains_like_one_process_on_all_batches(library: str) -> None:
    _, replicate = LIBRARIES[library]
    model, reference = plain(), plain()
    replicate(model[1])
    assert replicate(model) is model
    assert {parameter.placements for parameter in model.parameters()} == {(Replicate(),)}
    assert [p.to_local().shape for p in model.parameters()] == [p.shape for p in reference.parameters()]
    assert_trains_like(model, reference, range(3))


@pytest.mark.spec("NEW-32")
@either
@ranks(2)
def test_micro_batches_without_synchronization_are_averaged_once_and_clipped(library: str) -> None:
    _, replicate = LIBRARIES[library]
    model = replicate(plain())
    model.set_requires_gradient_sync(False)
    running.iterate(model, 0)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.set_requires_gradient_sync(True)
    running.iterate(model, 1)
    expected = values.mean_gradients(plain(), (0, 1))
    values.assert_same(values.full_gradients(model), expected)
    norm = torch.cat([gradient.reshape(-1) for gradient in expected.values()]).norm()
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.01).full_tensor(), norm)


@pytest.mark.spec("NEW-32")
@either
@ranks(2)
def test_mixed_precision_computes_in_bfloat16_and_averages_in_float32(library: str) -> None:
    fsdp, replicate = LIBRARIES[library]
    model, seen = plain(), []
    model[0].register_forward_hook(lambda *given: seen.append(given[-1].dtype))
    replicate(model, mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    running.iterate(model)
    assert seen == [torch.bfloat16]
    expected = torch.zeros(12, 6, device=device())
    for rank in range(2):
        half = plain().to(torch.bfloat16)
        half(running.batch(0, rank).bfloat16()).square().mean().backward()
        expected += half[0].weight.grad.float() / 2
    assert model[0].weight.grad.dtype is torch.float32
    torch.testing.assert_close(model[0].weight.grad.full_tensor(), expected, rtol=2**-7, atol=1e-3)


@pytest.mark.spec("NEW-32")
@either
@ranks(2)
def test_a_replicated_layer_inside_a_sharded_model_keeps_all_its_values(library: str) -> None:
    fsdp, replicate = LIBRARIES[library]
    model = plain()
    replicate(model[1])
    fsdp.fully_shard(model)
    assert model[1][0].weight.placements == (Replicate(),)
    assert model[0].weight.placements == (Shard(0),)
    assert_trains_like(model, plain())


@pytest.mark.spec("NEW-32")
@either
@ranks(2)
def test_the_class_and_the_state_of_a_replicated_module(library: str) -> None:
    fsdp, replicate = LIBRARIES[library]
    model = replicate(plain())
    assert type(model).__name__ == "ReplicateSequential"
    assert isinstance(model, torch_replicate.ReplicateModule if library == "torch" else minifsdp.ReplicateModule)
    assert minifsdp.ReplicateModule.__name__ == torch_replicate.ReplicateModule.__name__
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
        running.iterate(model)
    sent = [(event.kind, event.ranks, event.num_bytes // 4) for event in recorder.events if event.ranks]
    # The inner unit has one layer of 12 x 12, and the root has one of 6 x 12 and one of 12 x 6. All have a bias.
    sizes = [12 * 12 + 12, 6 * 12 + 12 + 12 * 6 + 6]
    assert sorted(sent) == [("AR", (0, 1), size) for size in sizes]
