"""Gradients at the edges of float16 and bfloat16: norms above the largest number, and values below the smallest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_tests.harness import device, ranks
from spec_tests.models import apis
from spec_tests.models.modules import Scale
from spec_tests.oracles.tolerance import tolerance
from spec_tests.subject import ShardedGradScaler


def with_gradients(api: Any, value: float, precision: dict[str, Any]) -> Any:
    """A model whose 16 gradients all are ``value``."""
    model = api.shard(Scale(16).to(device()), precision=precision)
    model(torch.full((16,), value, device=device())).sum().backward()
    return model


# A norm above the largest float16, and squares below the smallest.
@pytest.mark.spec("CLIP-02", "CLIP-03", "MP-12")
@pytest.mark.parametrize("value", [30_000.0, 2.0**-14])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@apis.wrapper_apis
@ranks(2)
def test_gradients_that_are_kept_in_low_precision_have_their_norm_and_are_clipped(
    api: Any, dtype: torch.dtype, value: float
) -> None:
    model = with_gradients(api, value, {"param_dtype": dtype, "keep_low_precision_grads": True})
    norm = 4 * torch.tensor(value).to(dtype).item()
    returned = model.clip_grad_norm_(norm / 2).item()
    # The result has the dtype of the gradients.
    assert returned == torch.tensor(norm).to(dtype)
    clipped = api.gradients(model)["weight"]
    assert clipped.dtype is dtype
    # As in torch, 1e-6 is added to the norm. The factor and the product are rounded.
    expected = torch.full_like(clipped, norm / 4 * norm / 2 / (norm + 1e-6), dtype=torch.float64)
    # The smallest float16 is 2**-24, so half of it is lost by rounding.
    torch.testing.assert_close(clipped.double(), expected, rtol=tolerance(dtype, 3), atol=2.0**-25)


@pytest.mark.spec("MP-05", "FS2-MP-03")
@pytest.mark.parametrize("value", [40_000.0, 65_504.0, 2.0**-23])
@apis.both_apis
@ranks(2)
def test_a_mean_in_float16_does_not_leave_its_range_in_between(api: Any, value: float) -> None:
    """The sum of both ranks' gradients is above the largest float16; half of the smallest one is 2**-24."""
    model = with_gradients(api, value, {"param_dtype": torch.float16, "reduce_dtype": torch.float16})
    gradient = api.gradients(model)["weight"]
    assert gradient.dtype is torch.float32
    assert gradient.tolist() == [value] * 16


@pytest.mark.spec("MP-29")
@apis.wrapper_apis
@ranks(2)
def test_a_scaler_keeps_gradients_that_float16_rounds_to_zero(api: Any) -> None:
    model = api.shard(Scale(16).to(device()), precision={"param_dtype": torch.float16})
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
