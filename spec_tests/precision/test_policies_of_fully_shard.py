"""Mixed precision of `fully_shard`: its policy, outputs, and modules of different precision.

``precision/test_precision.py`` tests the dtypes of the parameters, of the computation and of the reduction.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.probes import ones, probes
from spec_tests.subject import MixedPrecisionPolicy, fully_shard

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.spec("FS2-MP-01", "FS2-MP-07", "MIG-09", "MIG-10")
@pytest.mark.pure
def test_the_policy_has_four_fields_and_none_for_buffers() -> None:
    parameters = dict(inspect.signature(MixedPrecisionPolicy).parameters)
    # In torch since 2.15 (NEW-18).
    if (override := parameters.pop("param_dtype_override_fn", None)) is not None:
        assert (override.default, override.kind) == (None, inspect.Parameter.KEYWORD_ONLY)
    assert [(name, parameter.default) for name, parameter in parameters.items()] == [
        ("param_dtype", None),
        ("reduce_dtype", None),
        ("output_dtype", None),
        ("cast_forward_inputs", True),
    ]
    policy = MixedPrecisionPolicy(BF16, FP32)
    assert policy == MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    with pytest.raises(AttributeError, match="cannot assign to field"):
        policy.param_dtype = BF16


@pytest.mark.spec("FS2-MP-02", "FS2-MP-08", "FS2-19")
@ranks(2)
def test_unsharded_params_are_bfloat16_and_shards_float32() -> None:
    root = nn.Sequential(seeded(lambda: nn.Linear(4, 4)))
    model = fully_shard(root, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    expected = seeded(lambda: nn.Linear(4, 4)).weight.bfloat16()
    model.unshard()
    assert list(model.parameters(recurse=False)) == [], "all parameters of the root are in its layer"
    weight, bias = model[0].parameters(recurse=False)
    assert not isinstance(weight, DTensor)
    assert weight.dtype is bias.dtype is BF16
    assert torch.equal(weight, expected)
    model.reshard()
    assert {parameter.dtype for parameter in model.parameters()} == {FP32}


@pytest.mark.spec("FS2-MP-04", "FS2-MP-05", "FS2-MP-06", "FS2-MP-07")
@ranks(2)
def test_each_module_has_the_precision_of_its_own_policy() -> None:
    inner = probes(4)
    first, second, third, _ = inner
    fully_shard(first, mp_policy=MixedPrecisionPolicy(BF16, FP32))
    fully_shard(second, mp_policy=MixedPrecisionPolicy())
    fully_shard(third, mp_policy=MixedPrecisionPolicy(FP16, FP32, output_dtype=FP64))
    model = fully_shard(inner, mp_policy=MixedPrecisionPolicy(BF16, FP32, output_dtype=FP32))
    output = model(ones())
    output.sum().backward()
    # Each module casts its own inputs. The last one belongs to the root, which casts nothing between its layers.
    assert [probe.seen["x"] for probe in inner] == [BF16, BF16, FP16, FP64]
    assert [probe.seen["weight"] for probe in inner] == [BF16, FP32, FP16, BF16]
    assert output.dtype is FP32
    assert {probe.seen["scale"] for probe in inner} == {FP32}, "buffers keep their dtype"
    assert {parameter.grad.dtype for parameter in model.parameters()} == {FP32}


class Nested(nn.Module):
    """Returns its result in containers, together with other values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, index: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"out": y, "pair": (y.sum(), index), "text": "unchanged"}


@pytest.mark.spec("FS2-MP-06")
@ranks(2)
def test_floating_outputs_in_any_container_are_cast() -> None:
    model = fully_shard(seeded(Nested), mp_policy=MixedPrecisionPolicy(BF16, FP32, output_dtype=FP64))
    output = model(ones(), torch.ones(2, dtype=torch.int64, device=device()))
    assert (output["out"].dtype, output["pair"][0].dtype) == (FP64, FP64)
    assert output["pair"][1].dtype == torch.int64
    assert output["text"] == "unchanged"
    output["out"].sum().backward()


@pytest.mark.spec("FS2-MP-03", "MP-08")
@pytest.mark.parametrize("factor", [None, 2.0])
@ranks(2)
def test_a_model_that_becomes_float16_later_divides_before_the_sum_too(factor: float | None) -> None:
    model = fully_shard(nn.Linear(4, 4, bias=False)).half()
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    output = model(ones(1, 4).half())
    # The largest float16 number is 65504, so the sum of two of these overflows.
    output.backward(torch.full_like(output, 40000.0))
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 40000.0, dtype=FP16, device=device()))
