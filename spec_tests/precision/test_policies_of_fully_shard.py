"""Mixed precision of `fully_shard`: its policy, outputs, and modules of different precision.

``precision/test_precision.py`` tests the dtypes of the parameters, of the computation and of the reduction.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spec_tests.harness import device, ranks
from spec_tests.models.modules import WIDTH, seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import sharded
from spec_tests.subject import MixedPrecisionPolicy, fully_shard

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def seen_dtypes(model: nn.Module) -> dict[str, tuple[torch.dtype, ...]]:
    """For each linear layer, by name: dtypes of its input, weight and output. Filled when the layer runs."""
    seen: dict[str, tuple[torch.dtype, ...]] = {}

    def lay(name: str, layer: nn.Module) -> None:
        layer.register_forward_hook(
            lambda layer, inputs, output: seen.update({name: (inputs[0].dtype, layer.weight.dtype, output.dtype)})
        )

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            lay(name, module)
    return seen


# --- the policy ---


@pytest.mark.spec("FS2-MP-01", "MIG-09", "MIG-10")
@pytest.mark.pure
def test_the_policy_has_four_fields_with_these_defaults() -> None:
    parameters = dict(inspect.signature(MixedPrecisionPolicy).parameters)
    # In torch since 2.15 (NEW-18).
    if (override := parameters.pop("param_dtype_override_fn", None)) is not None:
        assert (override.default, override.kind) == (None, inspect.Parameter.KEYWORD_ONLY)
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "param_dtype": None,
        "reduce_dtype": None,
        "output_dtype": None,
        "cast_forward_inputs": True,
    }
    assert list(parameters) == ["param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"]
    assert MixedPrecisionPolicy(BF16, FP32) == MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field"):
        MixedPrecisionPolicy().param_dtype = BF16


@pytest.mark.spec("FS2-MP-07", "MIG-09")
@pytest.mark.pure
def test_there_is_no_dtype_for_buffers() -> None:
    with pytest.raises(TypeError, match="buffer_dtype"):
        MixedPrecisionPolicy(buffer_dtype=BF16)


class Shifts(nn.Module):
    """Adds a buffer to the output of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift


@pytest.mark.spec("FS2-MP-07")
@ranks(2)
def test_buffers_keep_their_dtype() -> None:
    model = fully_shard(Shifts().to(device()), mp_policy=MixedPrecisionPolicy(BF16, FP32))
    assert model(torch.ones(3, 4, device=device())).dtype == FP32, "bfloat16 and a float32 buffer add up to float32"
    assert model.shift.dtype == FP32


# --- parameters ---


@pytest.mark.spec("FS2-MP-02", "FS2-19")
@ranks(2)
def test_manually_unsharded_params_are_bfloat16_and_shards_float32() -> None:
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    model.blocks[1].unshard()
    weight = model.blocks[1].linear.weight
    assert weight.dtype == BF16
    assert torch.equal(weight, seeded().blocks[1].linear.weight.bfloat16())
    model.blocks[1].reshard()
    assert {p.dtype for p in model.parameters()} == {FP32}


@pytest.mark.spec("FS2-MP-04")
@ranks(2)
def test_layers_may_have_different_precision() -> None:
    model = seeded()
    seen = seen_dtypes(model)
    for index, block in enumerate(model.blocks):
        fully_shard(block, mp_policy=MixedPrecisionPolicy(BF16, FP32) if index >= 2 else MixedPrecisionPolicy())
    fully_shard(model.leave, mp_policy=MixedPrecisionPolicy(param_dtype=FP32))
    fully_shard(model)
    iterate(model)
    high, low = (FP32,) * 3, (BF16,) * 3
    assert seen["enter"] == seen["blocks.0.linear"] == seen["blocks.1.linear"] == high
    assert seen["blocks.2.linear"] == seen["blocks.3.linear"] == low
    assert seen["leave"] == high
    assert {p.grad.dtype for p in model.parameters()} == {FP32}


# --- inputs and outputs ---


@pytest.mark.spec("FS2-MP-05")
@ranks(2)
def test_each_module_with_a_policy_casts_its_own_inputs() -> None:
    model = seeded()
    seen = seen_dtypes(model)
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(BF16, FP32, FP32))
    fully_shard(model)
    iterate(model)
    assert {seen[f"blocks.{index}.linear"] for index in range(4)} == {(BF16, BF16, BF16)}
    assert seen["enter"] == seen["leave"] == (FP32, FP32, FP32)


class Nested(nn.Module):
    """Returns its result in containers, together with other values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, index: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"out": y, "pair": (y.sum(), index), "text": "unchanged"}


@pytest.mark.spec("FS2-MP-06")
@ranks(2)
def test_floating_outputs_in_any_container_are_cast() -> None:
    model = fully_shard(seeded(Nested), mp_policy=MixedPrecisionPolicy(BF16, FP32, output_dtype=FP64))
    output = model(batch(), torch.ones(2, dtype=torch.int64, device=device()))
    assert (output["out"].dtype, output["pair"][0].dtype) == (FP64, FP64)
    assert output["pair"][1].dtype == torch.int64
    assert output["text"] == "unchanged"
    loss_of(output["out"]).backward()


@pytest.mark.spec("FS2-MP-06")
@ranks(2)
def test_output_dtype_of_the_root_gives_a_float32_result_and_low_precision_inside() -> None:
    model = seeded()
    seen = seen_dtypes(model)
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(BF16, FP32))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, FP32, FP32))
    assert model(batch()).dtype == FP32
    assert set(seen.values()) == {(BF16,) * 3}


@pytest.mark.spec("FS2-MP-06")
@ranks(2)
def test_output_dtype_of_inner_modules_breaks_a_low_precision_layer_without_input_cast() -> None:
    model = sharded(mp_policy=MixedPrecisionPolicy(BF16, FP32, FP32))
    with pytest.raises(RuntimeError, match="dtype"):
        model(batch())


@pytest.mark.spec("FS2-MP-08")
@ranks(2)
def test_parameters_without_recursion_lists_only_parameters_of_the_module() -> None:
    model = sharded(mp_policy=MixedPrecisionPolicy(BF16, FP32))
    model.unshard()
    assert list(model.parameters(recurse=False)) == [], "all parameters of the root are in its layers"
    own = list(model.enter.parameters(recurse=False))
    assert {p.dtype for p in own} == {BF16}
    assert not any(isinstance(p, DTensor) for p in own)
    layer = fully_shard(nn.Linear(2, 2), mp_policy=MixedPrecisionPolicy(BF16))
    layer.unshard()
    assert {p.dtype for p in layer.parameters(recurse=False)} == {BF16}


@pytest.mark.spec("FS2-MP-03", "MP-08")
@pytest.mark.parametrize("factor", [None, 2.0])
@ranks(2)
def test_a_model_that_becomes_float16_later_divides_before_the_sum_too(factor: float | None) -> None:
    model = fully_shard(nn.Linear(4, 4, bias=False)).half()
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    output = model(torch.ones(1, 4, dtype=FP16, device=device()))
    # The largest float16 number is 65504, so the sum of two of these overflows.
    output.backward(torch.full_like(output, 40000.0))
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 40000.0, dtype=FP16, device=device()))
