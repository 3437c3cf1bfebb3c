"""Mixed precision: the dtype of each step.

The reference is the unwrapped model. It computes each rank's gradient in the compute dtype, averages in the dtype of
the reduction, and converts to the dtype in which the parameters are stored. These steps are exact or happen in the same
order as in the wrapped model. On two ranks the comparison is therefore bitwise here too.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from spec_tests.fsdp1.whole import group_of, whole
from spec_tests.harness import device, ranks
from spec_tests.models.modules import UNITS, Scale, seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of, of_unit
from spec_tests.models.sharding import (
    FLAT_STRATEGIES,
    FULL_SHARD,
    HYBRID_SHARD,
    HYBRID_STRATEGIES,
    NO_SHARD,
    SHARD_GRAD_OP,
    as_torch,
    wrapped,
)
from spec_tests.models.values import assert_same, full_values, named
from spec_tests.subject import FullyShardedDataParallel, MixedPrecision, ModuleWrapPolicy, ShardingStrategy, trace

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PAIRS = [(FULL_SHARD, False), (FULL_SHARD, True), (SHARD_GRAD_OP, True), (NO_SHARD, False), (NO_SHARD, True)]
pairs = pytest.mark.parametrize(("strategy", "use_orig_params"), PAIRS)
# These pairs cover each strategy once, and flat and original parameters at least once.
three = pytest.mark.parametrize(("strategy", "use_orig_params"), [PAIRS[0], PAIRS[2], PAIRS[4]])
flat_strategies = pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
either = pytest.mark.parametrize("use_orig_params", [False, True])


def expected_gradients(
    compute: torch.dtype = FP32, reduce: torch.dtype = FP32, steps: tuple[int, ...] = (0,), num_ranks: int = 2
) -> dict[str, Tensor]:
    """The mean over the ranks of the gradients that each rank accumulates in ``steps``, converted to float32."""
    of_ranks = []
    for rank in range(num_ranks):
        plain = seeded().to(compute)
        for step in steps:
            loss_of(plain(batch(step, rank).to(compute))).backward()
        of_ranks.append({name: parameter.grad.to(reduce) for name, parameter in plain.named_parameters()})
    total = {name: sum((each[name] for each in of_ranks[1:]), of_ranks[0][name]) for name in of_ranks[0]}
    return {name: (gradient / num_ranks).float() for name, gradient in total.items()}


class Probe(nn.Module):
    """Records the dtypes of its input and weight, and computes in the dtype of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6,), 0.5))
        self.bias = nn.Parameter(torch.zeros(6))
        self.register_buffer("scale", torch.full((6,), 1.0 + 2.0**-10))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = {
            "x": x.dtype,
            "weight": self.weight.dtype,
            "scale": self.scale.dtype,
            "args": [arg.dtype for arg in tree_leaves(args) if isinstance(arg, Tensor)],
            "kwargs": [arg.dtype for arg in tree_leaves(kwargs) if isinstance(arg, Tensor)],
        }
        product = x.to(self.weight.dtype) * self.weight
        if product.requires_grad:
            # Do not use the output: this unit's backward has only just begun when the output's gradient arrives.
            product.register_hook(self.in_backward)
        return product + self.bias

    def in_backward(self, gradient: Tensor) -> None:
        self.seen["gradient"] = gradient.dtype
        self.seen["weight in backward"] = self.weight.dtype


def probes(num: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Probe() for _ in range(num))).to(device())


def probed(model: nn.Module, precision: MixedPrecision | None, **options: Any) -> FullyShardedDataParallel:
    """Wraps the model with a unit for each probe."""
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy({Probe}))
    return FullyShardedDataParallel(model, mixed_precision=precision, **options)


def ones(*shape: int) -> Tensor:
    return torch.ones(*(shape or (2, 6)), device=device())


# --- the `MixedPrecision` dataclass ---


@pytest.mark.spec("MP-01")
@pytest.mark.pure
def test_the_fields_and_defaults_are_those_of_torch() -> None:
    def fields(record: Any) -> list[tuple[str, Any]]:
        return [(each.name, each.default) for each in dataclasses.fields(record)]

    assert fields(MixedPrecision) == [
        ("param_dtype", None),
        ("reduce_dtype", None),
        ("buffer_dtype", None),
        ("keep_low_precision_grads", False),
        ("cast_forward_inputs", False),
        ("cast_root_forward_inputs", True),
        ("_module_classes_to_ignore", (_BatchNorm,)),
    ]
    assert fields(MixedPrecision) == fields(torch_fsdp.MixedPrecision)
    assert MixedPrecision(BF16, FP16, FP32, True, True, False, ()) == MixedPrecision(
        param_dtype=BF16,
        reduce_dtype=FP16,
        buffer_dtype=FP32,
        keep_low_precision_grads=True,
        cast_forward_inputs=True,
        cast_root_forward_inputs=False,
        _module_classes_to_ignore=(),
    )


@pytest.mark.spec("MP-01")
@pytest.mark.parametrize("options", [{}, {"mixed_precision": None}, {"mixed_precision": MixedPrecision()}])
@three
@ranks(2)
def test_without_a_policy_nothing_is_cast(
    strategy: ShardingStrategy, use_orig_params: bool, options: dict[str, Any]
) -> None:
    for dtype in (FP32, torch.float64, BF16):
        model = probes().to(dtype)
        inner = list(model)
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Probe}),
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            **options,
        )
        with trace.record() as recorder, Wire() as wire:
            model(ones().half()).sum().backward()
        assert inner[0].seen["x"] is FP16, "inputs stay what they are"
        for probe in inner:
            assert probe.seen["weight"] is probe.seen["weight in backward"] is probe.seen["scale"] is dtype
        assert {event.dtype for event in recorder.events if event.ranks} == {dtype}
        assert set().union(*wire.dtypes.values()) == {dtype}
        assert all(p.dtype is dtype and (p.grad is None or p.grad.dtype is dtype) for p in model.parameters())


# --- compute ---


@pytest.mark.spec("MP-02")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@three
@ranks(2)
def test_params_are_all_gathered_in_param_dtype(
    strategy: ShardingStrategy, use_orig_params: bool, dtype: torch.dtype
) -> None:
    inner = list(probes())
    model = probed(
        nn.Sequential(*inner),
        MixedPrecision(param_dtype=dtype),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )
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


@pytest.mark.spec("MP-02", "MP-06")
@pytest.mark.parametrize("dtype", [BF16, FP16])
@three
@ranks(2)
def test_gradients_are_those_of_the_plain_model_in_param_dtype(
    strategy: ShardingStrategy, use_orig_params: bool, dtype: torch.dtype
) -> None:
    precision = MixedPrecision(param_dtype=dtype)
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params, mixed_precision=precision)
    iterate(model)
    gradients = whole(model, group=group_of(strategy))[1]
    assert_same(gradients, expected_gradients(dtype, dtype), bitwise=True)
    assert not torch.equal(gradients["enter.weight"], expected_gradients()["enter.weight"])


POLICIES: dict[str, dict[str, Any]] = {
    "bf16": {"param_dtype": BF16},
    "bf16, reduced in fp32": {"param_dtype": BF16, "reduce_dtype": FP32},
    "fp16": {"param_dtype": FP16, "buffer_dtype": FP16},
    "only reduced in bf16": {"reduce_dtype": BF16},
    "bf16, kept": {"param_dtype": BF16, "keep_low_precision_grads": True},
}


@pytest.mark.spec("MP-02", "MP-03", "MP-05", "MP-11")
@pytest.mark.parametrize("policy", POLICIES)
@three
@ranks(2)
def test_training_is_bit_by_bit_that_of_torch(strategy: ShardingStrategy, use_orig_params: bool, policy: str) -> None:
    ours = wrapped(
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
        mixed_precision=MixedPrecision(**POLICIES[policy]),
    )
    theirs = as_torch(
        seeded(),
        sharding_strategy=torch_fsdp.ShardingStrategy[strategy.name],
        use_orig_params=use_orig_params,
        mixed_precision=torch_fsdp.MixedPrecision(**POLICIES[policy]),
    )
    group = group_of(strategy)
    # No momentum: with gradients kept in low precision, its buffer would also be in low precision.
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, foreach=False) for each in (ours, theirs)]
    for step in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            # The first of two micro-batches is not reduced.
            with model.no_sync():
                iterate(model, 2 * step)
            iterate(model, 2 * step + 1)
        found = [whole(model, group=group)[1] for model in (ours, theirs)]
        assert_same(found[0], found[1], bitwise=True)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(whole(ours, group=group)[0], whole(theirs, group=group)[0], bitwise=True)


# --- storage ---


@pytest.mark.spec("MP-03")
@pairs
@ranks(2)
def test_between_computations_everything_is_stored_in_full_precision(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    precision = MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16)
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params, mixed_precision=precision)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def check() -> None:
        assert {parameter.dtype for parameter in model.parameters()} == {FP32}

    check()
    for step in range(3):
        with torch.no_grad():
            model(batch(step))
        check()
        loss = loss_of(model(batch(step)))
        if strategy is not SHARD_GRAD_OP:
            check()
        loss.backward()
        check()
        optimizer.step()
        optimizer.zero_grad()
        check()
    state = [value for of in optimizer.state.values() for key, value in of.items() if key.startswith("exp_")]
    assert len(state) >= 2 * len(UNITS) - 2
    assert {value.dtype for value in state} == {FP32}
    values = whole(model, group=group_of(strategy))[0]
    # Steps of 1e-4 are below the resolution of bfloat16 near 1. None of them was rounded away.
    plain = seeded()
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=1e-4)
    for step in range(3):
        for name, gradient in low_precision_gradients(plain, step).items():
            plain.get_parameter(name).grad = gradient
        plain_optimizer.step()
    torch.testing.assert_close(values, named(plain), rtol=1e-6, atol=1e-7)
    assert any((value.bfloat16().float() != value).any() for value in values.values())


def low_precision_gradients(plain: nn.Module, step: int) -> dict[str, Tensor]:
    """Like `expected_gradients`, for the current parameters of ``plain`` and one step."""
    of_ranks = []
    for rank in range(2):
        low = copy.deepcopy(plain).to(BF16)
        low.zero_grad()
        loss_of(low(batch(step, rank).to(BF16))).backward()
        of_ranks.append([parameter.grad for parameter in low.parameters()])
    names = [name for name, _ in plain.named_parameters()]
    return {name: ((a + b) / 2).float() for name, a, b in zip(names, *of_ranks, strict=True)}


@pytest.mark.spec("MP-03")
@pairs
@ranks(2)
def test_forward_uses_values_changed_by_optimizer(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    precision = MixedPrecision(param_dtype=BF16)
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params, mixed_precision=precision)
    expected = seeded()
    with torch.no_grad():
        model(batch())
        for parameter in (*model.parameters(), *expected.parameters()):
            parameter.add_(0.25)
        assert torch.equal(model(batch()), expected.bfloat16()(batch().bfloat16()))


# --- reduction ---


def reduced_in(model: FullyShardedDataParallel) -> dict[str, set[torch.dtype]]:
    """The dtypes that an iteration reduces, as recorded both by the tracer and by `Wire`, which must agree."""
    with trace.record() as recorder, Wire() as wire:
        iterate(model)
    for kind in ("RS", "AR"):
        assert {event.dtype for event in recorder.events if event.kind == kind} == wire.dtypes[kind]
    return {kind: wire.dtypes[kind] for kind in ("RS", "AR")}


REDUCTIONS = [
    ({"param_dtype": BF16, "reduce_dtype": BF16}, BF16),
    ({"param_dtype": BF16, "reduce_dtype": FP32}, FP32),
    ({"param_dtype": FP16, "reduce_dtype": BF16}, BF16),
    ({"param_dtype": BF16}, BF16),
    ({"param_dtype": FP16}, FP16),
    ({"reduce_dtype": BF16}, BF16),
    ({"reduce_dtype": FP16}, FP16),
    ({"buffer_dtype": BF16}, FP32),
]


@pytest.mark.spec("MP-05", "MP-06", "MP-07", "MP-08")
@pairs
@ranks(2)
def test_gradients_are_reduced_in_reduce_dtype_or_without_it_in_param_dtype(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    for policy, expected in REDUCTIONS:
        model = wrapped(
            sharding_strategy=strategy, use_orig_params=use_orig_params, mixed_precision=MixedPrecision(**policy)
        )
        # The dtype of the second iteration must not depend on the first.
        for _ in range(2):
            found = reduced_in(model)
            assert found == (
                {"RS": set(), "AR": {expected}} if strategy is NO_SHARD else {"RS": {expected}, "AR": set()}
            )


@pytest.mark.spec("MP-05")
@pytest.mark.parametrize("strategy", HYBRID_STRATEGIES)
@ranks(4)
def test_in_a_hybrid_both_reductions_run_in_reduce_dtype(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy, mixed_precision=MixedPrecision(param_dtype=BF16, reduce_dtype=FP16))
    assert reduced_in(model) == {"RS": {FP16}, "AR": {FP16}}


@pytest.mark.spec("MP-07", "MP-06")
@pairs
@ranks(2)
def test_low_precision_compute_with_full_precision_reduction_loses_nothing_in_the_sum(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    # bfloat16 can represent 1 and 1/512, but not their sum.
    own = torch.full((2,), 1.0 if dist.get_rank() == 0 else 2.0**-9, device=device())
    for reduce, mean in ((FP32, (1.0 + 2.0**-9) / 2), (BF16, 0.5), (None, 0.5)):
        model = FullyShardedDataParallel(
            Scale(2, value=1.0).to(device()),
            mixed_precision=MixedPrecision(param_dtype=BF16, reduce_dtype=reduce),
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
        )
        model(own).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad.dtype is FP32
            assert (parameter.grad == mean).all()


@pytest.mark.spec("MP-08")
@pairs
@ranks(2)
def test_with_only_reduce_dtype_compute_and_buffers_stay_in_full_precision(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    inner = list(probes())
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    model = probed(nn.Sequential(*inner), MixedPrecision(reduce_dtype=BF16), **options)
    assert model(ones()).dtype is FP32
    model(ones()).sum().backward()
    for probe in inner:
        dtypes = {probe.seen[key] for key in ("x", "weight", "weight in backward", "gradient", "scale")}
        assert dtypes == {FP32}
    model = wrapped(mixed_precision=MixedPrecision(reduce_dtype=BF16), **options)
    iterate(model)
    assert_same(whole(model, group=group_of(strategy))[1], expected_gradients(FP32, BF16), bitwise=True)


# --- buffers ---


@pytest.mark.spec("MP-09", "MP-17")
@pytest.mark.parametrize("with_gradients", [True, False])
@three
@ranks(2)
def test_floating_buffers_are_cast_permanently_at_the_first_forward(
    strategy: ShardingStrategy, use_orig_params: bool, with_gradients: bool
) -> None:
    model = nn.Sequential(*probes())
    model.register_buffer("own", torch.full((2, 3), 1.0 + 2.0**-10, device=device()))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model = probed(
        model,
        MixedPrecision(buffer_dtype=BF16),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )

    def found() -> dict[str, Tensor]:
        return {name.replace("_fsdp_wrapped_module.", ""): buffer for name, buffer in model.named_buffers()}

    assert_same(found(), before, bitwise=True)
    expected = {name: b.to(BF16) if b.is_floating_point() else b for name, b in before.items()}
    for _ in range(3):
        with torch.set_grad_enabled(with_gradients):
            output = model(ones())
        assert_same(found(), expected, bitwise=True)
        if with_gradients:
            output.sum().backward()
            assert_same(found(), expected, bitwise=True)
    assert {name: b.dtype for name, b in expected.items()} == {
        "own": BF16,
        **{f"{i}.{name}": dtype for i in range(2) for name, dtype in
           (("scale", BF16), ("count", torch.int64), ("mask", torch.bool))},
    }  # fmt: skip
    assert output.dtype is FP32, "parameters are another matter"


@pytest.mark.spec("MP-09")
@ranks(2)
def test_each_unit_has_its_own_buffer_dtype_and_ignored_modules_have_none() -> None:
    inner = probes(3)
    outer = nn.Sequential(
        FullyShardedDataParallel(inner[0], mixed_precision=MixedPrecision(buffer_dtype=BF16)),
        FullyShardedDataParallel(inner[1]),
        inner[2],
        ignored := Probe().to(device()),
    )
    model = FullyShardedDataParallel(
        outer, mixed_precision=MixedPrecision(buffer_dtype=FP16), ignored_modules=[ignored]
    )
    model(ones())
    assert [probe.scale.dtype for probe in (*inner, ignored)] == [BF16, FP32, FP16, FP32]


@pytest.mark.spec("MP-09")
@ranks(2)
def test_buffers_that_training_changes_stay_in_buffer_dtype() -> None:
    norm = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).to(device())
    model = FullyShardedDataParallel(norm, mixed_precision=MixedPrecision(param_dtype=BF16, buffer_dtype=BF16))
    for step in range(2):
        model(batch(step)).sum().backward()
        assert norm[0].running_mean.dtype is BF16
    assert norm[0].running_mean.any()
    assert (norm[0].running_mean.shape, int(norm[0].num_batches_tracked)) == ((6,), 2)


# --- the gradient that the optimizer uses ---


@pytest.mark.spec("MP-11")
@pytest.mark.parametrize(
    "policy", [{"param_dtype": BF16}, {"reduce_dtype": FP16}, {"param_dtype": FP16, "reduce_dtype": BF16}]
)
@three
@ranks(2)
def test_by_default_gradients_are_in_the_dtype_of_the_parameters(
    strategy: ShardingStrategy, use_orig_params: bool, policy: dict[str, Any]
) -> None:
    precision = MixedPrecision(**policy)
    for stored in (FP32, torch.float64):
        model = wrapped(
            seeded().to(stored),
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            mixed_precision=precision,
        )
        for step in range(2):
            model(batch(step).to(precision.param_dtype or stored)).sum().backward()
            found = [parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None]
            assert set(found) == {stored}
        torch.optim.Adam(model.parameters()).step()


@pytest.mark.spec("MP-12")
@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({"param_dtype": BF16}, BF16),
        ({"param_dtype": FP16}, FP16),
        ({"param_dtype": BF16, "reduce_dtype": FP16}, FP16),
        ({"param_dtype": BF16, "reduce_dtype": FP32}, FP32),
        ({"reduce_dtype": BF16}, BF16),
    ],
)
@three
@ranks(2)
def test_keep_low_precision_grads_keeps_the_reduction_dtype(
    strategy: ShardingStrategy, use_orig_params: bool, policy: dict[str, Any], kept: torch.dtype
) -> None:
    precision = MixedPrecision(**policy, keep_low_precision_grads=True)
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params, mixed_precision=precision)
    group = group_of(strategy)
    iterate(model)
    compute = precision.param_dtype or FP32
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {kept}
    gradients = {name: gradient.to(kept) for name, gradient in whole(model, group=group)[1].items()}
    expected = {name: gradient.to(kept) for name, gradient in expected_gradients(compute, kept).items()}
    assert_same(gradients, expected, bitwise=True)
    assert {parameter.dtype for parameter in model.parameters()} == {FP32}
    # An optimizer that supports this dtype can step: this one only multiplies and adds.
    before = whole(model, group=group)[0]
    torch.optim.SGD(model.parameters(), lr=0.5, foreach=False).step()
    after = whole(model, group=group)[0]
    stepped = {name: value.add(expected[name], alpha=-0.5) for name, value in before.items()}
    assert_same(after, stepped, bitwise=True)


@pytest.mark.spec("MP-12")
@pairs
@ranks(2)
def test_kept_gradients_accumulate_in_their_dtype(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    precision = MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True)
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params, mixed_precision=precision)
    for step in range(2):
        iterate(model, step)
    first, second = (expected_gradients(BF16, BF16, (step,)) for step in range(2))
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {BF16}
    expected = {name: (first[name].bfloat16() + second[name].bfloat16()).float() for name in first}
    gradients = whole(model, group=group_of(strategy))[1]
    assert_same({name: gradient.float() for name, gradient in gradients.items()}, expected, bitwise=True)


# --- inputs ---


def nested_inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Floating-point tensors at every depth, mixed with other objects."""
    args = (ones(), [ones(2).double(), {"deep": (ones(3), "text", None)}])
    return args, {"keyword": ones(4), "nested": {"list": [ones(5).half()]}, "number": 1.5}


@pytest.mark.spec("MP-13", "MP-16")
@pytest.mark.parametrize("cast_root_forward_inputs", [True, False])
@pytest.mark.parametrize("cast_forward_inputs", [True, False])
@either
@ranks(2)
def test_inner_unit_casts_inputs_only_with_option(
    use_orig_params: bool, cast_forward_inputs: bool, cast_root_forward_inputs: bool
) -> None:
    precision = MixedPrecision(
        param_dtype=BF16,
        cast_forward_inputs=cast_forward_inputs,
        cast_root_forward_inputs=cast_root_forward_inputs,
    )
    probe = Probe().to(device())

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(ones(1))
            self.inner = FullyShardedDataParallel(probe, mixed_precision=precision, use_orig_params=use_orig_params)

        def forward(self, args: Any, kwargs: Any) -> Tensor:
            return self.inner(*args, **kwargs) * self.own

    # The root has another precision and casts nothing, so only the inner unit can cast.
    model = FullyShardedDataParallel(Caller(), use_orig_params=use_orig_params)
    args, kwargs = nested_inputs()
    for _ in range(2):
        model(args, kwargs).sum().backward()
        assert probe.seen["weight"] is BF16
        if cast_forward_inputs:
            assert probe.seen["x"] is BF16
            assert probe.seen["args"] == [BF16, BF16]
            assert probe.seen["kwargs"] == [BF16, BF16]
        else:
            assert probe.seen["x"] is FP32
            assert probe.seen["args"] == [torch.float64, FP32]
            assert probe.seen["kwargs"] == [FP32, FP16]
    assert args[1][0].dtype is torch.float64, "the caller's own tensors stay what they are"


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


ROOT_COMBINATIONS = [(True, False), (True, True), (False, False), (False, True)]


@pytest.mark.spec("MP-14", "MP-15")
@pytest.mark.parametrize(("on_root", "elsewhere"), ROOT_COMBINATIONS)
@three
@ranks(2)
def test_cast_root_forward_inputs_alone_decides_for_the_root(
    strategy: ShardingStrategy, use_orig_params: bool, on_root: bool, elsewhere: bool
) -> None:
    probe = Probe().to(device())
    model = FullyShardedDataParallel(
        probe,
        mixed_precision=MixedPrecision(
            param_dtype=BF16, cast_root_forward_inputs=on_root, cast_forward_inputs=elsewhere
        ),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )
    args, kwargs = nested_inputs()
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            model(*args, **kwargs)
        if on_root:
            assert probe.seen["x"] is BF16
            assert probe.seen["args"] == probe.seen["kwargs"] == [BF16, BF16]
        else:
            assert probe.seen["x"] is FP32
            assert probe.seen["args"] == [torch.float64, FP32]
            assert probe.seen["kwargs"] == [FP32, FP16]


@pytest.mark.spec("MP-14")
@pytest.mark.parametrize("options", [{}, {"cast_forward_inputs": True}])
@ranks(2)
def test_by_default_the_root_casts_its_inputs(options: dict[str, bool]) -> None:
    model = wrapped(mixed_precision=MixedPrecision(param_dtype=BF16, **options))
    assert model(batch()).dtype is BF16
    model = wrapped(mixed_precision=MixedPrecision(reduce_dtype=BF16, **options))
    assert model(batch().double().float()).dtype is FP32, "without a dtype to compute in there is none to cast to"


@pytest.mark.spec("MP-14")
@ranks(2)
def test_a_root_without_parameters_of_its_own_casts_its_inputs_too() -> None:
    inner = list(probes())
    model = probed(nn.Sequential(*inner), MixedPrecision(param_dtype=BF16))
    model(ones())
    assert inner[0].seen["x"] is BF16


@pytest.mark.spec("MP-14")
@pytest.mark.parametrize("use_reentrant", [True, False])
@three
@ranks(2)
def test_a_root_that_is_recomputed_in_backward_casts_its_inputs_again(
    strategy: ShardingStrategy, use_orig_params: bool, use_reentrant: bool
) -> None:
    precision = MixedPrecision(param_dtype=BF16)
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params, mixed_precision=precision)
    x = batch().requires_grad_()
    loss_of(checkpoint(model, x, use_reentrant=use_reentrant)).backward()
    gradients = whole(model, group=group_of(strategy))[1]
    assert_same(gradients, expected_gradients(BF16, BF16), bitwise=True)


@pytest.mark.spec("MP-14")
@ranks(2)
def test_the_gradient_of_a_cast_input_has_the_dtype_of_the_input() -> None:
    x = batch().requires_grad_()
    loss_of(wrapped(mixed_precision=MixedPrecision(param_dtype=BF16))(x)).backward()
    plain, low = seeded().bfloat16(), batch().bfloat16().requires_grad_()
    loss_of(plain(low)).backward()
    assert x.grad.dtype is FP32
    assert torch.equal(x.grad, low.grad.float())


@pytest.mark.spec("MP-17")
@pytest.mark.parametrize("is_root", [True, False])
@ranks(2)
def test_only_floating_point_inputs_are_cast(is_root: bool) -> None:
    others = [torch.ones(2, dtype=dtype, device=device()) for dtype in (torch.int64, torch.bool, torch.uint8)]
    probe = Probe().to(device())
    precision = MixedPrecision(param_dtype=BF16, cast_forward_inputs=True)
    model = FullyShardedDataParallel(probe, mixed_precision=precision)
    if not is_root:

        class Pass(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, *args: Any, **kwargs: Any) -> Tensor:
                return self.inner(*args, **kwargs)

        model = FullyShardedDataParallel(Pass())
    model(ones(), others, ones(3), mask=others[1], tokens=[others[0]], x2=ones(4))
    assert probe.seen["x"] is BF16
    assert probe.seen["args"] == [torch.int64, torch.bool, torch.uint8, BF16]
    assert probe.seen["kwargs"] == [torch.bool, torch.int64, BF16]


@pytest.mark.spec("MP-17")
@ranks(2)
def test_token_ids_are_not_cast_before_an_embedding() -> None:
    model = nn.Sequential(nn.Embedding(1000, 6), nn.Linear(6, 2)).to(device())
    expected = copy.deepcopy(model).bfloat16()
    # bfloat16 cannot represent 257 and 999.
    tokens = torch.tensor([[257, 999, 1]], device=device())
    wrapped_model = FullyShardedDataParallel(model, mixed_precision=MixedPrecision(param_dtype=BF16))
    assert torch.equal(wrapped_model(tokens), expected(tokens))


# --- unsharded parameters ---


@pytest.mark.spec("MP-18")
@pairs
@ranks(2)
def test_summoned_parameters_are_in_full_precision_and_buffers_in_buffer_dtype(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    expected = {n: p.detach().clone() for n, p in probes().named_parameters()}
    with torch.no_grad():
        for value in expected.values():
            value.add_(2.0**-12)
    model = probed(
        probes(),
        MixedPrecision(param_dtype=BF16, reduce_dtype=BF16, buffer_dtype=BF16),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(2.0**-12)  # a change too small for bfloat16
    for _ in range(2):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            assert_same(named(model), expected, bitwise=True)
            dtypes = {name.rpartition(".")[2]: buffer.dtype for name, buffer in model.named_buffers()}
        model(ones()).sum().backward()
        model.zero_grad()
    assert dtypes == {"scale": BF16, "count": torch.int64, "mask": torch.bool}


# --- units with different precision ---


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


@pytest.mark.spec("MP-23")
@ranks(2)
def test_separately_wrapped_norms_have_separate_collectives() -> None:
    counts = {}
    for classes in ({Normed}, {Normed, nn.LayerNorm}):
        model = FullyShardedDataParallel(
            nn.Sequential(Normed(), Normed()).to(device()),
            auto_wrap_policy=ModuleWrapPolicy(classes),
            mixed_precision=MixedPrecision(param_dtype=BF16),
        )
        iterate(model)
        with trace.record() as recorder:
            iterate(model)
        counts[len(classes)] = (recorder.count("AG"), recorder.count("RS"))
        if len(classes) == 2:
            assert of_unit(recorder, "0.norm", "AG", "RS") == ["AG", "AG", "RS"]
            assert of_unit(recorder, "0", "AG", "RS") == ["AG", "AG", "RS"]
    assert counts == {1: (4, 2), 2: (8, 4)}


def two_children(first_is_unit: bool) -> tuple[FullyShardedDataParallel, Probe | nn.Module, Probe | nn.Module]:
    """An outer bfloat16 unit with two children, one of which is a float16 unit."""
    children = [nn.Linear(6, 6).to(device()), nn.Linear(6, 6).to(device())]
    low = MixedPrecision(param_dtype=FP16, cast_forward_inputs=True)
    index = 0 if first_is_unit else 1
    layers: list[nn.Module] = list(children)
    layers[index] = FullyShardedDataParallel(children[index], mixed_precision=low)
    outer = MixedPrecision(param_dtype=BF16, cast_forward_inputs=True)
    return FullyShardedDataParallel(nn.Sequential(*layers), mixed_precision=outer), *children


@pytest.mark.spec("MP-24")
@ranks(2)
def test_nested_units_each_compute_in_their_own_precision() -> None:
    model, first, second = two_children(first_is_unit=False)
    seen = []
    for child in (first, second):
        child.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.weight.dtype)))
    for _ in range(2):
        seen.clear()
        output = model(batch())
        assert output.dtype is FP16
        output.float().square().mean().backward()
        assert seen == [(BF16, BF16), (FP16, FP16)]
    assert {parameter.grad.dtype for parameter in model.parameters()} == {FP32}


@pytest.mark.spec("MP-25")
@ranks(2)
def test_child_after_a_unit_of_another_precision_gets_the_output_dtype_and_fails() -> None:
    model, _, second = two_children(first_is_unit=True)
    seen = []
    second.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.weight.dtype)))
    with pytest.raises(RuntimeError, match="dtype"):
        model(batch())
    assert seen == [(FP16, BF16)]


# --- which dtypes, and when ---


@pytest.mark.spec("MP-26")
@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "buffer_dtype"])
@flat_strategies
@ranks(2)
def test_every_field_takes_the_three_common_dtypes(strategy: ShardingStrategy, field: str) -> None:
    for dtype in (FP16, BF16, FP32):
        model = wrapped(sharding_strategy=strategy, mixed_precision=MixedPrecision(**{field: dtype}))
        output = model(batch())
        assert output.dtype is (dtype if field == "param_dtype" else FP32)
        loss_of(output).backward()
        reduce = FP32 if field == "buffer_dtype" else dtype
        expected = expected_gradients(output.dtype, reduce)
        assert_same(whole(model, group=group_of(strategy))[1], expected, bitwise=True)


@pytest.mark.spec("MP-26")
@three
@ranks(2)
def test_mixed_precision_of_float32_equals_no_mixed_precision(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    trained = []
    for precision in (None, MixedPrecision(FP32, FP32, FP32)):
        model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params, mixed_precision=precision)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            iterate(model, step)
            optimizer.step()
        trained.append(full_values(model))
    assert_same(trained[0], trained[1], bitwise=True)


@pytest.mark.spec("MP-28")
@three
@ranks(2)
def test_evaluation_runs_in_low_precision_too(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    inner = list(probes())
    model = probed(
        nn.Sequential(*inner),
        MixedPrecision(param_dtype=BF16, buffer_dtype=BF16),
        sharding_strategy=strategy,
        use_orig_params=use_orig_params,
    )
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            assert model.eval()(ones()).dtype is BF16
        assert inner[0].seen["x"] is inner[0].seen["weight"] is inner[0].seen["scale"] is BF16
    assert model.train()(ones()).dtype is BF16
    blocks = wrapped(sharding_strategy=strategy, mixed_precision=MixedPrecision(param_dtype=BF16)).eval()
    with torch.no_grad():
        assert torch.equal(blocks(batch()), seeded().bfloat16()(batch().bfloat16()))


@pytest.mark.spec("MP-02", "MP-05")
@pytest.mark.parametrize("strategy", [FULL_SHARD, HYBRID_SHARD])
@ranks(4)
def test_on_four_ranks_low_precision_gradients_are_near_those_of_full_precision(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy, mixed_precision=MixedPrecision(param_dtype=BF16, reduce_dtype=FP32))
    iterate(model)
    group = model.process_group if strategy is HYBRID_SHARD else None
    expected = expected_gradients(BF16, FP32, num_ranks=4)
    torch.testing.assert_close(whole(model, group=group)[1], expected, rtol=1e-5, atol=1e-6)


@ranks(2)
def check_made_double(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params).double()
    plain = seeded().double()
    x = [batch(rank=rank).double() for rank in range(2)]
    for one, inputs in ((model, x[dist.get_rank()]), (plain, torch.cat(x))):
        optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
        one(inputs).square().mean().backward()
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.spec("MP-05")
def test_gradients_of_a_model_made_double_after_wrapping_are_reduced_in_double(use_orig_params: bool) -> None:
    check_made_double(use_orig_params=use_orig_params)


@ranks(2)
def check_made_double_and_written(use_orig_params: bool) -> None:
    model = wrapped(use_orig_params=use_orig_params).double()
    plain = seeded().double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    written = model.state_dict()
    assert all(torch.equal(written[name], value) for name, value in plain.state_dict().items())
    assert {value.dtype for value in written.values()} == {torch.float64}
    with FullyShardedDataParallel.summon_full_params(model):
        assert {p.dtype for p in model.parameters()} == {torch.float64}


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.spec("SD-FULL-01")
def test_model_converted_to_double_after_wrapping_is_saved_in_double_before_its_first_forward(
    use_orig_params: bool,
) -> None:
    check_made_double_and_written(use_orig_params=use_orig_params)
