"""``ShardedGradScaler``: either all ranks skip a step, or none does."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.fsdp import sharded_grad_scaler as torch_scaler

from spec_tests.harness import device, ranks
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import FLAT_STRATEGIES, FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, wrapped
from spec_tests.models.values import assert_same, full_values, named
from spec_tests.subject import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardedGradScaler, ShardingStrategy

PAIRS = [(FULL_SHARD, False), (FULL_SHARD, True), (SHARD_GRAD_OP, True), (NO_SHARD, False)]
pairs = pytest.mark.parametrize(("strategy", "use_orig_params"), PAIRS)


def scaler(**options: Any) -> ShardedGradScaler:
    return ShardedGradScaler(device().type, **{"init_scale": 8.0, **options})


def backward(model: FullyShardedDataParallel, its_scaler: GradScaler, step: int = 0) -> None:
    its_scaler.scale(loss_of(model(batch(step)))).backward()


def step_and_update(its_scaler: GradScaler, optimizer: torch.optim.Optimizer) -> float:
    """Ends a training step: steps the optimizer, clears its gradients, and returns the updated scale."""
    its_scaler.step(optimizer)
    its_scaler.update()
    optimizer.zero_grad()
    return its_scaler.get_scale()


def plant(model: FullyShardedDataParallel, rank: int, value: float = float("inf")) -> None:
    """Writes one invalid number into the shard of one rank."""
    if dist.get_rank() == rank:
        next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[-1] = value


def seen_by_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@pytest.mark.spec("MP-29")
@pytest.mark.pure
def test_sharded_grad_scaler_has_the_arguments_of_torch() -> None:
    ours = inspect.signature(ShardedGradScaler).parameters
    theirs = inspect.signature(torch_scaler.ShardedGradScaler).parameters
    assert list(ours) == list(theirs)
    for name in ours:
        if name != "process_group":
            assert ours[name].default == theirs[name].default
    assert issubclass(ShardedGradScaler, GradScaler)


@pytest.mark.spec("MP-29")
@pytest.mark.parametrize("planted_on", [0, 1])
@pairs
@ranks(2)
def test_non_finite_shard_makes_all_ranks_skip_step(
    strategy: ShardingStrategy, use_orig_params: bool, planted_on: int
) -> None:
    for value in (float("inf"), float("-inf"), float("nan")):
        model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        its_scaler = scaler()
        backward(model, its_scaler)
        plant(model, planted_on, value)
        scale = step_and_update(its_scaler, optimizer)
        assert_same(full_values(model), named(seeded()), bitwise=True)
        assert seen_by_all(scale) == [4.0, 4.0]


@pytest.mark.spec("MP-29")
@pairs
@ranks(2)
def test_without_an_infinity_all_ranks_step_as_without_a_scaler(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    trained = []
    for its_scaler in (scaler(), scaler(enabled=False), None):
        model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            if its_scaler is None:
                iterate(model, step, optimizer)
            else:
                backward(model, its_scaler, step)
                step_and_update(its_scaler, optimizer)
        trained.append(full_values(model))
    # Scaling by a power of two only changes the exponent, so the results are bitwise equal.
    assert_same(trained[0], trained[2], bitwise=True)
    assert_same(trained[1], trained[2], bitwise=True)


@pytest.mark.spec("MP-29")
@pytest.mark.parametrize("strategy", [FULL_SHARD, HYBRID_SHARD])
@ranks(4)
def test_all_ranks_skip_the_same_steps_and_have_the_same_scale(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    its_scaler = scaler(growth_interval=2, growth_factor=4.0, backoff_factor=0.25)
    scales = []
    for step in range(6):
        before = full_values(model)
        backward(model, its_scaler, step)
        if step == 3:
            plant(model, step)
        scales.append(step_and_update(its_scaler, optimizer))
        moved = not torch.equal(full_values(model)["enter.weight"], before["enter.weight"])
        assert seen_by_all(moved) == [step != 3] * 4
    assert scales == [8.0, 32.0, 32.0, 8.0, 8.0, 32.0]
    assert seen_by_all(scales) == [scales] * 4


@pytest.mark.spec("MP-29")
@ranks(2)
def test_gradients_are_unscaled_once_and_can_be_clipped_in_between() -> None:
    results = []
    for its_scaler in (scaler(), None):
        model = wrapped()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if its_scaler is None:
            loss_of(model(batch())).backward()
            norm = model.clip_grad_norm_(0.1)
            optimizer.step()
        else:
            backward(model, its_scaler)
            its_scaler.unscale_(optimizer)
            norm = model.clip_grad_norm_(0.1)
            with pytest.raises(RuntimeError, match="already been called"):
                its_scaler.unscale_(optimizer)
            its_scaler.step(optimizer)
            its_scaler.update()
        results.append({**full_values(model), "norm": norm})
    assert_same(results[0], results[1], bitwise=True)


@pytest.mark.spec("MP-29")
@ranks(4)
def test_only_ranks_of_the_scaler_group_agree_on_the_scale() -> None:
    pairs_of_ranks = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs_of_ranks[dist.get_rank() // 2]
    model = wrapped(process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    its_scaler = scaler(process_group=group)
    backward(model, its_scaler)
    plant(model, 3)
    assert seen_by_all(step_and_update(its_scaler, optimizer)) == [8.0, 8.0, 4.0, 4.0]


@pytest.mark.spec("MP-29")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_overflowing_scale_backs_off_until_training_continues(strategy: ShardingStrategy, keep: bool) -> None:
    precision = MixedPrecision(param_dtype=torch.float16, keep_low_precision_grads=keep)
    model = wrapped(sharding_strategy=strategy, mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    its_scaler = scaler(init_scale=2.0**20, backoff_factor=0.25)
    moved = []
    for _ in range(6):
        before = full_values(model)
        its_scaler.scale(loss_of(model(batch()).float())).backward()
        step_and_update(its_scaler, optimizer)
        after = full_values(model)
        assert all(value.isfinite().all() for value in after.values())
        moved.append(not torch.equal(after["enter.weight"], before["enter.weight"]))
    assert moved[0] is False
    assert moved[-1] is True
    assert seen_by_all((moved, its_scaler.get_scale())) == [(moved, its_scaler.get_scale())] * 2


@pytest.mark.spec("MP-29")
@ranks(2)
def test_rank_without_gradients_takes_part_in_the_scaler_update() -> None:
    layer = torch.nn.Linear(1, 1, bias=False).to(device())
    model = FullyShardedDataParallel(layer, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    its_scaler = scaler()
    scales = []
    for planted in (False, True):
        its_scaler.scale(model(torch.ones(1, 1, device=device())).sum()).backward()
        assert [parameter.grad is None for parameter in model.parameters()] == [dist.get_rank() == 1]
        if planted:
            plant(model, 0)
        scales.append(step_and_update(its_scaler, optimizer))
    assert seen_by_all(scales) == [[8.0, 4.0]] * 2


@pytest.mark.spec("MP-29")
@ranks(2)
def test_offloaded_gradients_are_scaled_as_well() -> None:
    model = wrapped(cpu_offload=CPUOffload(offload_params=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    its_scaler = scaler()
    scales = []
    for planted in (False, True):
        backward(model, its_scaler)
        if planted:
            plant(model, 1)
        scales.append(step_and_update(its_scaler, optimizer))
    assert seen_by_all(scales) == [[8.0, 4.0]] * 2


@pytest.mark.spec("MP-29")
@pytest.mark.pure
def test_constructor_of_the_base_class_may_be_replaced_by_one_that_sets_the_device() -> None:
    original = GradScaler.__init__

    def on_cpu(self: GradScaler, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "device": "cpu"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradScaler, "__init__", on_cpu)
        assert ShardedGradScaler(init_scale=4.0)._device == "cpu"
