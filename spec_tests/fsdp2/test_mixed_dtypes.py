"""No part of a gradient is lost: several dtypes in a unit, complex parameters, and a model converted to another dtype.

The reference model is a plain model on each rank, whose gradients are averaged over the ranks in float64.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spec_tests.harness import device, ranks
from spec_tests.models.sharding import grid_mesh
from spec_tests.subject import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from spec_tests.subject import fully_shard as mini_fully_shard

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
C64, C128 = torch.complex64, torch.complex128
TOLERANCE = {F16: 2e-3, BF16: 2e-2, F32: 1e-5, F64: 1e-12, C64: 1e-5, C128: 1e-12}


class Several(nn.Module):
    """One vector of each dtype."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        factors = [torch.linspace(0.1 * (n + 1), 1 + n, 7, dtype=F64) for n in range(len(dtypes))]
        self.vectors = nn.ParameterList(
            nn.Parameter((f * (1 + 0.5j)).to(dtype) if dtype.is_complex else f.to(dtype))
            for f, dtype in zip(factors, dtypes, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        results = []
        for vector in self.vectors:
            scaled = vector * x.to(vector.dtype)
            results.append(((scaled.abs() ** 2) + scaled.imag if scaled.is_complex() else scaled**2).sum().to(F64))
        return torch.stack(results).sum()


def inputs() -> Tensor:
    return torch.linspace(0.123, 1.77, 7, dtype=F64, device=device()) * (dist.get_rank() + 1)


def average(gradient: Tensor) -> Tensor:
    wide = torch.view_as_real(gradient.to(C128)) if gradient.is_complex() else gradient.to(F64)
    wide = wide.contiguous().clone()
    dist.all_reduce(wide)
    return wide / dist.get_world_size()


def whole(gradient: Tensor) -> Tensor:
    # A process group for GPUs only cannot all-gather a gradient on the CPU.
    found = gradient.to(device())
    found = found.full_tensor() if isinstance(found, DTensor) else found
    return torch.view_as_real(found.to(C128)) if found.is_complex() else found.to(F64)


def assert_gradients_of(model: nn.Module, plain: nn.Module, tolerances: list[float]) -> None:
    each = zip(model.parameters(), plain.parameters(), tolerances, strict=True)
    for number, (mine, theirs, tolerance) in enumerate(each):
        assert mine.grad is not None, number
        assert mine.grad.dtype is mine.dtype
        expected = average(theirs.grad)
        assert (whole(mine.grad) - expected).abs().max() <= tolerance * expected.abs().max(), number


PAIRS = [(F32, C64), (BF16, F32), (F16, F32), (F16, BF16), (F32, F64), (F32, C128), (C64, F64), (C64, BF16, F32)]


@pytest.mark.spec("GRAD-02")
@pytest.mark.parametrize("dtypes", PAIRS)
@pytest.mark.parametrize("flips", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
@ranks(2)
def test_a_unit_of_several_dtypes_reduces_each_gradient_without_loss(
    dtypes: tuple[torch.dtype, ...], flips: bool, micro_batches: int
) -> None:
    dtypes = dtypes[::-1] if flips else dtypes
    model = Several(*dtypes).to(device())
    plain = copy.deepcopy(model)
    mini_fully_shard(model)
    for number in range(micro_batches):
        model.set_requires_gradient_sync(number == micro_batches - 1)
        model(inputs()).backward()
        plain(inputs()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_gradients_of(model, plain, [TOLERANCE[dtype] for dtype in dtypes])
    assert all(p.grad.to_local().is_contiguous() for p in model.parameters())


@pytest.mark.spec("GRAD-02")
@ranks(2)
def test_parameter_trained_later_is_not_rounded() -> None:
    model = Several(BF16, F32).to(device())
    plain = copy.deepcopy(model)
    mini_fully_shard(model)
    model.vectors[1].requires_grad_(False)
    model(inputs()).backward()
    model.vectors[1].requires_grad_(True)
    model.zero_grad()
    model(inputs()).backward()
    plain(inputs()).backward()
    assert_gradients_of(model, plain, [TOLERANCE[BF16], TOLERANCE[F32]])


@pytest.mark.spec("GRAD-02")
@pytest.mark.parametrize("offload", [False, True])
@ranks(4)
def test_several_dtypes_train_with_replicas_and_offload(offload: bool) -> None:
    model = Several(BF16, F32, C64).to(device())
    plain = copy.deepcopy(model)
    policy: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    mini_fully_shard(model, mesh=grid_mesh(), **policy)
    for number in range(2):
        model.set_requires_all_reduce(number == 1)
        model(inputs()).backward()
        plain(inputs()).backward()
    assert_gradients_of(model, plain, [TOLERANCE[BF16], TOLERANCE[F32], TOLERANCE[C64]])


# --- complex parameters under mixed precision ---


@pytest.mark.spec("GRAD-02")
@pytest.mark.parametrize("policy", [(BF16, None), (BF16, F32), (None, BF16), (F16, F16)])
@pytest.mark.parametrize("micro_batches", [1, 2])
@ranks(2)
def test_fully_shard_keeps_imaginary_parts_under_mixed_precision(policy: Any, micro_batches: int) -> None:
    model = Several(C64, C128).to(device())
    plain = copy.deepcopy(model)
    mini_fully_shard(model, mp_policy=MixedPrecisionPolicy(*policy, cast_forward_inputs=False))
    for number in range(micro_batches):
        model.set_requires_gradient_sync(number == micro_batches - 1)
        model(inputs()).backward()
        plain(inputs()).backward()
    assert_gradients_of(model, plain, [TOLERANCE[C64], TOLERANCE[C128]])


@pytest.mark.spec("GRAD-02")
@pytest.mark.parametrize("policy", [(BF16, None), (BF16, F32), (None, BF16), (F16, F16)])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_the_wrapper_keeps_imaginary_parts_under_mixed_precision(
    policy: Any, strategy: str, use_orig_params: bool
) -> None:
    module = Several(C64, C64).to(device())
    plain = copy.deepcopy(module)
    model = FullyShardedDataParallel(
        module,
        mixed_precision=MixedPrecision(*policy, cast_root_forward_inputs=False),
        sharding_strategy=getattr(ShardingStrategy, strategy),
        use_orig_params=use_orig_params,
        device_id=device(),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*discards the imaginary part.*")
        model(inputs()).backward()
    plain(inputs()).backward()
    local = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    mine = torch.cat(local) if local else torch.zeros(0, dtype=C64, device=device())
    sizes: list[Any] = [None] * 2
    dist.all_gather_object(sizes, mine.cpu())
    found = sizes[0] if strategy == "NO_SHARD" else torch.cat(sizes)
    expected = torch.cat([average(p.grad) for p in plain.parameters()]).cpu()
    assert mine.dtype is C64
    assert (torch.view_as_real(found)[:14] - expected).abs().max() <= 1e-5 * expected.abs().max()


# --- conversion ---


def with_float(model: nn.Module) -> None:
    model.float()


def by_loading(model: nn.Module) -> None:
    model.load_state_dict({name: value.float() for name, value in model.state_dict().items()}, assign=True)


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(device())


def rows(step: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(device())


@pytest.mark.spec("GRAD-04")
@pytest.mark.parametrize("convert", [with_float, by_loading])
@pytest.mark.parametrize("before", [BF16, F16])
@pytest.mark.parametrize("waits", [False, True])
@ranks(2)
def test_fully_shard_reduces_in_the_dtype_of_a_converted_model(
    convert: Callable[[nn.Module], None], before: torch.dtype, waits: bool
) -> None:
    model = two_layers().to(before)
    plain = copy.deepcopy(model)
    for part in (model[0], model[2], model):
        mini_fully_shard(part)
    model.set_gradient_divide_factor(2.0)
    if waits:
        model.set_requires_gradient_sync(False)
    model(rows().to(before)).square().mean().backward()
    plain(rows().to(before)).square().mean().backward()
    if not waits:
        model.zero_grad()
        plain.zero_grad()
    convert(model)
    plain.float()
    model.set_requires_gradient_sync(True)
    model(rows(1)).square().mean().backward()
    plain(rows(1)).square().mean().backward()
    # The reference model also sums over micro-batches in float32.
    assert_gradients_of(model, plain, [1e-5] * 4)


@pytest.mark.spec("GRAD-04")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(("before", "after"), [(BF16, F32), (F16, F32), (F32, F16)])
@pytest.mark.parametrize("waits", [False, True])
@ranks(2)
def test_the_wrapper_reduces_in_the_dtype_of_a_converted_model(
    strategy: str, use_orig_params: bool, before: torch.dtype, after: torch.dtype, waits: bool
) -> None:
    module = two_layers().to(before)
    plain = copy.deepcopy(module)
    model = FullyShardedDataParallel(
        module,
        sharding_strategy=getattr(ShardingStrategy, strategy),
        use_orig_params=use_orig_params,
        device_id=device(),
    )
    with model.no_sync() if waits else torch.enable_grad():
        model(rows().to(before)).square().mean().backward()
    plain(rows().to(before)).square().mean().backward()
    if not waits:
        model.zero_grad()
        plain.zero_grad()
    model.to(after)
    plain.to(after)
    model(rows(1).to(after)).square().mean().backward()
    plain(rows(1).to(after)).square().mean().backward()
    local = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    mine = torch.cat(local) if local else torch.zeros(0, dtype=after, device=device())
    of_ranks: list[Any] = [None] * 2
    dist.all_gather_object(of_ranks, mine.cpu())
    found = of_ranks[0] if strategy == "NO_SHARD" else torch.cat(of_ranks)
    expected = torch.cat([average(p.grad).flatten() for p in plain.parameters()]).cpu()
    assert mine.dtype is after
    assert (found[: len(expected)] - expected).abs().max() <= TOLERANCE[after] * expected.abs().max()


# --- dropping gradients that are not reduced yet ---


def sharded_layers(**options: Any) -> Any:
    model: Any = two_layers()
    for part in (model[0], model[2], model):
        mini_fully_shard(part, **options)
    return model


@pytest.mark.spec("GRAD-03")
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("had_reduced", [False, True])
@ranks(2)
def test_zero_grad_drops_unreduced_gradients_of_several_dtypes(set_to_none: bool, had_reduced: bool) -> None:
    model, plain = sharded_layers(), two_layers()
    if had_reduced:
        model(rows(2)).square().mean().backward()
    model.set_requires_gradient_sync(False)
    model(rows() * 100).square().mean().backward()
    model.zero_grad(set_to_none=set_to_none)
    model.set_requires_gradient_sync(True)
    for each in (model, plain):
        each(rows(1)).square().mean().backward()
    assert_gradients_of(model, plain, [1e-5] * 4)


@pytest.mark.spec("GRAD-03")
@ranks(4)
def test_zero_grad_drops_gradients_kept_until_the_all_reduce() -> None:
    model, plain = sharded_layers(mesh=grid_mesh()), two_layers()
    model.set_requires_all_reduce(False)
    model(rows() * 100).square().mean().backward()
    model.zero_grad()
    model.set_requires_all_reduce(True)
    for each in (model, plain):
        each(rows(1)).square().mean().backward()
    assert_gradients_of(model, plain, [1e-5] * 4)


@pytest.mark.spec("GRAD-03")
@ranks(2)
def test_zero_grad_drops_gradients_kept_until_the_last_backward() -> None:
    model, plain = sharded_layers(), two_layers()
    model.set_is_last_backward(False)
    model(rows() * 100).square().mean().backward()
    model.zero_grad()
    model.set_is_last_backward(True)
    for each in (model, plain):
        each(rows(1)).square().mean().backward()
    assert_gradients_of(model, plain, [1e-5] * 4)
