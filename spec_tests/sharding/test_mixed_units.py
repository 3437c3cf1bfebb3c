"""Units whose parameters differ: in their dtype, or in the mesh that shards them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from spec_tests.harness import ranks
from spec_tests.models import apis, modules, running, sharding
from spec_tests.models.gradients import assert_mean_gradients
from spec_tests.models.torch_names import ShardPlacementResult
from spec_tests.models.values import assert_same
from spec_tests.subject import MixedPrecisionPolicy, fully_shard, trace


class Adapted(nn.Module):
    """A frozen layer in one dtype, and a trained adapter in another dtype, in one unit."""

    def __init__(self, frozen: torch.dtype, trained: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6, dtype=frozen).requires_grad_(False)
        self.adapter = nn.Linear(6, 6, dtype=trained)

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
    plain, model = (modules.seeded(lambda: Adapted(frozen, trained)) for _ in range(2))
    fully_shard(model)
    with trace.record() as recorder:
        assert_mean_gradients(model, plain, bitwise=trained is torch.float32)
    assert [event.dtype for event in recorder.events if event.kind == "RS"] == [trained] * 2


class Quantized(nn.Module):
    """A frozen weight of integers, and a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.arange(4 * 6).view(4, 6) + 997
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.full((4,), 0.001))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [self.codes.dtype, self.scale.dtype]
        return x @ (self.codes.to(x.dtype) * self.scale[:, None]).T


@pytest.mark.spec("FS2-MP-02", "MP-17")
@ranks(2)
def test_integer_parameters_are_not_cast_to_the_param_dtype() -> None:
    model = fully_shard(modules.seeded(Quantized), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for _ in range(2):
        running.iterate(model)
        assert model.seen == [torch.int64, torch.bfloat16]
    model.unshard()
    assert torch.equal(model.codes, modules.seeded(Quantized).codes), "997 is not a bfloat16 value"
    model.reshard()
    assert model.scale.grad.dtype is torch.float32
    assert model.codes.grad is None


class Experts(nn.Module):
    """Two equal layers in one unit. A step uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[self.chosen](x)


@pytest.mark.spec("NEW-08")
@pytest.mark.parametrize("experts_are_units", [False, True])
@ranks(4)
def test_partial_sums_of_two_experts_are_not_added_up(experts_are_units: bool) -> None:
    """The last backward does not use the first expert, whose partial sum is all-reduced as well."""
    model: Any = modules.seeded(Experts)
    plain: Any = modules.seeded(Experts)
    for module in (*model.experts, model) if experts_are_units else (model,):
        fully_shard(module, mesh=sharding.grid_mesh())
    for step, chosen in enumerate([0, 1, 1]):
        model.chosen = plain.chosen = chosen
        model.set_requires_all_reduce(step == 2)
        with running.Wire() as wire:
            running.iterate(model, step)
        assert bool(wire.calls("AR")) is (step == 2)
        for rank in range(4):
            (running.loss_of(plain(running.batch(step, rank))) / 4).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def on_half_the_ranks(experts: set[nn.Parameter]) -> Callable[[nn.Parameter], Any]:
    """A placement function that shards the experts over fewer ranks."""
    info = FSDPMeshInfo(sharding.grid_mesh()["shard"], 0)
    return lambda parameter: ShardPlacementResult(None, info) if parameter in experts else None


@pytest.mark.spec("GRAD-04", "NEW-23")
@ranks(4)
def test_experts_of_a_converted_model_are_reduced_in_the_new_dtype() -> None:
    model: Any = modules.wide().bfloat16()
    place = on_half_the_ranks({block.down.weight for block in model.blocks})
    for module in (*model.blocks, model):
        fully_shard(module, mesh=sharding.line_mesh(), shard_placement_fn=place)
    x = running.batch(width=model.enter.in_features)
    model(x.bfloat16())
    model.float()
    with trace.record() as recorder:
        model(x).square().mean().backward()
    assert {event.dtype for event in recorder.events if event.kind in ("RS", "AR")} == {torch.float32}


@pytest.mark.spec("NEW-23")
@ranks(4)
def test_a_mesh_without_gradients_in_a_backward_is_not_reduced() -> None:
    plain, model = modules.seeded(Experts), modules.seeded(Experts)
    fully_shard(
        model, mesh=sharding.line_mesh(), shard_placement_fn=on_half_the_ranks(set(model.experts[1].parameters()))
    )
    for chosen in (0, 1, 0):
        for net in (plain, model):
            net.zero_grad()
            net.chosen = chosen
            # All ranks have the same batch, so the gradient is the same mean on both meshes.
            net(running.batch(0, 0)).square().mean().backward()
        expected = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
        assert_same(apis.FULLY_SHARD.gradients(model), expected, bitwise=False)
