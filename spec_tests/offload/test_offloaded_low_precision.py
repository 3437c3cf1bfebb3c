"""Gradients in low precision whose parameters are on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spec_tests.harness import ranks
from spec_tests.models import apis
from spec_tests.models.running import iterate
from spec_tests.subject import ShardingStrategy


@pytest.mark.spec("MP-12", "OFF-03")
@apis.wrapper_settings
@ranks(2)
def test_offloaded_gradients_keep_the_dtype_of_the_reduction_on_request(api: Any, strategy: ShardingStrategy) -> None:
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16, "keep_low_precision_grads": True}
    model = api.shard(strategy=strategy, precision=precision, offload=True)
    for step in range(2):
        iterate(model, step)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert {(gradient.dtype, gradient.device.type) for gradient in gradients} == {(torch.bfloat16, "cpu")}
