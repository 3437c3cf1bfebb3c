"""Mixed precision of the wrapper: buffers, low-precision gradients, and units of different precision.

``precision/test_precision.py`` tests the dtypes of the parameters, of the computation and of the reduction.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.models import apis, probes, running, values
from spec_tests.models.modules import seeded
from spec_tests.oracles.gathering import clean_name
from spec_tests.subject import FullyShardedDataParallel, MixedPrecision, ModuleWrapPolicy, ShardingStrategy, trace

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Each strategy once, and flat and original parameters at least once.
three = apis.settings_of(
    (apis.WRAPPED, ShardingStrategy.FULL_SHARD),
    (apis.ORIGINALS, ShardingStrategy.SHARD_GRAD_OP),
    (apis.ORIGINALS, ShardingStrategy.NO_SHARD),
)


def gradient_dtypes(model: nn.Module) -> set[torch.dtype]:
    return {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}


@pytest.mark.spec("MP-01")
@pytest.mark.parametrize("options", [{"mixed_precision": None}, {"precision": {}}])
@three
@ranks(2)
def test_without_a_policy_nothing_is_cast(api: Any, strategy: Any, options: dict[str, Any]) -> None:
    for dtype in (FP32, FP64, BF16):
        inner = probes.probes().to(dtype)
        probe = inner[0]
        model = api.shard(inner, unit_classes=(probes.Probe,), strategy=strategy, **options)
        with running.Wire() as wire:
            model(probes.ones().half()).sum().backward()
        assert probe.seen["x"] is FP16, "inputs keep their dtype"
        assert probe.seen["weight"] is probe.seen["weight in backward"] is probe.seen["scale"] is dtype
        assert set().union(*wire.dtypes.values()) == {dtype}
        assert {parameter.dtype for parameter in model.parameters()} == gradient_dtypes(model) == {dtype}


# --- buffers ---


@pytest.mark.spec("MP-09", "MP-17", "MP-28")
@pytest.mark.parametrize("with_gradients", [True, False])
@three
@ranks(2)
def test_floating_buffers_are_cast_permanently_at_the_first_forward(
    api: Any, strategy: Any, with_gradients: bool
) -> None:
    model = probes.probes()
    model.register_buffer("own", torch.full((2, 3), 1.0 + 2.0**-10, device=device()))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = {name: buffer.bfloat16() if buffer.is_floating_point() else buffer for name, buffer in before.items()}
    model = api.shard(model, unit_classes=(probes.Probe,), strategy=strategy, precision={"buffer_dtype": BF16})

    def found() -> dict[str, Tensor]:
        return {clean_name(name): buffer for name, buffer in model.named_buffers()}

    values.assert_same(found(), before, bitwise=True)
    for is_training in (True, True, False):
        with torch.set_grad_enabled(with_gradients), running.Wire() as wire:
            output = model.train(is_training)(probes.ones())
            values.assert_same(found(), expected, bitwise=True)
            if with_gradients:
                output.sum().backward()
                values.assert_same(found(), expected, bitwise=True)
        assert output.dtype is FP32
        assert set().union(*wire.dtypes.values()) <= {FP32}, "parameters and gradients keep their dtype"


@pytest.mark.spec("MP-08", "MP-09")
@ranks(2)
def test_each_unit_has_its_own_buffer_dtype_and_ignored_modules_have_none() -> None:
    def unit(module: nn.Module, precision: MixedPrecision, **options: Any) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(module, mixed_precision=precision, **options)

    cast, only_reduced, of_root, ignored = probes.probes(4)
    layers = nn.Sequential(
        unit(cast, MixedPrecision(buffer_dtype=BF16)),
        unit(only_reduced, MixedPrecision(reduce_dtype=BF16)),
        of_root,
        ignored,
    )
    unit(layers, MixedPrecision(buffer_dtype=FP16), ignored_modules=[ignored])(probes.ones())
    assert [probe.scale.dtype for probe in (cast, only_reduced, of_root, ignored)] == [BF16, FP32, FP16, FP32]


class SharedCount(nn.Module):
    """The first layer counts its forwards in a buffer that both layers have, one of them under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.layers[0].register_buffer("count", torch.zeros(1))
        self.layers[0].register_buffer("again", self.layers[0].count)
        self.layers[1].register_buffer("count", self.layers[0].count)

    def forward(self, x: Tensor) -> Any:
        self.layers[0].count.add_(1)
        return self.layers[1](self.layers[0](x)) * self.layers[1].count


@pytest.mark.spec("MP-09", "MP-10")
@pytest.mark.parametrize("has_inner_unit", [False, True])
@ranks(2)
def test_modules_still_share_a_buffer_that_was_cast(has_inner_unit: bool) -> None:
    plain = SharedCount()
    first, second = plain.layers
    options: Any = {"mixed_precision": MixedPrecision(buffer_dtype=BF16), "device_id": device()}
    if has_inner_unit:
        plain.layers[1] = FullyShardedDataParallel(second, **options)
    model = FullyShardedDataParallel(plain, **options)
    for _ in range(2):
        model(running.batch(0))
    assert {buffer.dtype for buffer in (first.count, first.again, second.count)} == {BF16}
    assert first.count.item() == second.count.item() == 2.0
    state = model.state_dict()
    for name in ("layers.0.count", "layers.0.again", "layers.1.count"):
        assert (state[name].dtype, state[name].item()) == (FP32, 2.0)


# --- the gradient that the optimizer uses ---


@pytest.mark.spec("MP-11")
@pytest.mark.parametrize("param_dtype", [BF16, None])
@three
@ranks(2)
def test_by_default_gradients_are_in_the_dtype_of_the_parameters(
    api: Any, strategy: Any, param_dtype: torch.dtype | None
) -> None:
    precision = {"param_dtype": param_dtype, "reduce_dtype": FP16}
    model = api.shard(seeded().to(FP64), strategy=strategy, precision=precision)
    for step in range(2):
        model(running.batch(step).to(param_dtype or FP64)).sum().backward()
        assert gradient_dtypes(model) == {FP64}


# The `param_dtype` and the `reduce_dtype`, and the dtype of kept gradients.
KEPT = [(BF16, None, BF16), (FP16, None, FP16), (BF16, FP16, FP16), (BF16, FP32, FP32), (None, BF16, BF16)]


@pytest.mark.spec("MP-12")
@pytest.mark.parametrize(("param_dtype", "reduce_dtype", "kept"), KEPT)
@three
@ranks(2)
def test_keep_low_precision_grads_keeps_the_reduction_dtype_and_accumulates_in_it(
    api: Any, strategy: Any, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, kept: torch.dtype
) -> None:
    precision = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype, "keep_low_precision_grads": True}
    model = api.shard(strategy=strategy, precision=precision)
    expected: dict[str, Tensor] = {}
    for step in range(2):
        running.iterate(model, step)
        assert gradient_dtypes(model) == {kept}
        for name, gradient in probes.expected_gradients(param_dtype or FP32, kept, (step,)).items():
            expected[name] = expected.get(name, torch.zeros((), dtype=kept, device=device())) + gradient.to(kept)
        found = {name: gradient.to(kept) for name, gradient in api.gradients(model).items()}
        values.assert_same(found, expected, bitwise=True)
    assert {parameter.dtype for parameter in model.parameters()} == {FP32}
    # An optimizer that supports this dtype can step: this one only multiplies and adds.
    before = api.values(model)
    torch.optim.SGD(model.parameters(), lr=0.5, foreach=False).step()
    stepped = {name: value.add(expected[name], alpha=-0.5) for name, value in before.items()}
    values.assert_same(api.values(model), stepped, bitwise=True)


# --- unsharded parameters ---


@pytest.mark.spec("MP-18")
@three
@ranks(2)
def test_summoned_parameters_are_in_full_precision_and_buffers_in_buffer_dtype(api: Any, strategy: Any) -> None:
    expected = {name: parameter.detach() + 2.0**-12 for name, parameter in probes.probes().named_parameters()}
    precision = {"param_dtype": BF16, "reduce_dtype": BF16, "buffer_dtype": BF16}
    model = api.shard(probes.probes(), unit_classes=(probes.Probe,), strategy=strategy, precision=precision)
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(2.0**-12)  # a change too small for bfloat16
    for _ in range(2):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            values.assert_same(values.named(model), expected, bitwise=True)
            dtypes = {name.rpartition(".")[2]: buffer.dtype for name, buffer in model.named_buffers()}
        model(probes.ones()).sum().backward()
        model.zero_grad()
    assert dtypes == {"scale": BF16, "count": torch.int64, "mask": torch.bool}


# --- units with different precision ---


@pytest.mark.spec("MP-23")
@ranks(2)
def test_separately_wrapped_norms_have_separate_collectives() -> None:
    counts = []
    for classes in ({nn.Linear}, {nn.Linear, nn.LayerNorm}):
        model = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)).to(device()),
            auto_wrap_policy=ModuleWrapPolicy(classes),
            mixed_precision=MixedPrecision(param_dtype=BF16),
        )
        with trace.record() as recorder:
            running.iterate(model)
        counts.append((recorder.count("AG"), recorder.count("RS")))
    # A unit is all-gathered in forward and in backward. Without separate norms, the root has the norm, and is kept.
    assert counts == [(2 * 2 + 1, 3), (3 * 2, 3)]


@pytest.mark.spec("MP-24", "MP-25")
@ranks(2)
def test_a_child_of_the_root_gets_the_output_dtype_of_a_unit_of_another_precision() -> None:
    first, second, third = layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).to(device())
    seen = []
    for layer in (first, second, third):
        layer.register_forward_pre_hook(lambda layer, args: seen.append((args[0].dtype, layer.weight.dtype)))
    layers[1] = FullyShardedDataParallel(
        second, mixed_precision=MixedPrecision(param_dtype=FP16, cast_forward_inputs=True)
    )
    precision = MixedPrecision(param_dtype=BF16, cast_forward_inputs=True)
    model = FullyShardedDataParallel(layers, mixed_precision=precision)
    with pytest.raises(RuntimeError, match="dtype"):
        model(running.batch())
    assert seen == [(BF16, BF16), (FP16, FP16), (FP16, BF16)]
    # The child runs if its parameters have the dtype of its inputs.
    layers[2] = nn.Identity()
    output = model(running.batch())
    assert output.dtype is FP16
    output.float().square().mean().backward()
    assert gradient_dtypes(model) == {FP32}


# --- conversion after wrapping ---


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.spec("MP-05", "SD-FULL-01")
@ranks(2)
def test_model_made_double_after_wrapping_is_saved_and_reduced_in_double(use_orig_params: bool) -> None:
    model, plain = apis.WRAPPED.shard(use_orig_params=use_orig_params).double(), seeded().double()
    assert {p.dtype for p in model.parameters()} == {FP64}
    # It is saved in double also before its first forward.
    values.assert_same(model.state_dict(), plain.state_dict(), bitwise=True)
    x = [running.batch(rank=rank).double() for rank in range(2)]
    for one, inputs in ((model, x[dist.get_rank()]), (plain, torch.cat(x))):
        optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
        one(inputs).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(apis.WRAPPED.values(model), values.named(plain), rtol=0, atol=1e-14)
