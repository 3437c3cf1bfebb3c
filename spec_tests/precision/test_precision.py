"""Mixed precision: the dtype of each step.

The reference is the plain model. It computes each rank's gradient in the compute dtype, averages in the dtype of the
reduction, and converts to the dtype in which the parameters are stored. These steps are exact or happen in the same
order as in the sharded model. On two ranks the comparison is therefore bitwise here too.

Options of one API are in ``test_wrapper_precision.py`` and ``test_policies_of_fully_shard.py``. Inputs and outputs of
units are in ``test_precision_of_inputs.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.harness import device, ranks
from spec_tests.models.apis import FULLY_SHARD, ORIGINALS, WRAPPED, Api, every_setting, hybrid_settings, settings_of
from spec_tests.models.modules import UNITS, Scale, seeded
from spec_tests.models.probes import Probe, expected_gradients, ones, probes
from spec_tests.models.running import Wire, batch, iterate, loss_of
from spec_tests.models.sharding import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP
from spec_tests.models.torch_names import IS_2_15
from spec_tests.models.values import assert_same, full, full_values, named
from spec_tests.subject import trace

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Each strategy, and flat and original parameters.
some_settings = settings_of(
    (WRAPPED, FULL_SHARD),
    (ORIGINALS, SHARD_GRAD_OP),
    (ORIGINALS, NO_SHARD),
    (FULLY_SHARD, FULL_SHARD),
    (FULLY_SHARD, SHARD_GRAD_OP),
)

# --- compute and storage ---


@pytest.mark.api_spec(wrapper=["MP-02"], fully_shard=["FS2-MP-02", "FS2-22"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@every_setting
@ranks(2)
def test_params_are_all_gathered_in_param_dtype(api: Api, strategy: Any, dtype: torch.dtype) -> None:
    inner = list(probes(3))
    inner[1].requires_grad_(False)
    precision = {"param_dtype": dtype}
    model = api.shard(nn.Sequential(*inner), unit_classes=(Probe,), strategy=strategy, precision=precision)
    for _ in range(2):
        with trace.record() as recorder, Wire() as wire:
            output = model(ones())
            assert output.dtype is dtype
            output.sum().backward()
        for probe in inner:
            assert probe.seen["weight"] is probe.seen["weight in backward"] is probe.seen["gradient"] is dtype
        if strategy is not NO_SHARD:
            assert {event.dtype for event in recorder.events if event.kind == "AG"} == {dtype}
            assert wire.dtypes["AG"] == {dtype}


@pytest.mark.api_spec(wrapper=["MP-03"], fully_shard=["FS2-MP-02"])
@every_setting
@ranks(2)
def test_between_computations_everything_is_stored_in_full_precision(api: Api, strategy: Any) -> None:
    model = api.shard(strategy=strategy, precision={"param_dtype": BF16, "reduce_dtype": BF16})
    plain = seeded()
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-4) for each in (model, plain)]

    def check() -> None:
        assert {parameter.dtype for parameter in model.parameters()} == {FP32}

    for step in range(3):
        check()
        with torch.no_grad():
            model(batch(step))
        api.reshard(model)
        check()
        loss = loss_of(model(batch(step)))
        if strategy is FULL_SHARD and api != FULLY_SHARD:
            check()
        loss.backward()
        check()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {FP32}
        for name, gradient in expected_gradients(BF16, BF16, (step,), plain=plain).items():
            plain.get_parameter(name).grad = gradient
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = [value for of in optimizers[0].state.values() for key, value in of.items() if key.startswith("exp_")]
    assert len(state) >= 2 * len(UNITS) - 2
    assert {value.dtype for value in state} == {FP32}
    # Steps of 1e-4 are below the resolution of bfloat16 near 1. None of them was rounded away.
    values = full_values(model)
    torch.testing.assert_close(values, named(plain), rtol=1e-6, atol=1e-7)
    assert any((value.bfloat16().float() != value).any() for value in values.values())


@pytest.mark.api_spec(wrapper=["MP-03", "MP-28"], fully_shard=["FS2-MP-02"])
@every_setting
@ranks(2)
def test_forward_uses_values_changed_by_user_also_in_evaluation(api: Api, strategy: Any) -> None:
    model = api.shard(strategy=strategy, precision={"param_dtype": BF16}).eval()
    expected = seeded()
    parameters = list(model.parameters())
    with torch.no_grad():
        for _ in range(2):
            low = seeded()
            low.load_state_dict(expected.state_dict())
            assert torch.equal(model(batch()), low.bfloat16()(batch().bfloat16()))
            api.reshard(model)
            for parameter in (*parameters, *expected.parameters()):
                parameter.add_(0.25)


@pytest.mark.api_spec(wrapper=["MP-26"])
@every_setting
@ranks(2)
def test_mixed_precision_of_float32_equals_no_mixed_precision(api: Api, strategy: Any) -> None:
    trained = []
    for precision in (None, {"param_dtype": FP32, "reduce_dtype": FP32}):
        model = api.shard(strategy=strategy, precision=precision)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for step in range(3):
            iterate(model, step, optimizer)
        trained.append(full_values(model))
    assert_same(trained[0], trained[1], bitwise=True)


# --- reduction ---

# The `param_dtype` and the `reduce_dtype`, and the dtypes of the computation and of the reduction.
REDUCTIONS = [
    (BF16, BF16, BF16, BF16),
    (BF16, FP32, BF16, FP32),
    (BF16, FP64, BF16, FP64),
    (FP16, BF16, FP16, BF16),
    (BF16, None, BF16, BF16),
    (FP16, None, FP16, FP16),
    (FP32, None, FP32, FP32),
    (None, BF16, FP32, BF16),
    (None, FP16, FP32, FP16),
    (None, FP32, FP32, FP32),
]


@pytest.mark.api_spec(
    wrapper=["MP-02", "MP-05", "MP-06", "MP-07", "MP-08", "MP-11", "MP-26"], fully_shard=["FS2-MP-03"]
)
@pytest.mark.parametrize("dtypes", REDUCTIONS)
@every_setting
@ranks(2)
def test_gradients_are_reduced_in_reduce_dtype_or_without_it_in_param_dtype(
    api: Api, strategy: Any, dtypes: tuple[Any, ...]
) -> None:
    param_dtype, reduce_dtype, compute, reduce = dtypes
    model = api.shard(strategy=strategy, precision={"param_dtype": param_dtype, "reduce_dtype": reduce_dtype})
    kinds = ("AR",) if strategy is NO_SHARD else ("RS",)
    # The dtype of the second iteration must not depend on the first.
    for _ in range(2):
        model.zero_grad()
        with trace.record() as recorder, Wire() as wire:
            output = model(batch())
            loss_of(output).backward()
        assert output.dtype is compute
        for kind in ("RS", "AR"):
            found = {event.dtype for event in recorder.events if event.kind == kind}
            assert found == wire.dtypes[kind] == ({reduce} if kind in kinds else set())
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {FP32}
    assert_same(api.gradients(model), expected_gradients(compute, reduce), bitwise=True)


@pytest.mark.api_spec(wrapper=["MP-02", "MP-05"], fully_shard=["FS2-MP-03", "FS2-18"])
@hybrid_settings
@ranks(4)
def test_on_a_grid_both_reductions_run_in_reduce_dtype(api: Api, strategy: Any) -> None:
    for reduce, tolerance in ((FP16, 1e-3), (FP32, 1e-6)):
        model = api.shard(strategy=strategy, precision={"param_dtype": BF16, "reduce_dtype": reduce})
        with trace.record() as recorder, Wire() as wire:
            iterate(model)
        for kind in ("RS", "AR"):
            assert {event.dtype for event in recorder.events if event.kind == kind} == wire.dtypes[kind] == {reduce}
        expected = expected_gradients(BF16, reduce, num_ranks=4)
        torch.testing.assert_close(api.gradients(model), expected, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.api_spec(wrapper=["MP-06", "MP-07"], fully_shard=["FS2-MP-03"])
@every_setting
@ranks(2)
def test_low_precision_compute_with_full_precision_reduction_loses_nothing_in_the_sum(api: Api, strategy: Any) -> None:
    # bfloat16 can represent 1 and 1/512, but not their sum.
    own = torch.full((2,), 1.0 if dist.get_rank() == 0 else 2.0**-9, device=device())
    for reduce, mean in ((FP32, (1.0 + 2.0**-9) / 2), (BF16, 0.5), (None, 0.5)):
        precision = {"param_dtype": BF16, "reduce_dtype": reduce}
        model = api.shard(Scale(2, value=1.0).to(device()), unit_classes=(), strategy=strategy, precision=precision)
        model(own).sum().backward()
        gradient = api.gradients(model)["weight"]
        assert gradient.dtype is FP32
        assert (gradient == mean).all()


# --- torch ---

POLICIES: dict[str, dict[str, Any]] = {
    "bf16": {"param_dtype": BF16},
    "bf16, reduced in fp32": {"param_dtype": BF16, "reduce_dtype": FP32},
    "fp16": {"param_dtype": FP16},
    "only reduced in bf16": {"reduce_dtype": BF16},
    "bf16, kept": {"param_dtype": BF16, "keep_low_precision_grads": True},
}


@pytest.mark.spec("PAR-03")
@pytest.mark.api_spec(wrapper=["MP-02", "MP-03", "MP-05", "MP-11", "NOSYNC-02"], fully_shard=["FS2-MP-02", "FS2-MP-03"])
@pytest.mark.parametrize("policy", POLICIES)
@some_settings
@ranks(2)
def test_training_is_bit_by_bit_that_of_torch(api: Api, strategy: Any, policy: str) -> None:
    precision = dict(POLICIES[policy])
    torch_precision = dict(precision)
    tolerance = 0.0
    if api == FULLY_SHARD:
        precision.pop("keep_low_precision_grads", None)
        torch_precision = dict(precision)
        if IS_2_15:
            # Since 2.15, the default is the dtype of the original parameter.
            torch_precision.setdefault("reduce_dtype", precision.get("param_dtype"))
        if IS_2_15 and "param_dtype" not in precision:
            # Since 2.15, torch rounds each of the two summands to bfloat16 first. Their sum may be smaller than both.
            tolerance = 2.0**-6
    models = [
        api.shard(strategy=strategy, precision=precision),
        api.of_torch().shard(strategy=strategy, precision=torch_precision),
    ]
    # No momentum: with gradients kept in low precision, its buffer would also be in low precision.
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, foreach=False) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            # The first of two micro-batches is not reduced.
            with api.no_sync(model):
                iterate(model, 2 * step)
            iterate(model, 2 * step + 1)
        assert_close_or_same(*(api.gradients(model) for model in models), tolerance=tolerance)
        for optimizer in optimizers:
            optimizer.step()
    assert_close_or_same(*(api.values(model) for model in models), tolerance=tolerance)


def assert_close_or_same(ours: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Checks for values that differ by at most the tolerance, times the largest value. 0.0: for equal values."""
    if tolerance == 0.0:
        assert_same(ours, expected, bitwise=True)
        return
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        found, wanted = full(ours[name]).detach(), full(tensor).detach()
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=tolerance * wanted.abs().max().item())
