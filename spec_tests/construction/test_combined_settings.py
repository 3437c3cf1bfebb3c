"""Settings that few programs combine, and calls at rare moments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import ranks
from spec_tests.meshes.test_tensor_parallel import Layer, built, full_values, mine, train
from spec_tests.models import values
from spec_tests.models.modules import WIDTH, Block, seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import FLAT_STRATEGIES, wrapped
from spec_tests.models.values import assert_same
from spec_tests.subject import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    fully_shard,
)

FSDP = FullyShardedDataParallel
flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])


@pytest.mark.spec("MP-12", "OFF-03")
@flat_or_original
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_offloaded_gradients_keep_the_dtype_of_the_reduction_on_request(strategy: ShardingStrategy, keep: bool) -> None:
    precision = MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)
    model = wrapped(
        sharding_strategy=strategy, use_orig_params=keep, mixed_precision=precision, cpu_offload=CPUOffload(True)
    )
    for step in range(2):
        loss_of(model(batch(step))).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert {(gradient.dtype, gradient.device.type) for gradient in gradients} == {(torch.bfloat16, "cpu")}


@pytest.mark.spec("NEW-01", "ORIG-13")
@pytest.mark.filterwarnings("ignore:.*frozen")
@ranks(4)
def test_frozen_tensor_parallel_parameters_are_not_trained() -> None:
    def freeze_first(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        # The policy sees each layer after tensor parallelism and before it is wrapped.
        if isinstance(module, Layer):
            module.up.requires_grad_(False)
        return recurse or isinstance(module, Layer)

    model = built(use_orig_params=True, auto_wrap_policy=freeze_first)
    before = full_values(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model(mine(step))).backward()
        ups = [parameter for name, parameter in model.named_parameters() if ".up." in name]
        assert [(parameter.requires_grad, parameter.grad) for parameter in ups] == [(False, None)] * 4
        optimizer.step()
        optimizer.zero_grad()
    after = full_values(model)
    assert {name for name in before if torch.equal(before[name], after[name])} == {n for n in before if ".up." in n}


class Turned(nn.Module):
    """A unit that returns a view of the result of its last operation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(x)).view(-1, WIDTH)


class Overwriting(nn.Module):
    """Changes views that its units return in place. Nothing else uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Turned(), Turned()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.mul_(2.0)
        z = self.last(y)
        z.add_(1.0)
        return z


def by_fully_shard(reshard: bool) -> Any:
    model: Any = seeded(Overwriting)
    for unit in (model.first, model.last):
        fully_shard(unit, reshard_after_forward=reshard)
    return fully_shard(model)


@pytest.mark.spec("FWD-06", "SHARD-04", "FS2-13")
@ranks(2)
def test_a_view_that_a_unit_returns_may_be_changed_in_place_by_its_caller() -> None:
    policy, expected = ModuleWrapPolicy({Turned}), seeded(Overwriting)
    train(expected, lambda step: [batch(step, rank) for rank in range(2)])
    models = [by_fully_shard(reshard) for reshard in (True, False)]
    for strategy in FLAT_STRATEGIES:
        for keep in (False, True):
            options: Any = {"sharding_strategy": strategy, "use_orig_params": keep, "auto_wrap_policy": policy}
            models.append(FSDP(seeded(Overwriting), **options))
    for model in models:
        train(model, lambda step: [batch(step)])
        assert_same(values.full_values(model), values.named(expected), bitwise=False)


class Tied(nn.Module):
    """Two blocks that share a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks[1].linear.bias = self.blocks[0].linear.bias

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.spec("IGN-04", "IGN-10")
@flat_or_original
@ranks(2)
def test_an_ignored_parameter_may_be_tied_between_units(keep: bool) -> None:
    plain: Any = seeded(Tied)
    shared = plain.blocks[0].linear.bias
    model = wrapped(plain, ignored_states=[shared], use_orig_params=keep)
    reference: Any = seeded(Tied)
    for step in range(2):
        loss_of(model(batch(step))).backward()
        loss_of(reference(batch(step))).backward()
        assert all(block.linear.bias is shared for block in plain.blocks)
        torch.testing.assert_close(shared.grad, reference.blocks[0].linear.bias.grad)


@pytest.mark.spec("CLIP-01", "FUZZ-02")
@pytest.mark.parametrize("given", [{"max_norm": math.nan}, {"max_norm": 1.0, "norm_type": math.nan}], ids=str)
@ranks(2)
def test_clipping_to_nan_is_refused_and_changes_no_gradient(given: dict[str, float]) -> None:
    model = wrapped()
    iterate(model)
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(TypeError, match=r"rank \d: .*norm.*number"):
        model.clip_grad_norm_(**given)
    assert_same({name: p.grad for name, p in model.named_parameters()}, before, bitwise=True)


@pytest.mark.spec("NOSYNC-10")
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@flat_or_original
@ranks(2)
def test_step_and_clipping_raise_if_gradients_were_never_reduced(strategy: ShardingStrategy, keep: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        iterate(model)
    with refused(RuntimeError, "never reduced", "no_sync"):
        model.clip_grad_norm_(1.0)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with refused(RuntimeError, "never reduced", "no_sync"):
        optimizer.step()
    # The next backward reduces, but it skips a unit.
    iterate(model, order=[0, 1, 2])
    with refused(RuntimeError, "never reduced"):
        optimizer.step()


@pytest.mark.spec("SUMMON-16")
@flat_or_original
@ranks(2)
def test_an_idle_model_is_not_summoned_in_the_backward_of_another_one(keep: bool) -> None:
    teacher = wrapped(use_orig_params=keep)
    student = seeded()
    moments = []

    def look(_: Tensor) -> None:
        with pytest.raises(RuntimeError, match="backward"), FSDP.summon_full_params(teacher):
            pass
        moments.append("backward")

    output = student(batch())
    output.register_hook(look)
    loss_of(output).backward()
    assert moments == ["backward"]
    iterate(teacher)
