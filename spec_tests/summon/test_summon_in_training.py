"""``summon_full_params`` and training: gradients inside it, the times when it is refused, and training after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of
from spec_tests.models.sharding import FLAT_STRATEGIES, FULL_SHARD, HYBRID_STRATEGIES, NO_SHARD, SHARD_GRAD_OP, wrapped
from spec_tests.models.values import assert_same, full_values, mean_gradients, named
from spec_tests.models.whole import by_name
from spec_tests.subject import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

summon = FullyShardedDataParallel.summon_full_params
either = pytest.mark.parametrize("use_orig_params", [False, True])
# Strategies and parameter forms that behave differently from each other, instead of all combinations.
three = pytest.mark.parametrize(
    ("strategy", "use_orig_params"), [(FULL_SHARD, False), (SHARD_GRAD_OP, True), (NO_SHARD, True)]
)


# --- with gradients ---


@pytest.mark.spec("SUMMON-15", "ORIG-10")
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, *HYBRID_STRATEGIES])
@ranks(4)
def test_gradients_are_summoned_in_their_original_shapes(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    with summon(model, with_grads=True):
        assert all(parameter.grad is None for parameter in model.parameters())
    iterate(model)
    before = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    for options in ({"writeback": False}, {}, {"writeback": False, "rank0_only": True}):
        with summon(model, with_grads=True, **options):
            if dist.get_rank() == 0 or "rank0_only" not in options:
                gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
                assert_same(gradients, mean_gradients(seeded()))
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) is (before[name] is None)
        assert parameter.grad is None or torch.equal(parameter.grad, before[name])


@pytest.mark.spec("SUMMON-15")
@ranks(2)
def test_gradients_of_another_dtype_are_summoned() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = wrapped(mixed_precision=precision, use_orig_params=True)
    iterate(model)
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with summon(model, with_grads=True):
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert (parameter.dtype, parameter.grad.dtype) == (torch.float32, torch.bfloat16)
            assert parameter.grad.shape == parameter.shape
    after = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], gradient) for name, gradient in before.items())


@pytest.mark.spec("SUMMON-15", "NOSYNC-10")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(2)
def test_gradients_that_were_never_reduced_cannot_be_summoned(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    with model.no_sync():
        iterate(model)
    with pytest.raises(RuntimeError, match="never reduced"), summon(model, with_grads=True):
        raise AssertionError("not to be entered")
    iterate(model, 1)
    with summon(model, with_grads=True):
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        assert_same(gradients, mean_gradients(seeded(), (0, 1)))


@pytest.mark.spec("SUMMON-15")
@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_gradient_changes_are_written_back_on_request(strategy: ShardingStrategy, writeback: bool) -> None:
    """A new tensor in ``.grad`` is a change like any other, as is new storage for a parameter."""
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    model.module.blocks[1].requires_grad_(False)
    iterate(model)
    by_name(model)["leave.bias"].grad = None
    expected = {name: g for name, g in mean_gradients(seeded()).items() if "blocks.1." not in name}
    del expected["leave.bias"]
    with summon(model, with_grads=True, writeback=writeback):
        inside = by_name(model)
        assert {name for name, parameter in inside.items() if parameter.grad is not None} == set(expected)
        for name in expected:
            if "blocks" in name:
                inside[name].grad.mul_(2.0)
            else:
                inside[name].grad = inside[name].grad * 2.0
        inside["leave.weight"].grad = None
        inside["leave.bias"].grad = torch.full_like(inside["leave.bias"], 3.0)
        threes = inside["leave.bias"].grad.clone()
    # Without sharding, the user changes the gradients themselves, so the changes persist.
    if writeback or strategy is NO_SHARD:
        expected = {name: 2.0 * gradient for name, gradient in expected.items() if name != "leave.weight"}
        expected["leave.bias"] = threes
    with summon(model, with_grads=True):
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert_same(found, expected, bitwise=True)


@pytest.mark.spec("SUMMON-15")
@ranks(2)
def test_gradients_cannot_be_summoned_from_flat_parameters_or_to_the_cpu() -> None:
    flat, original = wrapped(), wrapped(use_orig_params=True)
    refused = (flat, {}, "use_orig_params=True"), (original, {"offload_to_cpu": True}, "offload_to_cpu")
    for model, options, remedy in refused:
        iterate(model)
        before = named(model)
        with (
            Wire() as wire,
            pytest.raises(NotImplementedError, match=remedy),
            summon(model, with_grads=True, **options),
        ):
            pass
        assert wire.sent == [], "it is refused before any collective"
        assert_same(named(model), before, bitwise=True)
    with summon(flat, writeback=False):
        assert_same(named(flat), named(seeded()), bitwise=True)


# --- invalid calls ---


def rootless(**options: Any) -> FullyShardedDataParallel:
    """Two units inside a root without parameters. Between the two units there is a time when no unit computes."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    for index in (0, 2):
        model[index] = FullyShardedDataParallel(model[index], **options)
    return FullyShardedDataParallel(model, **options)


def with_root(**options: Any) -> FullyShardedDataParallel:
    return wrapped(**options)


models = pytest.mark.parametrize("build", [with_root, rootless])


def middle_of(model: FullyShardedDataParallel) -> nn.Module:
    """A module that runs in the middle of forward."""
    return model.module[1] if isinstance(model.module, nn.Sequential) else model.module.blocks[1].module.linear


def check_it_still_trains(model: FullyShardedDataParallel, build: Callable[..., Any]) -> None:
    """Checks that the next iteration gives the same result as the first one of a fresh model."""
    fresh = build(sharding_strategy=model.sharding_strategy, use_orig_params=model._use_orig_params)
    model.zero_grad()
    for each in (model, fresh):
        loss_of(each(batch())).backward()
    for (name, ours), (_, expected) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(ours, expected), name
        assert (ours.grad is None) is (expected.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, expected.grad), name


@pytest.mark.spec("SUMMON-16")
@models
@three
@ranks(2)
def test_summon_cannot_be_entered_during_forward_or_backward(
    strategy: ShardingStrategy, use_orig_params: bool, build: Callable[..., FullyShardedDataParallel]
) -> None:
    """Fails if a unit that is not computing counts as idle while the root is in forward or backward."""
    model = build(sharding_strategy=strategy, use_orig_params=use_orig_params)
    refused: list[str] = []

    def try_all_units(moment: str) -> None:
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            with pytest.raises(RuntimeError, match=r"rank \d.*forward.*backward"), summon(unit, writeback=False):
                pass
        refused.append(moment)

    def in_forward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        try_all_units("forward")
        if output.requires_grad:
            output.register_hook(lambda _: try_all_units("backward"))

    hook = middle_of(model).register_forward_hook(in_forward)
    loss = loss_of(model(batch()))
    # The backward of the loss has not reached the model.
    loss.register_hook(lambda _: try_all_units("loss"))
    loss.backward()
    with torch.no_grad():
        model(batch())
    assert refused == ["forward", "loss", "backward", "forward"]
    hook.remove()
    check_it_still_trains(model, build)


@pytest.mark.spec("SUMMON-17")
@models
@pytest.mark.parametrize("options", [{}, {"writeback": False, "rank0_only": True}])
@three
@ranks(2)
def test_inside_no_backward_can_be_started(
    strategy: ShardingStrategy,
    options: dict[str, bool],
    use_orig_params: bool,
    build: Callable[..., FullyShardedDataParallel],
) -> None:
    model = build(sharding_strategy=strategy, use_orig_params=use_orig_params)
    loss = loss_of(model(batch()))
    with summon(model, **options), Wire() as wire:
        with pytest.raises(RuntimeError, match=r"rank \d.*backward.*summon"):
            loss.backward()
        assert wire.sent == [], "at once"
    check_it_still_trains(model, build)


@pytest.mark.spec("SUMMON-18")
@pytest.mark.parametrize("options", [{}, {"writeback": False, "rank0_only": True}])
@three
@ranks(2)
def test_summon_cannot_be_entered_twice(
    strategy: ShardingStrategy, options: dict[str, bool], use_orig_params: bool
) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    block = model.module.blocks[2]
    for outer, inner in ((model, model), (model, block), (block, model), (block, block)):
        with summon(outer, **options):
            during = named(model)
            with Wire() as wire, pytest.raises(RuntimeError, match="already"), summon(inner, **options):
                pass
            assert wire.sent == []
            assert_same(named(model), during, bitwise=True)
    check_it_still_trains(model, with_root)


@pytest.mark.spec("SUMMON-18")
@ranks(2)
def test_different_units_can_be_summoned_one_inside_the_other() -> None:
    model = wrapped()
    first, second = model.module.blocks[0], model.module.blocks[1]
    with summon(first), summon(second), torch.no_grad():
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.add_(1.0)
    expected = {n: v + 1.0 if n.startswith(("blocks.0", "blocks.1")) else v for n, v in named(seeded()).items()}
    assert_same(full_values(model), expected, bitwise=True)


# --- inspection ---


@pytest.mark.spec("SUMMON-20")
@either
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, *HYBRID_STRATEGIES])
@ranks(4)
def test_summoning_at_any_time_does_not_change_training(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    def train(look: Callable[[FullyShardedDataParallel], None]) -> dict[str, Tensor]:
        model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                iterate(model, 10 + step)
            look(model)
            loss = loss_of(model(batch(step)))
            look(model)
            loss.backward()
            look(model)
            optimizer.step()
            look(model)
        return full_values(model)

    seen: list[float] = []

    def summon_in_each_way(model: FullyShardedDataParallel) -> None:
        for options in ({"writeback": False}, {}, {"writeback": False, "rank0_only": True}):
            with summon(model, **options):
                seen.append(sum(float(p.sum()) for p in model.parameters()))

    assert_same(train(summon_in_each_way), train(lambda model: None), bitwise=True)
    assert len(seen) == 36


@pytest.mark.spec("SUMMON-16")
@either
@ranks(2)
def test_an_idle_model_is_not_summoned_in_the_backward_of_another_one(use_orig_params: bool) -> None:
    teacher, student = wrapped(use_orig_params=use_orig_params), seeded()
    moments = []

    def look(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match="backward"), summon(teacher):
            pass
        moments.append("backward")

    output = student(batch())
    output.register_hook(look)
    loss_of(output).backward()
    assert moments == ["backward"]
    iterate(teacher)
