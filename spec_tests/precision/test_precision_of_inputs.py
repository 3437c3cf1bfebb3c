"""Mixed precision: which inputs and outputs of a unit are cast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spec_tests.harness import device, ranks
from spec_tests.models.apis import FULLY_SHARD, ORIGINALS, WRAPPED, Api, both_apis, every_setting, name_of
from spec_tests.models.modules import seeded
from spec_tests.models.probes import Probe, expected_gradients, nested_inputs, ones, probes
from spec_tests.models.running import batch, loss_of
from spec_tests.models.values import assert_same
from spec_tests.subject import FullyShardedDataParallel, MixedPrecision

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def assert_seen(probe: Probe, *, is_cast: bool) -> None:
    """The dtypes of `nested_inputs` inside the probe's forward."""
    found = [probe.seen[key] for key in ("x", "args", "kwargs")]
    assert found == ([BF16, [BF16, BF16], [BF16, BF16]] if is_cast else [FP32, [FP64, FP32], [FP32, FP16]])


# --- the root ---

ROOTS: list[tuple[Api, dict[str, Any], bool]] = [
    *((api, {"param_dtype": BF16}, True) for api in (WRAPPED, ORIGINALS, FULLY_SHARD)),
    *((api, {"reduce_dtype": BF16}, False) for api in (WRAPPED, ORIGINALS, FULLY_SHARD)),
    (FULLY_SHARD, {"param_dtype": BF16, "cast_forward_inputs": False}, False),
    *(
        (WRAPPED, {"param_dtype": BF16, "cast_root_forward_inputs": on_root, "cast_forward_inputs": elsewhere}, on_root)
        for on_root in (True, False)
        for elsewhere in (True, False)
    ),
    (ORIGINALS, {"param_dtype": BF16, "cast_root_forward_inputs": False}, False),
    (WRAPPED, {"reduce_dtype": BF16, "cast_forward_inputs": True}, False),
]


@pytest.mark.api_spec(wrapper=["MP-14", "MP-15"], fully_shard=["FS2-MP-05", "MIG-10"])
@pytest.mark.parametrize(("api", "precision", "is_cast"), ROOTS, ids=name_of)
@ranks(2)
def test_root_casts_its_inputs_by_default_and_with_the_option(
    api: Api, precision: dict[str, Any], is_cast: bool
) -> None:
    probe = Probe().to(device())
    model = api.unit(probe, precision=precision)
    args, kwargs = nested_inputs()
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            model(*args, **kwargs)
        assert_seen(probe, is_cast=is_cast)
    assert args[1][0].dtype is FP64, "the caller's tensors are not changed"


@pytest.mark.api_spec(wrapper=["MP-14"])
@both_apis
@ranks(2)
def test_a_root_without_parameters_of_its_own_casts_its_inputs_too(api: Api) -> None:
    inner = list(probes())
    model = api.shard(nn.Sequential(*inner), unit_classes=(Probe,), precision={"param_dtype": BF16})
    model(ones())
    assert inner[0].seen["x"] is BF16


@pytest.mark.api_spec(wrapper=["MP-14"], fully_shard=["FS2-MP-05"])
@pytest.mark.parametrize("use_reentrant", [True, False])
@every_setting
@ranks(2)
def test_a_root_that_is_recomputed_in_backward_casts_its_inputs_again(
    api: Api, strategy: Any, use_reentrant: bool
) -> None:
    model = api.shard(strategy=strategy, precision={"param_dtype": BF16})
    x = batch().requires_grad_()
    loss_of(checkpoint(model, x, use_reentrant=use_reentrant)).backward()
    assert_same(api.gradients(model), expected_gradients(BF16, BF16), bitwise=True)


@pytest.mark.api_spec(wrapper=["MP-14"], fully_shard=["FS2-MP-05"])
@both_apis
@ranks(2)
def test_the_gradient_of_a_cast_input_has_the_dtype_of_the_input(api: Api) -> None:
    x = batch().requires_grad_()
    loss_of(api.shard(precision={"param_dtype": BF16})(x)).backward()
    plain, low = seeded().bfloat16(), batch().bfloat16().requires_grad_()
    loss_of(plain(low)).backward()
    assert x.grad.dtype is FP32
    assert torch.equal(x.grad, low.grad.float())


# --- inner units ---


class Calls(nn.Module):
    """Calls a unit with its own arguments."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.own, self.inner = nn.Parameter(ones(1)), inner

    def forward(self, args: Any, kwargs: Any) -> Tensor:
        return self.inner(*args, **kwargs) * self.own


INNER: list[tuple[Api, dict[str, Any], bool]] = [
    *((FULLY_SHARD, {"cast_forward_inputs": casts}, casts) for casts in (True, False)),
    *(
        (api, {"cast_forward_inputs": casts, "cast_root_forward_inputs": on_root}, casts)
        for api in (WRAPPED, ORIGINALS)
        for casts in (True, False)
        for on_root in (True, False)
    ),
]


@pytest.mark.api_spec(wrapper=["MP-13", "MP-16"], fully_shard=["FS2-MP-05"])
@pytest.mark.parametrize(("api", "options", "casts"), INNER, ids=name_of)
@ranks(2)
def test_inner_unit_casts_inputs_only_with_option(api: Api, options: dict[str, Any], casts: bool) -> None:
    probe = Probe().to(device())
    # The root has another precision and casts nothing, so only the inner unit can cast.
    model = api.unit(Calls(api.unit(probe, precision={"param_dtype": BF16, **options})))
    args, kwargs = nested_inputs()
    for _ in range(2):
        model(args, kwargs).sum().backward()
        assert probe.seen["weight"] is BF16
        assert_seen(probe, is_cast=casts)
    assert args[1][0].dtype is FP64, "the caller's tensors are not changed"


@pytest.mark.spec("MP-13")
@ranks(2)
def test_inner_unit_of_another_precision_fails_without_input_cast_and_runs_with_one() -> None:
    for casts in (False, True):
        inner = FullyShardedDataParallel(
            nn.Linear(6, 6).to(device()),
            mixed_precision=MixedPrecision(param_dtype=BF16, cast_forward_inputs=casts),
        )
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(6, 6).to(device()), inner))
        if casts:
            assert model(batch()).dtype is BF16
        else:
            with pytest.raises(RuntimeError, match="dtype"):
                model(batch())


# --- which inputs ---


@pytest.mark.api_spec(wrapper=["MP-17"], fully_shard=["FS2-MP-05"])
@pytest.mark.parametrize("is_root", [True, False])
@both_apis
@ranks(2)
def test_only_floating_point_inputs_are_cast(api: Api, is_root: bool) -> None:
    others = [torch.ones(2, dtype=dtype, device=device()) for dtype in (torch.int64, torch.bool, torch.uint8)]
    probe = Probe().to(device())
    model = api.unit(probe, precision={"param_dtype": BF16, "cast_forward_inputs": True})
    args, kwargs = (ones(), others, ones(3)), {"mask": others[1], "tokens": [others[0]], "x2": ones(4)}
    if is_root:
        model(*args, **kwargs)
    else:
        api.unit(Calls(model))(args, kwargs)
    assert probe.seen["x"] is BF16
    assert probe.seen["args"] == [torch.int64, torch.bool, torch.uint8, BF16]
    assert probe.seen["kwargs"] == [torch.bool, torch.int64, BF16]


@pytest.mark.api_spec(wrapper=["MP-17"], fully_shard=["FS2-MP-05"])
@both_apis
@ranks(2)
def test_token_ids_are_not_cast_before_an_embedding(api: Api) -> None:
    model = nn.Sequential(nn.Embedding(1000, 6), nn.Linear(6, 2)).to(device())
    expected = copy.deepcopy(model).bfloat16()
    # bfloat16 cannot represent 257 and 999.
    tokens = torch.tensor([[257, 999, 1]], device=device())
    assert torch.equal(api.unit(model, precision={"param_dtype": BF16})(tokens), expected(tokens))
