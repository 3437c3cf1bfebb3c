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
from torch import nn

from spec_tests.harness import ranks
from spec_tests.models import apis, probes, running, values
from spec_tests.models.modules import seeded
from spec_tests.models.sharding import FULL_SHARD, NO_SHARD

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def gradient_dtypes(model: nn.Module) -> set[torch.dtype]:
    return {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}


some_settings = apis.settings_of(
    (apis.WRAPPED, FULL_SHARD),
    (apis.ORIGINALS, NO_SHARD),
    (apis.FULLY_SHARD, FULL_SHARD),
)

# --- compute and storage ---


@pytest.mark.api_spec(wrapper=["MP-02"], fully_shard=["FS2-MP-02", "FS2-22"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@some_settings
@ranks(2)
def test_params_are_all_gathered_in_param_dtype(api: Any, strategy: Any, dtype: torch.dtype) -> None:
    inner = list(probes.probes(3))
    inner[1].requires_grad_(False)
    precision = {"param_dtype": dtype}
    model = api.shard(nn.Sequential(*inner), unit_classes=(probes.Probe,), strategy=strategy, precision=precision)
    for _ in range(2):
        with running.Wire() as wire:
            model(probes.ones()).sum().backward()
        for probe in inner:
            assert probe.seen["weight"] is probe.seen["weight in backward"] is probe.seen["gradient"] is dtype
        assert wire.dtypes["AG"] == (set() if strategy is NO_SHARD else {dtype})


@pytest.mark.api_spec(wrapper=["MP-03"], fully_shard=["FS2-MP-02"])
@some_settings
@ranks(2)
def test_between_computations_everything_is_stored_in_full_precision(api: Any, strategy: Any) -> None:
    model = api.shard(strategy=strategy, precision={"param_dtype": BF16, "reduce_dtype": BF16})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for step in range(2):
        with torch.no_grad():
            model(running.batch(step))
        api.reshard(model)
        assert {parameter.dtype for parameter in model.parameters()} == {FP32}
        output = model(running.batch(step))
        if strategy is FULL_SHARD and api != apis.FULLY_SHARD:
            assert {parameter.dtype for parameter in model.parameters()} == {FP32}
        output.square().mean().backward()
        assert {parameter.dtype for parameter in model.parameters()} == gradient_dtypes(model) == {FP32}
        optimizer.step()
        optimizer.zero_grad()
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {FP32}


@pytest.mark.api_spec(wrapper=["MP-03", "MP-28"], fully_shard=["FS2-MP-02"])
@some_settings
@ranks(2)
def test_forward_uses_values_changed_by_user_also_in_evaluation(api: Any, strategy: Any) -> None:
    model = api.shard(strategy=strategy, precision={"param_dtype": BF16}).eval()
    parameters = list(model.parameters())
    with torch.no_grad():
        for change in (0.0, 0.25):
            for parameter in parameters:
                parameter.add_(change)
            expected = seeded()
            for parameter in expected.parameters():
                parameter.add_(change)
            assert torch.equal(model(running.batch()), expected.bfloat16()(running.batch().bfloat16()))
            api.reshard(model)


# --- reduction ---

# The `param_dtype` and the `reduce_dtype`, and the dtypes of the computation and of the reduction.
REDUCTIONS = [
    (BF16, BF16, BF16, BF16),
    (BF16, FP32, BF16, FP32),
    (BF16, FP64, BF16, FP64),
    (BF16, None, BF16, BF16),
    (FP32, None, FP32, FP32),
    (None, FP16, FP32, FP16),
]


@pytest.mark.api_spec(
    wrapper=["MP-02", "MP-05", "MP-06", "MP-07", "MP-08", "MP-11", "MP-26"], fully_shard=["FS2-MP-03"]
)
@pytest.mark.parametrize("dtypes", REDUCTIONS)
@some_settings
@ranks(2)
def test_gradients_are_reduced_in_reduce_dtype_or_without_it_in_param_dtype(
    api: Any, strategy: Any, dtypes: tuple[Any, ...]
) -> None:
    param_dtype, reduce_dtype, compute, reduce = dtypes
    model = api.shard(strategy=strategy, precision={"param_dtype": param_dtype, "reduce_dtype": reduce_dtype})
    # The dtype of the second iteration must not depend on the first.
    for _ in range(2):
        model.zero_grad()
        with running.Wire() as wire:
            output = model(running.batch())
            output.square().mean().backward()
        assert output.dtype is compute
        sent = {kind: wire.dtypes[kind] for kind in ("RS", "AR") if wire.dtypes[kind]}
        assert sent == {"AR" if strategy is NO_SHARD else "RS": {reduce}}
        assert gradient_dtypes(model) == {FP32}
    values.assert_same(api.gradients(model), probes.expected_gradients(compute, reduce), bitwise=True)


@pytest.mark.api_spec(wrapper=["MP-02", "MP-05"], fully_shard=["FS2-MP-03", "FS2-18"])
@pytest.mark.parametrize("reduce", [FP16, FP32])
@apis.hybrid_settings
@ranks(4)
def test_on_a_grid_both_reductions_run_in_reduce_dtype(api: Any, strategy: Any, reduce: torch.dtype) -> None:
    model = api.shard(strategy=strategy, precision={"param_dtype": BF16, "reduce_dtype": reduce})
    with running.Wire() as wire:
        running.iterate(model)
    assert wire.dtypes["RS"] == wire.dtypes["AR"] == {reduce}
    # Each of two sums rounds once, relative to gradients that are smaller than one.
    rounding = 2 * torch.finfo(reduce).eps
    expected = probes.expected_gradients(BF16, reduce, num_ranks=4)
    torch.testing.assert_close(api.gradients(model), expected, rtol=rounding, atol=rounding)


# --- torch ---


@pytest.mark.spec("PAR-03")
@pytest.mark.api_spec(wrapper=["MP-02", "MP-03", "MP-05", "MP-11", "NOSYNC-02"], fully_shard=["FS2-MP-02", "FS2-MP-03"])
@pytest.mark.parametrize("precision", [{"param_dtype": BF16}, {"param_dtype": BF16, "reduce_dtype": FP32}])
@some_settings
@ranks(2)
def test_training_with_micro_batches_is_bit_by_bit_that_of_torch(
    api: Any, strategy: Any, precision: dict[str, torch.dtype]
) -> None:
    # Since 2.15, the default of `fully_shard` in torch is the dtype of the original parameter.
    of_torch = {"reduce_dtype": BF16, **precision}
    model = api.shard(strategy=strategy, precision=precision)
    theirs = api.of_torch().shard(strategy=strategy, precision=of_torch)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, theirs)]
    for step in range(3):
        for each, optimizer in zip((model, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            # The first of two micro-batches is not reduced.
            with api.no_sync(each):
                running.iterate(each, 2 * step)
            running.iterate(each, 2 * step + 1)
        values.assert_same(api.gradients(model), api.gradients(theirs), bitwise=True)
        for optimizer in optimizers:
            optimizer.step()
    values.assert_same(api.values(model), api.values(theirs), bitwise=True)
