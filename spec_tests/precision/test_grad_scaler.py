"""``ShardedGradScaler``: either all ranks skip a step, or none does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.amp import GradScaler

from spec_tests.harness import device, ranks
from spec_tests.models import apis, running, values
from spec_tests.models.modules import seeded
from spec_tests.models.sharding import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP
from spec_tests.subject import FullyShardedDataParallel, MixedPrecision, ShardedGradScaler, ShardingStrategy

pytestmark = pytest.mark.spec("MP-29")
OPTIONS: list[dict[str, Any]] = [
    {"strategy": FULL_SHARD, "offload": True},
    {"strategy": SHARD_GRAD_OP, "use_orig_params": True},
    {"strategy": NO_SHARD},
]


def make_scaler(**options: Any) -> ShardedGradScaler:
    return ShardedGradScaler(device().type, **{"init_scale": 8.0, **options})


def step_and_update(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> float:
    """Ends a training step: steps the optimizer, clears its gradients, and returns the updated scale."""
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale()


def plant(model: FullyShardedDataParallel, value: float = float("inf")) -> None:
    """Writes one invalid number into the shard of this rank."""
    next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[-1] = value


def seen_by_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@pytest.mark.parametrize(("planted_on", "value"), [(0, float("inf")), (1, float("-inf")), (1, float("nan"))])
@pytest.mark.parametrize("options", OPTIONS)
@ranks(2)
def test_non_finite_shard_makes_all_ranks_skip_step(options: dict[str, Any], planted_on: int, value: float) -> None:
    model = apis.WRAPPED.shard(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = make_scaler()
    scaler.scale(model(running.batch()).square().mean()).backward()
    if dist.get_rank() == planted_on:
        plant(model, value)
    scale = step_and_update(scaler, optimizer)
    values.assert_same(
        {name: each.to(device()) for name, each in apis.WRAPPED.values(model).items()},
        values.named(seeded()),
        bitwise=True,
    )
    assert seen_by_all(scale) == [4.0, 4.0]


@pytest.mark.parametrize("options", OPTIONS)
@ranks(2)
def test_without_an_infinity_all_ranks_step_as_without_a_scaler(options: dict[str, Any]) -> None:
    trained = []
    # Scaling by a power of two only changes the exponent, so the results are bitwise equal.
    for scaler in (make_scaler(), make_scaler(enabled=False), None):
        model = apis.WRAPPED.shard(**options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            if scaler is None:
                running.iterate(model, step, optimizer)
            else:
                scaler.scale(model(running.batch(step)).square().mean()).backward()
                step_and_update(scaler, optimizer)
        trained.append(apis.WRAPPED.values(model))
    values.assert_same(trained[0], trained[2], bitwise=True)
    values.assert_same(trained[1], trained[2], bitwise=True)


@pytest.mark.parametrize("strategy", [FULL_SHARD, HYBRID_SHARD])
@ranks(4)
def test_all_ranks_skip_the_same_steps_and_have_the_same_scale(strategy: ShardingStrategy) -> None:
    model = apis.WRAPPED.shard(strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = make_scaler(growth_interval=2, growth_factor=4.0, backoff_factor=0.25)
    scales = []
    for step in range(6):
        before = apis.WRAPPED.values(model)["enter.weight"]
        scaler.scale(model(running.batch(step)).square().mean()).backward()
        if step == 3 and dist.get_rank() == 3:
            plant(model)
        scales.append(step_and_update(scaler, optimizer))
        moved = not torch.equal(apis.WRAPPED.values(model)["enter.weight"], before)
        assert seen_by_all(moved) == [step != 3] * 4
    assert seen_by_all(scales) == [[8.0, 32.0, 32.0, 8.0, 8.0, 32.0]] * 4


@ranks(2)
def test_unscaled_gradients_can_be_clipped_before_the_step() -> None:
    model, other, scaler = apis.WRAPPED.shard(), apis.WRAPPED.shard(), make_scaler()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, other)]
    scaler.scale(model(running.batch()).square().mean()).backward()
    scaler.unscale_(optimizers[0])
    other(running.batch()).square().mean().backward()
    assert torch.equal(model.clip_grad_norm_(0.1), other.clip_grad_norm_(0.1))
    scaler.step(optimizers[0])
    optimizers[1].step()
    values.assert_same(apis.WRAPPED.values(model), apis.WRAPPED.values(other), bitwise=True)


@ranks(4)
def test_only_ranks_of_the_scaler_group_agree_on_the_scale() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[dist.get_rank() // 2]
    model, scaler = apis.WRAPPED.shard(process_group=group), make_scaler(process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(running.batch()).square().mean()).backward()
    if dist.get_rank() == 3:
        plant(model)
    assert seen_by_all(step_and_update(scaler, optimizer)) == [8.0, 8.0, 4.0, 4.0]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
@ranks(2)
def test_overflowing_scale_backs_off_until_training_continues(strategy: ShardingStrategy, keep: bool) -> None:
    precision = MixedPrecision(param_dtype=torch.float16, keep_low_precision_grads=keep)
    model = apis.WRAPPED.shard(strategy=strategy, mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    scaler = make_scaler(init_scale=2.0**20, backoff_factor=0.25)
    moved = []
    for _ in range(6):
        before = apis.WRAPPED.values(model)
        scaler.scale((model(running.batch()).float()).square().mean()).backward()
        step_and_update(scaler, optimizer)
        after = apis.WRAPPED.values(model)
        assert all(value.isfinite().all() for value in after.values())
        moved.append(not torch.equal(after["enter.weight"], before["enter.weight"]))
    assert (moved[0], moved[-1]) == (False, True)
    assert seen_by_all((moved, scaler.get_scale())) == [(moved, scaler.get_scale())] * 2


@ranks(2)
def test_rank_without_gradients_takes_part_in_the_scaler_update() -> None:
    # Rank 0 stores the only element.
    model = FullyShardedDataParallel(torch.nn.Linear(1, 1, bias=False).to(device()), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = make_scaler()
    scales = []
    for planted in (False, True):
        scaler.scale(model(torch.ones(1, 1, device=device())).sum()).backward()
        assert [parameter.grad is None for parameter in model.parameters()] == [dist.get_rank() == 1]
        if planted and dist.get_rank() == 0:
            plant(model)
        scales.append(step_and_update(scaler, optimizer))
    assert seen_by_all(scales) == [[8.0, 4.0]] * 2


@pytest.mark.pure
def test_constructor_of_the_base_class_may_be_replaced_by_one_that_sets_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = GradScaler.__init__

    def on_cpu(self: GradScaler, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "device": "cpu"})

    monkeypatch.setattr(GradScaler, "__init__", on_cpu)
    assert ShardedGradScaler(init_scale=4.0)._device == "cpu"
