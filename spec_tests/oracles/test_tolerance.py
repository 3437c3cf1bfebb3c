"""The tolerance accepts every order of a sum, and refuses the first value outside."""

from __future__ import annotations

import pytest
import torch

from spec_tests.oracles.tolerance import tolerance

pytestmark = pytest.mark.pure
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)


@DTYPES
@pytest.mark.parametrize("num_terms", [2, 8, 30])
def test_two_orders_of_a_sum_agree(dtype: torch.dtype, num_terms: int) -> None:
    values = torch.rand(num_terms, generator=torch.Generator().manual_seed(num_terms)).to(dtype)
    first, second = (sum(order, torch.zeros((), dtype=dtype)) for order in (values, values.flip(0)))
    torch.testing.assert_close(first, second, rtol=tolerance(dtype, num_terms), atol=0.0)


@DTYPES
@pytest.mark.parametrize("num_terms", [1, 8, 84])
def test_a_value_just_outside_is_refused(dtype: torch.dtype, num_terms: int) -> None:
    one, step = torch.ones((), dtype=dtype), torch.finfo(dtype).eps
    inside, outside = one + num_terms * step, one + (num_terms + 1) * step
    torch.testing.assert_close(inside, one, rtol=tolerance(dtype, num_terms), atol=0.0)
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(outside, one, rtol=tolerance(dtype, num_terms), atol=0.0)


@DTYPES
def test_a_lost_term_of_eight_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(
            torch.full((), 7.0, dtype=dtype), torch.full((), 8.0, dtype=dtype), rtol=tolerance(dtype, 8), atol=0.0
        )
