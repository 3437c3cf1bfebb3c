"""Gradients at the edges of float16 and bfloat16: norms above the largest number, and values below the smallest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.models.apis import Api, both_apis, wrapper_apis
from spec_tests.oracles.tolerance import tolerance
from spec_tests.subject import ShardedGradScaler

LOW = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


class Sums(nn.Module):
    """Sums its inputs times a weight, so each gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def with_gradients(api: Api, value: float, precision: dict[str, Any]) -> Any:
    """A model whose 16 gradients all are ``value``."""
    model = api.shard(Sums().to(device()), precision=precision)
    model(torch.full((16,), value, device=device())).backward(
        torch.ones(16, device=device(), dtype=precision["param_dtype"])
    )
    return model


@pytest.mark.spec("CLIP-02", "CLIP-03", "MP-12")
@LOW
@wrapper_apis
@ranks(2)
def test_gradients_with_a_norm_above_the_largest_float16_are_clipped_and_not_lost(api: Api, dtype: torch.dtype) -> None:
    model = with_gradients(api, 30_000.0, {"param_dtype": dtype, "keep_low_precision_grads": True})
    # The norm is 4 * 30,000. The factor and the product are rounded.
    model.clip_grad_norm_(1200.0)
    clipped = api.gradients(model)["weight"]
    assert clipped.dtype is dtype
    torch.testing.assert_close(
        clipped.float(), torch.full_like(clipped, 300.0, dtype=torch.float32), rtol=tolerance(dtype, 3), atol=0.0
    )


@pytest.mark.spec("CLIP-02", "CLIP-03", "MP-12")
@LOW
@wrapper_apis
@ranks(2)
def test_gradients_whose_squares_are_zero_in_float16_have_their_norm(api: Api, dtype: torch.dtype) -> None:
    small = 2.0**-14
    model = with_gradients(api, small, {"param_dtype": dtype, "keep_low_precision_grads": True})
    assert model.clip_grad_norm_(1.0) == 4 * small
    assert api.gradients(model)["weight"].tolist() == [small] * 16, "below the limit"
    model.clip_grad_norm_(2 * small)
    clipped = api.gradients(model)["weight"].double()
    # As in torch, 1e-6 is added to the norm.
    factor = 2 * small / (4 * small + 1e-6)
    # The smallest float16 is 2**-24, so half of it is lost by rounding.
    torch.testing.assert_close(
        clipped, torch.full_like(clipped, factor * small), rtol=tolerance(dtype, 3), atol=2.0**-25
    )


@pytest.mark.spec("MP-05", "FS2-MP-03")
@pytest.mark.parametrize("value", [40_000.0, 65_504.0, 2.0**-23])
@both_apis
@ranks(2)
def test_a_mean_in_float16_does_not_leave_its_range_in_between(api: Api, value: float) -> None:
    """The sum of both ranks' gradients is above the largest float16; half of the smallest one is 2**-24."""
    model = with_gradients(api, value, {"param_dtype": torch.float16, "reduce_dtype": torch.float16})
    gradient = api.gradients(model)["weight"]
    assert gradient.dtype is torch.float32
    assert gradient.tolist() == [value] * 16


@pytest.mark.spec("MP-29")
@wrapper_apis
@ranks(2)
def test_a_scaler_keeps_gradients_that_float16_rounds_to_zero(api: Api) -> None:
    model = api.shard(Sums().to(device()), precision={"param_dtype": torch.float16})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = ShardedGradScaler(device().type, init_scale=2.0**16)

    def loss() -> Tensor:
        # The smallest float16 is 2**-24.
        return (model(torch.ones(16, device=device())).float() * 2.0**-28).sum()

    loss().backward()
    assert api.gradients(model)["weight"].tolist() == [0.0] * 16
    optimizer.zero_grad()
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    assert api.gradients(model)["weight"].tolist() == [2.0**-28] * 16
