"""No part of a gradient is lost: several dtypes in a unit, complex parameters, and a model converted to another dtype.

The reference model is a plain model on each rank, whose gradients are averaged over the ranks in float64.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.models import apis
from spec_tests.models.running import batch
from spec_tests.models.sharding import FULL_SHARD, HYBRID_SHARD, NO_SHARD
from spec_tests.oracles.tolerance import tolerance

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
C64, C128 = torch.complex64, torch.complex128
SETTINGS = [
    (apis.WRAPPED, FULL_SHARD),
    (apis.WRAPPED, NO_SHARD),
    (apis.ORIGINALS, FULL_SHARD),
    (apis.ORIGINALS, NO_SHARD),
    (apis.FULLY_SHARD, FULL_SHARD),
]


class Several(nn.Module):
    """One vector of each dtype."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.vectors = nn.ParameterList()
        for number, dtype in enumerate(dtypes):
            values = torch.linspace(0.1 * (number + 1), 1 + number, 7, dtype=F64)
            self.vectors.append((values * (1 + 0.5j) if dtype.is_complex else values).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        results = []
        for vector in self.vectors:
            scaled = vector * x.to(vector.dtype)
            results.append(((scaled.abs() ** 2) + scaled.imag if scaled.is_complex() else scaled**2).sum().to(F64))
        return torch.stack(results).sum()


def inputs() -> Tensor:
    return torch.linspace(0.123, 1.77, 7, dtype=F64, device=device()) * (dist.get_rank() + 1)


def assert_gradients_of(api: Any, model: Any, plain: nn.Module) -> None:
    """The gradients of the model are the averages of those of the plain models, and have the parameters' dtypes."""
    found = api.gradients(model)
    assert found.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        expected = parameter.grad.to(C128 if parameter.is_complex() else F64)
        dist.all_reduce(torch.view_as_real(expected) if expected.is_complex() else expected)
        expected /= dist.get_world_size()
        assert found[name].dtype is parameter.dtype
        limit = tolerance(parameter.dtype, 3) * float(expected.abs().max())
        torch.testing.assert_close(found[name].to(expected.dtype), expected, rtol=0.0, atol=limit)


# --- several dtypes in one unit ---

SEVERAL = [(F32, C64), (F32, BF16), (F16, BF16), (F64, F32), (C64, F64), (C64, BF16, F32)]


@pytest.mark.spec("GRAD-02")
@pytest.mark.parametrize("dtypes", SEVERAL)
@pytest.mark.parametrize("micro_batches", [1, 2])
@ranks(2)
def test_a_unit_of_several_dtypes_reduces_each_gradient_without_loss(
    dtypes: tuple[torch.dtype, ...], micro_batches: int
) -> None:
    plain = Several(*dtypes).to(device())
    model = apis.FULLY_SHARD.shard(copy.deepcopy(plain))
    for number in range(micro_batches):
        model.set_requires_gradient_sync(number == micro_batches - 1)
        model(inputs()).backward()
        plain(inputs()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_gradients_of(apis.FULLY_SHARD, model, plain)
    assert all(p.grad.to_local().is_contiguous() for p in model.parameters())


@pytest.mark.spec("GRAD-02")
@ranks(2)
def test_parameter_trained_later_is_not_rounded() -> None:
    plain = Several(BF16, F32).to(device())
    model = apis.FULLY_SHARD.shard(copy.deepcopy(plain))
    model.vectors[1].requires_grad_(False)
    model(inputs()).backward()
    model.vectors[1].requires_grad_(True)
    model.zero_grad()
    model(inputs()).backward()
    plain(inputs()).backward()
    assert_gradients_of(apis.FULLY_SHARD, model, plain)


@pytest.mark.spec("GRAD-02")
@pytest.mark.parametrize("offload", [False, True])
@ranks(4)
def test_several_dtypes_train_with_replicas_and_offload(offload: bool) -> None:
    plain = Several(BF16, F32, C64).to(device())
    model = apis.FULLY_SHARD.shard(copy.deepcopy(plain), strategy=HYBRID_SHARD, offload=offload)
    for number in range(2):
        model.set_requires_all_reduce(number == 1)
        model(inputs()).backward()
        plain(inputs()).backward()
    assert_gradients_of(apis.FULLY_SHARD, model, plain)


# --- complex parameters under mixed precision ---


@pytest.mark.spec("GRAD-02")
@pytest.mark.parametrize("dtypes", [(BF16, None), (BF16, F32), (None, BF16), (F16, F16)])
@pytest.mark.parametrize("micro_batches", [1, 2])
@apis.settings_of(*SETTINGS)
@ranks(2)
def test_imaginary_parts_are_kept_under_mixed_precision(
    api: Any, strategy: Any, dtypes: tuple[torch.dtype | None, ...], micro_batches: int
) -> None:
    casts = "cast_forward_inputs" if api == apis.FULLY_SHARD else "cast_root_forward_inputs"
    precision = {"param_dtype": dtypes[0], "reduce_dtype": dtypes[1], casts: False}
    # All parameters of a flat parameter have the same dtype.
    plain = Several(C64, C128 if api == apis.FULLY_SHARD else C64).to(device())
    model = api.shard(copy.deepcopy(plain), strategy=strategy, precision=precision)
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

# How the model is converted, and the dtypes before and after.
CONVERTED = [
    *((*setting, "to", *dtypes) for setting in SETTINGS for dtypes in ((BF16, F32), (F32, F16))),
    *((apis.FULLY_SHARD, FULL_SHARD, "load_state_dict", before, F32) for before in (BF16,)),
]


@pytest.mark.spec("GRAD-04")
@pytest.mark.parametrize(("api", "strategy", "how", "before", "after"), CONVERTED)
@pytest.mark.parametrize("waits", [False, True])
@ranks(2)
def test_gradients_are_reduced_in_the_dtype_of_a_converted_model(
    api: Any, strategy: Any, how: str, before: torch.dtype, after: torch.dtype, waits: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(device(), before)
    model = api.shard(copy.deepcopy(plain), unit_classes=(nn.Linear,), strategy=strategy)
    if api == apis.FULLY_SHARD:
        model.set_gradient_divide_factor(2.0)
    # The gradients of the first backward wait for their reduction, or are dropped.
    with api.no_sync(model) if waits else torch.enable_grad():
        model(batch().to(before)).square().mean().backward()
    plain(batch().to(before)).square().mean().backward()
    if not waits:
        model.zero_grad()
        plain.zero_grad()
    if how == "to":
        model.to(after)
    else:
        model.load_state_dict({name: value.to(after) for name, value in model.state_dict().items()}, assign=True)
    plain.to(after)
    for each in (model, plain):
        each(batch(1).to(after)).square().mean().backward()
    assert_gradients_of(api, model, plain)
