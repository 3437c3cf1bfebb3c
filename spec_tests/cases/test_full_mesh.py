"""``dp_mesh_dims``: one mesh for data parallelism and tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import minifsdp
from spec_tests.harness import device, ranks

LIBRARIES: dict[str, Any] = {"minifsdp": minifsdp}
if hasattr(torch_fsdp, "DataParallelMeshDims"):
    LIBRARIES["torch"] = torch_fsdp


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)).to(device())


def on_mesh(mesh: DeviceMesh) -> nn.Sequential:
    """The model with DTensors. A dimension `cut` splits the first layer by rows, and the second one by columns."""
    names = mesh.mesh_dim_names or ()
    model = plain()
    for layer, dim in ((model[0], 0), (model[2], 1)):
        for name, parameter in list(layer.named_parameters()):
            placements: list[Any] = [Replicate()] * mesh.ndim
            if "cut" in names and (dim == 0 or name == "weight"):
                placements[names.index("cut")] = Shard(dim)
            whole = distribute_tensor(parameter.detach(), mesh, placements)
            setattr(layer, name, nn.Parameter(whole))
    return model


def batch(step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).to(device())


def share(mesh: DeviceMesh, step: int) -> DTensor:
    """The batch, split over the dimensions of data parallelism."""
    names = mesh.mesh_dim_names or ()
    return distribute_tensor(batch(step), mesh, [Replicate() if name == "cut" else Shard(0) for name in names])


STRIDED = _StridedShard(0, split_factor=2)
# The names of the dimensions of a mesh, those for data parallelism, and the placements of the first weight.
MESHES: dict[int, list[tuple[Any, ...]]] = {
    4: [
        (("data", "cut"), "data", None, (STRIDED, Shard(0))),
        (("cut", "data"), "data", None, (Shard(0), Shard(0))),
        (("copies", "data"), "data", "copies", (Replicate(), Shard(0))),
        (("data", "context"), ("data", "context"), None, (Shard(0),)),
        (("copies", "cut"), None, "copies", (Replicate(), Shard(0))),
        (("copies",), None, "copies", (Replicate(),)),
    ],
    8: [
        (("copies", "data", "cut"), "data", "copies", (Replicate(), STRIDED, Shard(0))),
        (("data", "context", "cut"), ("data", "context"), None, (STRIDED, Shard(0))),
        (("copies", "data", "context"), ("data", "context"), "copies", (Replicate(), Shard(0))),
    ],
}


def name_of(mesh: tuple[Any, ...]) -> str:
    return "-".join(mesh[0])


def trains_like_one_process(
    library: str, names: tuple[str, ...], shard: Any, replicate: Any, placements: tuple[Any, ...]
) -> None:
    fsdp = LIBRARIES[library]
    sizes = (dist.get_world_size(),) if len(names) == 1 else (2,) * len(names)
    mesh = init_device_mesh(device().type, sizes, mesh_dim_names=names)
    model, reference = on_mesh(mesh), plain()
    for module in (model[0], model):
        dims = fsdp.DataParallelMeshDims(shard=shard, replicate=replicate)
        fsdp.fully_shard(module, mesh=mesh, dp_mesh_dims=dims)
    assert model[0].weight.placements == placements
    # DTensor computes the gradient of the loss of all ranks, and fully_shard divides by the number of ranks.
    num_copies = mesh.size() // (2 if "cut" in names else 1)
    ours = torch.optim.AdamW(model.parameters(), 0.1)
    theirs = torch.optim.AdamW(reference.parameters(), 0.1)

    for step in range(3):
        # The first step has two micro-batches. Their sum is reduced.
        for number in (5, step)[step > 0 :]:
            model.set_requires_gradient_sync(number == step)
            model(share(mesh, number)).square().sum().backward()
            (reference(batch(number)).square().sum() / num_copies).backward()
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert one.grad.placements == one.placements
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()

    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].full_tensor(), value)


@pytest.mark.spec("NEW-31")
@pytest.mark.parametrize("mesh", MESHES[4], ids=name_of)
@pytest.mark.parametrize("library", LIBRARIES)
@ranks(4)
def test_a_model_on_one_mesh_trains_like_one_process(library: str, mesh: tuple[Any, ...]) -> None:
    trains_like_one_process(library, *mesh)


@pytest.mark.spec("NEW-31")
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("mesh", MESHES[8], ids=name_of)
@pytest.mark.parametrize("library", LIBRARIES)
@ranks(8)
def test_a_model_on_a_mesh_with_three_dimensions_trains_like_one_process(library: str, mesh: tuple[Any, ...]) -> None:
    trains_like_one_process(library, *mesh)


@pytest.mark.spec("NEW-31")
@pytest.mark.parametrize("library", LIBRARIES)
@ranks(4)
def test_wrong_meshes_and_names_are_errors(library: str) -> None:
    fsdp = LIBRARIES[library]
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("data", "cut"))
    other = init_device_mesh(device().type, (2, 2), mesh_dim_names=("cut", "data"))
    dims = fsdp.DataParallelMeshDims(shard="data")

    def shard(model: nn.Module, **options: Any) -> None:
        fsdp.fully_shard(model, **{"mesh": mesh, "dp_mesh_dims": dims, **options})

    with pytest.raises(ValueError, match=r"'copies'.*\('data', 'cut'\)"):
        shard(on_mesh(mesh), dp_mesh_dims=fsdp.DataParallelMeshDims(shard="data", replicate="copies"))
    with pytest.raises(ValueError, match="all parameters must be DTensors"):
        shard(plain())
    with pytest.raises(ValueError, match="same mesh"):
        shard(on_mesh(other))
    with pytest.raises(ValueError, match=r"Expected Replicate\(\).*'data'"):
        layer = nn.Linear(4, 4, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(0)]))
        shard(layer)
    with pytest.raises(NotImplementedError, match="reshard_after_forward"):
        shard(on_mesh(mesh), reshard_after_forward=2)
    unnamed = DeviceMesh(device().type, torch.arange(4).view(2, 2))
    with pytest.raises(ValueError, match=r"name(s| )"):
        shard(on_mesh(mesh), mesh=unnamed)


@pytest.mark.spec("NEW-31", "FUZZ-02")
@ranks(2)
def test_an_object_without_names_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="dp_mesh_dims should be a DataParallelMeshDims or None"):
        minifsdp.fully_shard(plain(), dp_mesh_dims=object())
