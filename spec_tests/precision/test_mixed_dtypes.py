"""No part of a gradient is lost: several dtypes in a unit, complex parameters, and a model converted to another dtype.

The reference model is a plain model on each rank, whose gradients are averaged over the ranks in float64.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.models.apis import FULLY_SHARD, ORIGINALS, WRAPPED, Api, settings_of
from spec_tests.models.sharding import FULL_SHARD, HYBRID_SHARD, NO_SHARD

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
C64, C128 = torch.complex64, torch.complex128
TOLERANCE = {F16: 2e-3, BF16: 2e-2, F32: 1e-5, F64: 1e-12, C64: 1e-5, C128: 1e-12}

settings = settings_of(
    (WRAPPED, FULL_SHARD),
    (WRAPPED, NO_SHARD),
    (ORIGINALS, FULL_SHARD),
    (ORIGINALS, NO_SHARD),
    (FULLY_SHARD, FULL_SHARD),
)


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


def several(api: Api, *dtypes: torch.dtype, **options: Any) -> tuple[nn.Module, Any]:
    """The plain model, and the same model as one unit."""
    model = Several(*dtypes).to(device())
    return copy.deepcopy(model), api.shard(model, unit_classes=(), **options)


def layers(api: Api, dtype: torch.dtype = F32, **options: Any) -> tuple[nn.Module, Any]:
    """The plain model, and the same model with a unit for each layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(device(), dtype)
    return copy.deepcopy(model), api.shard(model, unit_classes=(nn.Linear,), **options)


def rows(step: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(device())


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


def wide(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.to(C128)).contiguous() if tensor.is_complex() else tensor.to(F64)


def assert_gradients_of(api: Api, model: Any, plain: nn.Module) -> None:
    """The gradients of the model are the averages of those of the plain models, and have the parameters' dtypes."""
    assert all(p.grad.dtype is p.dtype for p in model.parameters() if p.grad is not None)
    found = api.gradients(model)
    assert found.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        expected = wide(parameter.grad).clone()
        dist.all_reduce(expected)
        expected /= dist.get_world_size()
        assert found[name].dtype is parameter.dtype
        difference = (wide(found[name]) - expected).abs().max()
        assert difference <= TOLERANCE[parameter.dtype] * expected.abs().max(), name


# --- several dtypes in one unit ---

PAIRS = [(F32, C64), (BF16, F32), (F16, F32), (F16, BF16), (F32, F64), (F32, C128), (C64, F64), (C64, BF16, F32)]


@pytest.mark.spec("GRAD-02")
@pytest.mark.parametrize("dtypes", PAIRS)
@ranks(2)
def test_a_unit_of_several_dtypes_reduces_each_gradient_without_loss(dtypes: tuple[torch.dtype, ...]) -> None:
    for order, micro_batches in itertools.product((dtypes, dtypes[::-1]), (1, 2)):
        plain, model = several(FULLY_SHARD, *order)
        for number in range(micro_batches):
            model.set_requires_gradient_sync(number == micro_batches - 1)
            model(inputs()).backward()
            plain(inputs()).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_gradients_of(FULLY_SHARD, model, plain)
        assert all(p.grad.to_local().is_contiguous() for p in model.parameters())


@pytest.mark.spec("GRAD-02")
@ranks(2)
def test_parameter_trained_later_is_not_rounded() -> None:
    plain, model = several(FULLY_SHARD, BF16, F32)
    model.vectors[1].requires_grad_(False)
    model(inputs()).backward()
    model.vectors[1].requires_grad_(True)
    model.zero_grad()
    model(inputs()).backward()
    plain(inputs()).backward()
    assert_gradients_of(FULLY_SHARD, model, plain)


@pytest.mark.spec("GRAD-02")
@pytest.mark.parametrize("offload", [False, True])
@ranks(4)
def test_several_dtypes_train_with_replicas_and_offload(offload: bool) -> None:
    plain, model = several(FULLY_SHARD, BF16, F32, C64, strategy=HYBRID_SHARD, offload=offload)
    for number in range(2):
        model.set_requires_all_reduce(number == 1)
        model(inputs()).backward()
        plain(inputs()).backward()
    assert_gradients_of(FULLY_SHARD, model, plain)


# --- complex parameters under mixed precision ---


@pytest.mark.spec("GRAD-02")
@pytest.mark.parametrize("dtypes", [(BF16, None), (BF16, F32), (None, BF16), (F16, F16)])
@settings
@ranks(2)
def test_imaginary_parts_are_kept_under_mixed_precision(
    api: Api, strategy: Any, dtypes: tuple[torch.dtype | None, ...]
) -> None:
    casts = "cast_forward_inputs" if api == FULLY_SHARD else "cast_root_forward_inputs"
    precision = {"param_dtype": dtypes[0], "reduce_dtype": dtypes[1], casts: False}
    # All parameters of a flat parameter have the same dtype.
    second = C128 if api == FULLY_SHARD else C64
    for micro_batches in (1, 2):
        plain, model = several(api, C64, second, strategy=strategy, precision=precision)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*discards the imaginary part.*")
            if micro_batches == 2:
                with api.no_sync(model):
                    model(inputs()).backward()
            model(inputs()).backward()
        for _ in range(micro_batches):
            plain(inputs()).backward()
        assert_gradients_of(api, model, plain)


# --- conversion ---


@pytest.mark.spec("GRAD-04")
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("before", "after"), [(BF16, F32), (F16, F32), (F32, F16)])
@settings
@ranks(2)
def test_gradients_are_reduced_in_the_dtype_of_a_converted_model(
    api: Api, strategy: Any, before: torch.dtype, after: torch.dtype, waits: bool
) -> None:
    compare_converted(api, strategy, before, after, lambda model: model.to(after), waits=waits)


@pytest.mark.spec("GRAD-04")
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("before", [BF16, F16])
@ranks(2)
def test_gradients_are_reduced_in_the_dtype_of_assigned_values(before: torch.dtype, waits: bool) -> None:
    def load(model: nn.Module) -> None:
        model.load_state_dict({name: value.float() for name, value in model.state_dict().items()}, assign=True)

    compare_converted(FULLY_SHARD, FULL_SHARD, before, F32, load, waits=waits)


def compare_converted(
    api: Api, strategy: Any, before: torch.dtype, after: torch.dtype, convert: Callable[[Any], object], *, waits: bool
) -> None:
    """Converts the models after a backward whose gradients wait for their reduction, or are dropped."""
    plain, model = layers(api, before, strategy=strategy)
    if api == FULLY_SHARD:
        model.set_gradient_divide_factor(2.0)
    with api.no_sync(model) if waits else torch.enable_grad():
        backward(model, rows().to(before))
    backward(plain, rows().to(before))
    if not waits:
        model.zero_grad()
        plain.zero_grad()
    convert(model)
    plain.to(after)
    # The plain model also sums over micro-batches in the new dtype.
    for each in (model, plain):
        backward(each, rows(1).to(after))
    assert_gradients_of(api, model, plain)


# --- dropping gradients that are not reduced yet ---


@pytest.mark.spec("GRAD-03")
@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("had_reduced", [False, True])
@ranks(2)
def test_zero_grad_drops_unreduced_gradients(set_to_none: bool, had_reduced: bool) -> None:
    plain, model = layers(FULLY_SHARD)
    if had_reduced:
        backward(model, rows(2))
    with FULLY_SHARD.no_sync(model):
        backward(model, rows() * 100)
        model.zero_grad(set_to_none=set_to_none)
    for each in (model, plain):
        backward(each, rows(1))
    assert_gradients_of(FULLY_SHARD, model, plain)


@pytest.mark.spec("GRAD-03")
@pytest.mark.parametrize("switch", ["set_requires_all_reduce", "set_is_last_backward"])
@ranks(4)
def test_zero_grad_drops_gradients_kept_until_the_all_reduce_or_the_last_backward(switch: str) -> None:
    plain, model = layers(FULLY_SHARD, strategy=HYBRID_SHARD)
    getattr(model, switch)(False)
    backward(model, rows() * 100)
    model.zero_grad()
    getattr(model, switch)(True)
    for each in (model, plain):
        backward(each, rows(1))
    assert_gradients_of(FULLY_SHARD, model, plain)
