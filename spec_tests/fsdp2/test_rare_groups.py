"""Groups that are used in part, of several dtypes, or over two meshes, and an all-gather with one argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor

from spec_tests.fsdp2.int8_shards import Int8Shards, extended
from spec_tests.harness import ranks
from spec_tests.models.modules import WIDTH, seeded, wide
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import grid_mesh, line_mesh
from spec_tests.models.values import assert_same, full_gradients, mean_gradients
from spec_tests.subject import MixedPrecisionPolicy, fully_shard, trace


class Experts(nn.Module):
    """Two equal layers in one unit. A step uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[self.chosen](x)


@pytest.mark.spec("NEW-08")
@ranks(4)
def test_partial_sums_of_two_experts_are_not_added_up() -> None:
    model = fully_shard(seeded(Experts), mesh=grid_mesh())
    model.set_requires_all_reduce(False)
    iterate(model)
    model.chosen = 1
    model.set_requires_all_reduce(True)
    with pytest.raises(RuntimeError, match="has a partial gradient of 2 parameters"):
        iterate(model)
    assert full_gradients(model) == {}, "no expert gets a gradient of the other one"


class Adapted(nn.Module):
    """A frozen layer in one dtype, and a trained adapter in another dtype, in one unit."""

    def __init__(self, frozen: torch.dtype, trained: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, dtype=frozen).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, dtype=trained)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.adapter(x.to(self.adapter.weight.dtype))


@pytest.mark.spec("GRAD-02", "FS2-MP-03")
@pytest.mark.parametrize(
    ("frozen", "trained"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
@ranks(2)
def test_a_frozen_base_does_not_choose_the_dtype_of_the_adapters_gradients(
    frozen: torch.dtype, trained: torch.dtype
) -> None:
    model = fully_shard(seeded(lambda: Adapted(frozen, trained)))
    for step in range(2):
        with trace.record() as recorder:
            iterate(model, step)
        assert [event.dtype for event in recorder.events if event.kind == "RS"] == [trained]
        expected = mean_gradients(seeded(lambda: Adapted(frozen, trained)), (step,))
        assert_same(full_gradients(model), expected, bitwise=trained is torch.float32)
        model.zero_grad()


def on_two_meshes(model: Any) -> Any:
    """The second layer of each block represents the experts, which are sharded over fewer ranks."""
    experts = {block.down.weight for block in model.blocks}
    info = FSDPMeshInfo(grid_mesh()["shard"], 0)

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(None, info) if parameter in experts else None

    for block in model.blocks:
        fully_shard(block, mesh=line_mesh(), shard_placement_fn=place)
    return fully_shard(model, mesh=line_mesh(), shard_placement_fn=place)


@pytest.mark.spec("GRAD-04", "NEW-23")
@ranks(4)
def test_experts_of_a_converted_model_are_reduced_in_the_new_dtype() -> None:
    model = on_two_meshes(wide().bfloat16())
    width = model.enter.in_features
    model(batch(0, width=width).bfloat16())
    model.float()
    with trace.record() as recorder:
        loss_of(model(batch(0, width=width))).backward()
    assert {event.dtype for event in recorder.events if event.kind in ("RS", "AR")} == {torch.float32}


class Chosen(nn.Module):
    """Two layers over two meshes in one unit. A step uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.chosen = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[self.chosen](x)


@pytest.mark.spec("NEW-23")
@ranks(4)
def test_a_mesh_without_gradients_in_a_backward_is_not_reduced() -> None:
    model: Any = seeded(Chosen)
    experts = set(model.layers[1].parameters())
    info = FSDPMeshInfo(grid_mesh()["shard"], 0)
    fully_shard(
        model, mesh=line_mesh(), shard_placement_fn=lambda p: ShardPlacementResult(None, info) if p in experts else None
    )
    for chosen in (0, 1, 0):
        model.chosen = chosen
        loss_of(model(batch(0, 0))).backward()
        plain: Any = seeded(Chosen)
        plain.chosen = chosen
        loss_of(plain(batch(0, 0))).backward()
        expected = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
        assert_same(full_gradients(model), expected, bitwise=False)
        model.zero_grad()


class Quantized(nn.Module):
    """A frozen weight of integers, and a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.arange(4 * WIDTH).view(4, WIDTH) + 997
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.full((4,), 0.001))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.codes.dtype, self.scale.dtype]
        return x @ (self.codes.to(x.dtype) * self.scale[:, None]).T


@pytest.mark.spec("FS2-MP-02", "MP-17")
@ranks(2)
def test_integer_parameters_are_not_cast_to_the_param_dtype() -> None:
    model = fully_shard(seeded(Quantized), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for _ in range(2):
        loss_of(model(batch())).backward()
        assert model.seen == [torch.int64, torch.bfloat16]
    model.unshard()
    assert torch.equal(model.codes, seeded(Quantized).codes), "997 is no value of bfloat16"
    model.reshard()
    assert model.scale.grad.dtype is torch.float32
    assert model.codes.grad is None


class OnlyMesh(Int8Shards):
    """The extension as earlier versions of torch call it: with the mesh alone."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        assert mesh.ndim == 1
        whole = torch.Size((mesh.size() * self.shape[0], *self.shape[1:]))
        return super().fsdp_pre_all_gather(mesh, whole, self.stride(), nn.Identity(), None)


@pytest.mark.spec("FS2-EXT-02")
@ranks(2)
def test_an_extension_may_take_the_mesh_as_its_only_argument() -> None:
    models = [seeded(lambda: nn.Linear(WIDTH, 4, bias=False)) for _ in range(2)]
    layers: list[Any] = [
        fully_shard(extended(model, kind)) for model, kind in zip(models, (OnlyMesh, Int8Shards), strict=True)
    ]
    for step in range(2):
        outputs = [layer(batch(step)) for layer in layers]
        assert torch.equal(*outputs)
        for output in outputs:
            loss_of(output).backward()
    assert torch.equal(*[full_gradients(layer)["weight"] for layer in layers])


class Halves(nn.Module):
    """Two layers that form one unit. A forward calls only the first one, and may read the weight of the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.left_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reads = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.called(x)
        return y @ self.left_out.weight if self.reads else y


@pytest.mark.spec("NEW-04")
@pytest.mark.parametrize("reads", [False, True])
@ranks(2)
def test_a_group_of_which_only_one_module_is_called_is_resharded(reads: bool) -> None:
    model: Any = seeded(Halves)
    fully_shard([model.called, model.left_out])
    fully_shard(model)
    model.reads = reads
    for step in range(2):
        with torch.no_grad():
            model(batch(step))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        output = model(batch(step))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "also before backward"
        loss_of(output).backward()
        plain: Any = seeded(Halves)
        plain.reads = reads
        assert_same(full_gradients(model), mean_gradients(plain, (step,)))
        model.zero_grad()
