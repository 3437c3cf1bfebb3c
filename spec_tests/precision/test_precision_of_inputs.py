"""Mixed precision: which inputs of a unit are cast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spec_tests.harness import ranks
from spec_tests.models import apis, probes, running
from spec_tests.models.modules import seeded
from spec_tests.models.values import assert_same
from spec_tests.subject import ShardingStrategy

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def assert_seen(probe: probes.Probe, *, is_cast: bool) -> None:
    """The dtypes of `nested_inputs` inside the probe's forward."""
    found = [probe.seen[key] for key in ("x", "args", "kwargs")]
    assert found == ([BF16, [BF16, BF16], [BF16, BF16]] if is_cast else [FP32, [FP64, FP32], [FP32, FP16]])


# --- the root ---

LOW, ONLY_REDUCED = {"param_dtype": BF16}, {"reduce_dtype": BF16}
ROOTS: list[tuple[Any, dict[str, Any], bool]] = [
    (apis.WRAPPED, LOW, True),
    (apis.FULLY_SHARD, LOW, True),
    (apis.WRAPPED, ONLY_REDUCED | {"cast_forward_inputs": True}, False),
    (apis.ORIGINALS, ONLY_REDUCED, False),
    (apis.FULLY_SHARD, ONLY_REDUCED, False),
    (apis.FULLY_SHARD, LOW | {"cast_forward_inputs": False}, False),
    (apis.WRAPPED, LOW | {"cast_root_forward_inputs": True, "cast_forward_inputs": False}, True),
    (apis.WRAPPED, LOW | {"cast_root_forward_inputs": False, "cast_forward_inputs": True}, False),
    (apis.ORIGINALS, LOW | {"cast_root_forward_inputs": False, "cast_forward_inputs": False}, False),
]


@pytest.mark.api_spec(wrapper=["MP-14", "MP-15"], fully_shard=["FS2-MP-05", "MIG-10"])
@pytest.mark.parametrize(("api", "precision", "is_cast"), ROOTS, ids=apis.name_of)
@ranks(2)
def test_root_casts_its_inputs_by_default_and_with_the_option(
    api: Any, precision: dict[str, Any], is_cast: bool
) -> None:
    probe = probes.probes(1)[0]
    model = api.unit(probe, precision=precision)
    args, kwargs = probes.nested_inputs()
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            model(*args, **kwargs)
        assert_seen(probe, is_cast=is_cast)
    assert args[1][0].dtype is FP64, "the caller's tensors are not changed"


@pytest.mark.api_spec(wrapper=["MP-14"])
@apis.both_apis
@ranks(2)
def test_a_root_without_parameters_of_its_own_casts_its_inputs_too(api: Any) -> None:
    inner = probes.probes()
    api.shard(inner, unit_classes=(probes.Probe,), precision={"param_dtype": BF16})(probes.ones())
    assert inner[0].seen["x"] is BF16


@pytest.mark.api_spec(wrapper=["MP-14"], fully_shard=["FS2-MP-05"])
@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["stored", "reentrant", "recomputed"])
@apis.settings_of(
    (apis.WRAPPED, ShardingStrategy.FULL_SHARD),
    (apis.ORIGINALS, ShardingStrategy.NO_SHARD),
    (apis.FULLY_SHARD, ShardingStrategy.FULL_SHARD),
)
@ranks(2)
def test_a_root_that_is_recomputed_in_backward_casts_its_inputs_again(
    api: Any, strategy: Any, use_reentrant: bool | None
) -> None:
    model = api.shard(strategy=strategy, precision={"param_dtype": BF16})
    plain, low = seeded().bfloat16(), running.batch().bfloat16().requires_grad_()
    x = running.batch().requires_grad_()
    output = model(x) if use_reentrant is None else checkpoint(model, x, use_reentrant=use_reentrant)
    running.loss_of(output).backward()
    running.loss_of(plain(low)).backward()
    assert x.grad.dtype is FP32, "the gradient of a cast input has the dtype of the input"
    assert torch.equal(x.grad, low.grad.float())
    assert_same(api.gradients(model), probes.expected_gradients(BF16, BF16), bitwise=True)


# --- inner units ---


class Calls(nn.Module):
    """Calls a unit with its own arguments."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.own, self.inner = nn.Parameter(probes.ones(1)), inner

    def forward(self, args: Any, kwargs: Any) -> Tensor:
        return self.inner(*args, **kwargs) * self.own


INNER: list[tuple[Any, dict[str, Any], bool]] = [
    (apis.FULLY_SHARD, {}, True),
    (apis.FULLY_SHARD, {"cast_forward_inputs": False}, False),
    (apis.WRAPPED, {}, False),
    (apis.WRAPPED, {"cast_forward_inputs": True, "cast_root_forward_inputs": False}, True),
    (apis.ORIGINALS, {"cast_forward_inputs": True, "cast_root_forward_inputs": True}, True),
    (apis.ORIGINALS, {"cast_forward_inputs": False, "cast_root_forward_inputs": True}, False),
]


@pytest.mark.api_spec(wrapper=["MP-13", "MP-16"], fully_shard=["FS2-MP-05"])
@pytest.mark.parametrize(("api", "options", "is_cast"), INNER, ids=apis.name_of)
@ranks(2)
def test_inner_unit_casts_inputs_only_with_option(api: Any, options: dict[str, Any], is_cast: bool) -> None:
    probe = probes.probes(1)[0]
    # The root has another precision and casts nothing, so only the inner unit can cast.
    model = api.unit(Calls(api.unit(probe, precision={"param_dtype": BF16, **options})))
    args, kwargs = probes.nested_inputs()
    for _ in range(2):
        model(args, kwargs).sum().backward()
        assert probe.seen["weight"] is BF16
        assert_seen(probe, is_cast=is_cast)
    assert args[1][0].dtype is FP64, "the caller's tensors are not changed"


# --- which inputs ---


@pytest.mark.api_spec(wrapper=["MP-17"], fully_shard=["FS2-MP-05"])
@pytest.mark.parametrize("is_root", [True, False])
@apis.both_apis
@ranks(2)
def test_only_floating_point_inputs_are_cast(api: Any, is_root: bool) -> None:
    others = [torch.int64, torch.bool, torch.uint8, torch.complex64]
    probe = probes.probes(1)[0]
    model = api.unit(probe, precision={"param_dtype": BF16, "cast_forward_inputs": True})
    args = (probes.ones(), [probes.ones(2).to(dtype) for dtype in others], probes.ones(3))
    kwargs = {
        "mask": probes.ones(2).bool(),
        "tokens": [probes.ones(2).long()],
        "x2": probes.ones(4),
    }
    if is_root:
        model(*args, **kwargs)
    else:
        api.unit(Calls(model))(args, kwargs)
    assert probe.seen["x"] is BF16
    assert probe.seen["args"] == [*others, BF16]
    assert probe.seen["kwargs"] == [torch.bool, torch.int64, BF16]
