"""Units whose parameters differ: in their dtype, or in the mesh that shards them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from spec_tests.harness import ranks
from spec_tests.models.gradients import assert_mean_gradients
from spec_tests.models.modules import WIDTH, seeded, wide
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import grid_mesh, line_mesh
from spec_tests.models.torch_names import ShardPlacementResult
from spec_tests.models.values import assert_same, full_gradients
from spec_tests.subject import MixedPrecisionPolicy, fully_shard, trace


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
    model, plain = fully_shard(seeded(lambda: Adapted(frozen, trained))), seeded(lambda: Adapted(frozen, trained))
    with trace.record() as recorder:
        assert_mean_gradients(model, plain, bitwise=trained is torch.float32)
    assert [event.dtype for event in recorder.events if event.kind == "RS"] == [trained] * 2


class Quantized(nn.Module):
    """A frozen weight of integers, and a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.arange(4 * WIDTH).view(4, WIDTH) + 997
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.full((4,), 0.001))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.codes.dtype, self.scale.dtype]
        return x @ (self.codes.to(x.dtype) * self.scale[:, None]).T


@pytest.mark.spec("FS2-MP-02", "MP-17")
@ranks(2)
def test_integer_parameters_are_not_cast_to_the_param_dtype() -> None:
    model = fully_shard(seeded(Quantized), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for _ in range(2):
        iterate(model)
        assert model.seen == [torch.int64, torch.bfloat16]
    model.unshard()
    assert torch.equal(model.codes, seeded(Quantized).codes), "997 is not a bfloat16 value"
    model.reshard()
    assert model.scale.grad.dtype is torch.float32
    assert model.codes.grad is None


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
    assert full_gradients(model) == {}, "no expert gets a gradient of another expert"


def on_half_the_ranks(experts: set[nn.Parameter]) -> Callable[[nn.Parameter], Any]:
    """A placement function that shards the experts over fewer ranks."""
    info = FSDPMeshInfo(grid_mesh()["shard"], 0)
    return lambda parameter: ShardPlacementResult(None, info) if parameter in experts else None


@pytest.mark.spec("GRAD-04", "NEW-23")
@ranks(4)
def test_experts_of_a_converted_model_are_reduced_in_the_new_dtype() -> None:
    model: Any = wide().bfloat16()
    place = on_half_the_ranks({block.down.weight for block in model.blocks})
    for module in (*model.blocks, model):
        fully_shard(module, mesh=line_mesh(), shard_placement_fn=place)
    x = batch(width=model.enter.in_features)
    model(x.bfloat16())
    model.float()
    with trace.record() as recorder:
        loss_of(model(x)).backward()
    assert {event.dtype for event in recorder.events if event.kind in ("RS", "AR")} == {torch.float32}


@pytest.mark.spec("NEW-23")
@ranks(4)
def test_a_mesh_without_gradients_in_a_backward_is_not_reduced() -> None:
    plain, model = seeded(Experts), seeded(Experts)
    fully_shard(model, mesh=line_mesh(), shard_placement_fn=on_half_the_ranks(set(model.experts[1].parameters())))
    for chosen in (0, 1, 0):
        for net in (plain, model):
            net.zero_grad()
            net.chosen = chosen
            # All ranks have the same batch, so the gradient is the same mean on both meshes.
            loss_of(net(batch(0, 0))).backward()
        expected = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
        assert_same(full_gradients(model), expected, bitwise=False)
