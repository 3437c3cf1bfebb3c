"""Parameters whose mesh differs from that of their group: experts, chosen by ``shard_placement_fn``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import Replicate, Shard

import minifsdp
from spec_tests.harness import device, ranks
from spec_tests.models import modules, running, sharding, values
from spec_tests.models.torch_names import ShardPlacementResult
from spec_tests.subject import fully_shard

Place = Callable[[nn.Parameter], Any]


def placed(experts: set[nn.Parameter], info: Any) -> Place:
    return lambda parameter: ShardPlacementResult(None, info) if parameter in experts else None


def made_by(shard: Any, mesh: DeviceMesh, info: Any, **options: Any) -> Any:
    model = modules.wide()
    # The second layer of each block represents the experts.
    place = placed({block.down.weight for block in model.blocks}, info)
    for block in model.blocks:
        shard(block, mesh=mesh, shard_placement_fn=place, **options)
    return shard(model, mesh=mesh, shard_placement_fn=place, **options)


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("axis", ["shard", "replicate", "both"])
@pytest.mark.spec("NEW-23")
@pytest.mark.needs("torch>=2.12")
@ranks(4)
def test_experts_on_a_separate_mesh_train_like_in_torch(axis: str, policy: bool) -> None:
    grid, line = sharding.grid_mesh(), sharding.line_mesh()
    info = HSDPMeshInfo(grid, 1, 0) if axis == "both" else FSDPMeshInfo(grid[axis], 0)
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if policy else {}
    models = []
    for library in (minifsdp, torch_fsdp):
        mp_policy = library.MixedPrecisionPolicy(**dtypes)
        reshards = axis != "replicate"
        models.append(made_by(library.fully_shard, line, info, mp_policy=mp_policy, reshard_after_forward=reshards))
    ours, theirs = models
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine.device_mesh, mine.placements) == (other.device_mesh, other.placements)
    # The lists of the default implementation would mix tensors of several meshes.
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, foreach=False) for model in models]
    for step in range(3):
        for model in models:
            # The second step accumulates without communication.
            model.set_requires_gradient_sync(step != 1)
        assert running.iterate(ours, step) == pytest.approx(running.iterate(theirs, step))
        values.assert_same(values.full_gradients(ours), values.full_gradients(theirs))
        for optimizer in optimizers if step != 1 else []:
            optimizer.step()
            optimizer.zero_grad()
    weight = models[0].blocks[0].down.weight
    assert weight.placements == ((Replicate(), Shard(0)) if axis == "both" else (Shard(0),))


@pytest.mark.spec("NEW-23")
@ranks(4)
def test_placement_fn_chooses_dim_with_mesh() -> None:
    layer, grid = nn.Linear(modules.WIDTH, 4, bias=False, device=device()), sharding.grid_mesh()
    info = FSDPMeshInfo(grid["shard"], 0)
    fully_shard(layer, mesh=sharding.line_mesh(), shard_placement_fn=lambda _: ShardPlacementResult(Shard(1), info))
    assert layer.weight.device_mesh == grid["shard"]
    assert layer.weight.to_local().shape == (4, modules.WIDTH // 2)


@pytest.mark.spec("NEW-23")
@ranks(4)
def test_integer_reshard_after_forward_with_meshes_is_refused() -> None:
    grid = sharding.grid_mesh()
    with pytest.raises(NotImplementedError, match="gives some parameters their own mesh"):
        made_by(fully_shard, sharding.line_mesh(), FSDPMeshInfo(grid["shard"], 0), reshard_after_forward=2)


@pytest.mark.spec("NEW-23")
@ranks(4)
def test_mesh_with_an_unused_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match="mesh with 2 axes"):
        made_by(fully_shard, sharding.line_mesh(), FSDPMeshInfo(sharding.grid_mesh(), 1))


def gradient_sums(first: int, last: int) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias of a linear layer, as sums over the ranks of the two meshes."""
    weight = sum(running.batch(0, rank).sum(0) for rank in (first, last))
    return weight.expand(4, modules.WIDTH), torch.full((4,), 4.0 * len(running.batch())).to(device())


# The factors by which the gradients of weight and bias are multiplied.
CHANGES: dict[str, tuple[Callable[[Any], None], float, float]] = {
    "mean": (lambda layer: None, 1 / 2, 1 / 4),
    "factor": (lambda layer: layer.set_gradient_divide_factor(8.0), 1 / 8, 1 / 8),
    "hook": (lambda layer: layer.set_all_reduce_hook(lambda reduced: reduced.mul_(3)), 3 / 2, 3 / 4),
}


@pytest.mark.spec("NEW-23", "NEW-09", "NEW-10")
@pytest.mark.parametrize("change", CHANGES)
@ranks(4)
def test_a_gradient_is_the_mean_over_the_ranks_of_its_own_mesh(change: str) -> None:
    layer, info = nn.Linear(modules.WIDTH, 4, device=device()), FSDPMeshInfo(sharding.grid_mesh()["shard"], 0)
    fully_shard(layer, mesh=sharding.line_mesh(), shard_placement_fn=placed({layer.weight}, info))
    apply, *factors = CHANGES[change]
    apply(layer)
    layer(running.batch()).sum().backward()
    first = dist.get_rank() // 2 * 2
    sums = gradient_sums(first, first + 1)
    for parameter, total, factor in zip(layer.parameters(), sums, factors, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), total * factor)


@pytest.mark.spec("NEW-23", "NEW-08", "GRAD-03")
@ranks(4)
def test_partial_sums_wait_on_each_mesh_and_are_dropped_on_each_mesh() -> None:
    columns = DeviceMesh(device().type, [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    layer = nn.Linear(modules.WIDTH, 4, device=device())
    experts = placed({layer.bias}, HSDPMeshInfo(columns, 1, 0))
    fully_shard(layer, mesh=sharding.grid_mesh(), shard_placement_fn=experts)
    layer.set_requires_all_reduce(False)
    layer(running.batch()).sum().backward()
    assert [parameter.grad for parameter in layer.parameters()] == [None, None]
    layer.zero_grad()
    layer.set_requires_all_reduce(True)
    layer(running.batch(1)).sum().backward()
    weight = sum(running.batch(1, rank).sum(0) for rank in range(4)) / 4
    torch.testing.assert_close(layer.weight.grad.full_tensor(), weight.expand(4, modules.WIDTH))
    assert layer.bias.grad.full_tensor().tolist() == [len(running.batch())] * 4


class Growing(nn.Linear):
    """Adds 1 to its parameters in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(1)
        return super().forward(x)


@pytest.mark.spec("NEW-23", "PROG-43")
@ranks(4)
def test_values_that_a_forward_writes_are_kept_on_each_mesh() -> None:
    torch.manual_seed(0)
    layer, info = Growing(modules.WIDTH, 4, device=device()), FSDPMeshInfo(sharding.grid_mesh()["shard"], 0)
    expected = [parameter.detach() + 1 for parameter in layer.parameters()]
    fully_shard(layer, mesh=sharding.line_mesh(), shard_placement_fn=placed({layer.weight}, info))
    with torch.no_grad():
        layer(running.batch())
    for parameter, value in zip(layer.parameters(), expected, strict=True):
        assert torch.equal(parameter.full_tensor(), value)
