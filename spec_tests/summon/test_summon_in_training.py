"""``summon_full_params`` and training: gradients inside it, the times when it is refused, and training after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from spec_tests.harness import ranks
from spec_tests.models import apis, running, values
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.subject import FullyShardedDataParallel, MixedPrecision

summon = FullyShardedDataParallel.summon_full_params
batch, iterate, Wire = running.batch, running.iterate, running.Wire
# Strategies and parameter forms that behave differently from each other, instead of all combinations.
three = apis.settings_of(
    (apis.WRAPPED, apis.FULL_SHARD), (apis.ORIGINALS, apis.SHARD_GRAD_OP), (apis.ORIGINALS, apis.NO_SHARD)
)
flat_strategies = pytest.mark.parametrize("strategy", apis.FLAT_STRATEGIES)
strategies = pytest.mark.parametrize("strategy", [*apis.FLAT_STRATEGIES, *apis.HYBRID_STRATEGIES])
each_rank_or_rank_0 = pytest.mark.parametrize("options", [{}, {"writeback": False, "rank0_only": True}])


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that exist. Inside the context they are the unsharded ones."""
    found = values.flat_parameters(model).items()
    return {name: parameter.grad.clone() for name, parameter in found if parameter.grad is not None}


# --- with gradients ---


@pytest.mark.spec("SUMMON-15", "ORIG-10")
@strategies
@ranks(4)
def test_gradients_are_summoned_in_their_original_shapes(strategy: Any) -> None:
    model = apis.ORIGINALS.shard(strategy=strategy)
    with summon(model, with_grads=True):
        assert gradients_of(model) == {}
    iterate(model)
    before = gradients_of(model)
    for options in ({"writeback": False}, {}, {"writeback": False, "rank0_only": True}):
        with summon(model, with_grads=True, **options):
            if dist.get_rank() == 0 or "rank0_only" not in options:
                values.assert_same(gradients_of(model), values.mean_gradients(seeded()))
    assert_close(gradients_of(model), before, rtol=0, atol=0)


@pytest.mark.spec("SUMMON-15")
@ranks(2)
def test_gradients_of_another_dtype_are_summoned() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = apis.ORIGINALS.shard(mixed_precision=precision)
    iterate(model)
    before = gradients_of(model)
    with summon(model, with_grads=True):
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert (parameter.dtype, parameter.grad.dtype) == (torch.float32, torch.bfloat16)
            assert parameter.grad.shape == parameter.shape
    assert_close(gradients_of(model), before, rtol=0, atol=0)


@pytest.mark.spec("SUMMON-15", "NOSYNC-10")
@pytest.mark.parametrize("strategy", apis.FLAT_STRATEGIES[:2])
@ranks(2)
def test_gradients_that_were_never_reduced_cannot_be_summoned(strategy: Any) -> None:
    model = apis.ORIGINALS.shard(strategy=strategy)
    with model.no_sync():
        iterate(model)
    with pytest.raises(RuntimeError, match="never reduced"), summon(model, with_grads=True):
        raise AssertionError("not to be entered")
    iterate(model, 1)
    with summon(model, with_grads=True):
        values.assert_same(gradients_of(model), values.mean_gradients(seeded(), (0, 1)))


@pytest.mark.spec("SUMMON-15")
@pytest.mark.parametrize("writeback", [True, False])
@flat_strategies
@ranks(2)
def test_gradient_changes_are_written_back_on_request(strategy: Any, writeback: bool) -> None:
    """A new tensor in ``.grad`` is a change like any other, as is new storage for a parameter."""
    model = apis.ORIGINALS.shard(strategy=strategy)
    model.module.blocks[1].requires_grad_(False)
    iterate(model)
    model.module.leave.bias.grad = None
    expected = values.mean_gradients(seeded())
    for name in ("leave.bias", "blocks.1.linear.weight", "blocks.1.linear.bias"):
        del expected[name]
    with summon(model, with_grads=True, writeback=writeback):
        assert gradients_of(model).keys() == expected.keys()
        for name, parameter in values.flat_parameters(model).items():
            if "blocks" not in name:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.mul_(2.0)
        leave, enter = model.module.leave, model.module.enter
        threes = torch.full_like(leave.bias, 3.0)
        leave.bias.grad = threes.clone()
        enter.weight.grad = 2.0 * expected["enter.weight"]
    # Without sharding, the user changes the gradients themselves, so the changes persist.
    if writeback or strategy is apis.NO_SHARD:
        del expected["enter.bias"], expected["leave.weight"]
        expected = {name: 2.0 * gradient for name, gradient in expected.items()}
        expected["leave.bias"] = threes
    with summon(model, with_grads=True):
        values.assert_same(gradients_of(model), expected)


@pytest.mark.spec("SUMMON-15")
@pytest.mark.parametrize(
    ("api", "options", "remedy"),
    [(apis.WRAPPED, {}, "use_orig_params=True"), (apis.ORIGINALS, {"offload_to_cpu": True}, "offload_to_cpu")],
    ids=["flat", "to the CPU"],
)
@ranks(2)
def test_gradients_cannot_be_summoned_from_flat_parameters_or_to_the_cpu(api: Any, options: Any, remedy: str) -> None:
    model = api.shard()
    iterate(model)
    before = values.named(model)
    with Wire() as wire, pytest.raises(NotImplementedError, match=remedy):
        summon(model, with_grads=True, **options).__enter__()
    assert wire.sent == [], "it is refused before any collective"
    values.assert_same(values.named(model), before)
    with summon(model, writeback=False):
        values.assert_same(values.named(model), values.named(seeded()))


# --- invalid calls ---


def build_with_root() -> nn.Module:
    return seeded()


def build_rootless() -> nn.Module:
    """Two units inside a root without parameters. Between the two units there is a time when no unit computes."""
    first, second, *_ = seeded().blocks
    return nn.Sequential(first, nn.Tanh(), second)


models = pytest.mark.parametrize("build", [build_with_root, build_rootless])


@pytest.mark.spec("SUMMON-16")
@models
@three
@ranks(2)
def test_summon_cannot_be_entered_during_forward_or_backward(api: Any, strategy: Any, build: Any) -> None:
    """Fails if a unit that is not computing counts as idle while the root is in forward or backward."""
    model = api.shard(build(), strategy=strategy)
    middle = model.module[1] if build is build_rootless else model.module.blocks[1].module.linear
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

    hook = middle.register_forward_hook(in_forward)
    loss = running.loss_of(model(batch()))
    # The backward of the loss has not reached the model.
    loss.register_hook(lambda _: try_all_units("loss"))
    loss.backward()
    with torch.no_grad():
        model(batch())
    assert refused == ["forward", "loss", "backward", "forward"]
    hook.remove()
    model.zero_grad()
    assert_trains_like(model, build())


@pytest.mark.spec("SUMMON-17")
@models
@each_rank_or_rank_0
@three
@ranks(2)
def test_inside_no_backward_can_be_started(api: Any, strategy: Any, options: Any, build: Any) -> None:
    model = api.shard(build(), strategy=strategy)
    loss = running.loss_of(model(batch()))
    with summon(model, **options), Wire() as wire:
        with pytest.raises(RuntimeError, match=r"rank \d.*backward.*summon"):
            loss.backward()
        assert wire.sent == [], "at once"
    model.zero_grad()
    assert_trains_like(model, build())


@pytest.mark.spec("SUMMON-18")
@each_rank_or_rank_0
@three
@ranks(2)
def test_summon_cannot_be_entered_twice(api: apis.Api, strategy: Any, options: Any) -> None:
    model = api.shard(strategy=strategy)
    block = model.module.blocks[2]
    for outer, inner in ((model, model), (model, block), (block, model), (block, block)):
        with summon(outer, **options):
            during = values.named(model)
            with Wire() as wire, pytest.raises(RuntimeError, match="already"), summon(inner, **options):
                pass
            assert wire.sent == []
            values.assert_same(values.named(model), during)
    assert_trains_like(model)


@pytest.mark.spec("SUMMON-18")
@ranks(2)
def test_different_units_can_be_summoned_one_inside_the_other() -> None:
    model, plain = apis.WRAPPED.shard(), seeded()
    first, second, *_ = model.module.blocks
    with summon(first), summon(second), torch.no_grad():
        for parameter in (*first.parameters(), *second.parameters(), *plain.blocks[:2].parameters()):
            parameter.add_(1.0)
    values.assert_same(values.full_values(model), values.named(plain))


# --- inspection ---


@pytest.mark.spec("SUMMON-20")
@strategies
@apis.wrapper_apis
@ranks(4)
def test_summoning_at_any_time_does_not_change_training(api: apis.Api, strategy: Any) -> None:
    def train(look: Callable[[Any], None]) -> dict[str, Tensor]:
        model = api.shard(strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                iterate(model, 10 + step)
            look(model)
            loss = running.loss_of(model(batch(step)))
            look(model)
            loss.backward()
            look(model)
            optimizer.step()
            look(model)
        return api.values(model)

    seen: list[float] = []

    def summon_in_each_way(model: Any) -> None:
        for options in ({"writeback": False}, {}, {"writeback": False, "rank0_only": True}):
            with summon(model, **options):
                seen.append(sum(float(p.sum()) for p in model.parameters()))

    values.assert_same(train(summon_in_each_way), train(lambda model: None), bitwise=True)
    assert len(seen) == 3 * 4 * 3, "steps, moments in a step, and ways"


@pytest.mark.spec("SUMMON-16")
@apis.wrapper_apis
@ranks(2)
def test_an_idle_model_is_not_summoned_in_the_backward_of_another_one(api: apis.Api) -> None:
    teacher, moments = api.shard(), []

    def look(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match="backward"), summon(teacher):
            pass
        moments.append("backward")

    output = seeded()(batch())
    output.register_hook(look)
    running.loss_of(output).backward()
    assert moments == ["backward"]
    iterate(teacher)
