"""Clipping with a maximum or a kind of norm that is not a number."""

from __future__ import annotations

import math

import pytest

from spec_tests.harness import ranks
from spec_tests.models import apis
from spec_tests.models.running import iterate
from spec_tests.models.values import assert_same, flat_gradients


@pytest.mark.spec("CLIP-01", "FUZZ-02")
@pytest.mark.parametrize("given", [{"max_norm": math.nan}, {"max_norm": 1.0, "norm_type": math.nan}], ids=str)
@ranks(2)
def test_clipping_to_nan_is_refused_and_changes_no_gradient(given: dict[str, float]) -> None:
    model = apis.WRAPPED.shard()
    iterate(model)
    before = {unit: gradient.clone() for unit, gradient in flat_gradients(model).items()}
    with pytest.raises(TypeError, match=r"rank \d: .*norm.*number"):
        model.clip_grad_norm_(**given)
    assert_same(flat_gradients(model), before, bitwise=True)
