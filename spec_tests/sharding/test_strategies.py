"""Sharding strategies: the tensors that each one shards, all-gathers, reshards and reduces.

``test_timelines.py`` checks the order of whole iterations. The tests here check sizes, values and memory.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from spec_tests.harness import ranks
from spec_tests.models import apis, modules, running, values
from spec_tests.models.gradients import step_with
from spec_tests.models.whole import odd
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy, trace
from spec_tests.waiting import comes_true

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = [*ShardingStrategy][:3]

BLOCKS = ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
some_settings = apis.settings_of(
    (apis.WRAPPED, FULL_SHARD),
    (apis.ORIGINALS, NO_SHARD),
    (apis.WRAPPED, SHARD_GRAD_OP),
    (apis.FULLY_SHARD, FULL_SHARD),
)


# --- layout of parameters ---


@pytest.mark.spec("SHARD-03", "SHARD-06", "SHARD-08")
@pytest.mark.parametrize(("num", "strategy"), [(2, SHARD_GRAD_OP), (3, FULL_SHARD)])
@ranks(4)
def test_odd_sizes_train_as_in_one_process(num: int, strategy: Any) -> None:
    group = dist.new_group(list(range(num)))
    dist.barrier()
    if dist.get_rank() >= num:
        return
    plain, model = modules.seeded(odd), apis.WRAPPED.shard(modules.seeded(odd), strategy=strategy, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        running.iterate(model, step)
        expected = values.mean_gradients(plain, [step], num)
        local_shards = values.chunked(plain, expected, num, dist.get_rank())
        values.assert_same(values.flat_gradients(model), local_shards, bitwise=num == 2)
        optimizer.step()
        optimizer.zero_grad()
        step_with(expected, plain, reference)
    values.assert_same(values.full_values(model), values.named(plain), bitwise=num == 2)


@pytest.mark.spec("SHARD-02", "SHARD-03")
@ranks(4)
def test_each_rank_stores_one_shard_of_each_unit_and_values_in_its_padding_have_no_effect() -> None:
    plain, model, rank = modules.seeded(odd), apis.WRAPPED.shard(modules.seeded(odd)), dist.get_rank()
    shards = values.flat_parameters(model)
    values.assert_same(shards, values.chunked(plain, values.named(plain), 4, rank), bitwise=True)
    num_padding = 0
    for unit, row in values.flattened(plain, values.named(plain)).items():
        padding = shards[unit].detach()[max(0, row.numel() - rank * shards[unit].numel()) :]
        num_padding += padding.numel()
        padding.fill_(math.nan)
    assert num_padding > 0 or rank < 3
    values.assert_same(model.state_dict(), plain.state_dict(), bitwise=True)
    running.iterate(model)
    values.assert_same(values.flat_gradients(model), values.chunked(plain, values.mean_gradients(plain), 4, rank))
    values.assert_same(values.full_values(model), values.named(plain), bitwise=True)


@pytest.mark.spec("SHARD-07", "SHARD-08")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(2)
def test_optimizer_state_has_the_size_of_the_shards_and_a_step_sends_nothing(strategy: Any) -> None:
    model = apis.WRAPPED.shard(strategy=strategy)
    optimizer = torch.optim.Adam(model.parameters())
    running.iterate(model)
    with trace.record() as recorder, running.Wire() as wire:
        optimizer.step()
    assert recorder.events == []
    assert wire.sent == []
    sizes = [optimizer.state[parameter]["exp_avg"].numel() for parameter in model.parameters()]
    assert sizes == [56 // 2, 42 // 2, 42 // 2, 42 // 2, 42 // 2], "half of the root, and of each block"


# --- all-gathers, resharding and reductions ---


@pytest.mark.spec("SHARD-05", "SHARD-08")
@pytest.mark.parametrize("change", ["in place", "a step"])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(2)
def test_values_that_changed_after_a_forward_without_backward_are_new_in_the_next_forward(
    strategy: Any, change: str
) -> None:
    model, plain = apis.WRAPPED.shard(strategy=strategy), modules.seeded()
    for one in (model, plain):
        one(running.batch())
        for parameter in one.parameters():
            parameter.grad = torch.ones_like(parameter)
            if change == "in place":
                parameter.detach().mul_(0.5)
        if change == "a step":
            torch.optim.SGD(one.parameters(), lr=0.5).step()
    torch.testing.assert_close(model(running.batch()), plain(running.batch()))


@pytest.mark.spec("SHARD-05", "SHARD-09", "SHARD-13")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(2)
def test_a_resharded_unit_has_no_memory_and_outside_of_iterations_only_shards_have(strategy: Any) -> None:
    plain = modules.seeded()
    watch = running.Watch(plain)
    model = apis.WRAPPED.shard(plain, strategy=strategy)
    assert all(parameter.untyped_storage().nbytes() == 4 * parameter.numel() for parameter in model.parameters())
    freed_before: set[str] = set()

    def check_freed(unit: str) -> None:
        last = {event.unit: event.kind for event in recorder.events if event.kind in ("AG", "FREE")}
        freed = {unit for unit, kind in last.items() if kind == "FREE"}
        assert freed.isdisjoint(watch.alive())
        assert unit in watch.alive(), "a unit that computes has its memory"
        freed_before.update(freed)

    watch.in_forward = watch.in_backward = check_freed
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(2):
        assert watch.alive() == [], "before forward"
        with trace.record() as recorder:
            loss = model(running.batch(step)).square().mean()
            assert watch.alive() == ([""] if strategy is FULL_SHARD else ["", *BLOCKS]), "between forward and backward"
            loss.backward()
        assert watch.alive() == [], "after backward"
        optimizer.step()
        optimizer.zero_grad()
    assert freed_before == set(BLOCKS)
    frees = {event.unit: event.num_bytes for event in recorder.events if event.kind == "FREE"}
    assert frees == {"": 56 * 4, **dict.fromkeys(BLOCKS, 42 * 4)}


COUNTS = {None: {"AG": 9, "RS": 5}, SHARD_GRAD_OP: {"AG": 5, "RS": 5}, NO_SHARD: {"AR": 5}}


@pytest.mark.spec("SHARD-01", "SHARD-16", "CTOR-09")
@pytest.mark.parametrize("strategy", [None, SHARD_GRAD_OP, NO_SHARD])
@ranks(2)
def test_nothing_is_sent_except_the_recorded_collectives(strategy: Any) -> None:
    # ``test_timelines.py`` compares the recorded events.
    model = apis.WRAPPED.shard(sharding_strategy=strategy)
    units = FullyShardedDataParallel.fsdp_modules(model)
    assert {unit.sharding_strategy for unit in units} == {strategy or FULL_SHARD}
    for step in range(2):
        with trace.record() as recorder, running.Wire() as wire:
            running.iterate(model, step)
        assert Counter(wire.kinds()) == COUNTS[strategy]
        assert wire.kinds() == [event.kind for event in recorder.events if event.ranks]
        assert step == 0 or wire.sent == wire.values


@pytest.mark.spec("SHARD-04")
@ranks(2)
def test_full_shard_all_gathers_twice_and_reduces_once() -> None:
    model = apis.WRAPPED.shard()
    for step in range(2):
        with trace.record() as recorder:
            running.iterate(model, step)
        for block in BLOCKS:
            assert running.of_unit(recorder, block) == ["AG", "F", "FREE", "AG", "B", "FREE", "RS"]


@pytest.mark.spec("SHARD-10")
@ranks(2)
def test_parameters_kept_by_no_sync_are_not_used_after_an_optimizer_step() -> None:
    model = apis.WRAPPED.shard(strategy=SHARD_GRAD_OP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    running.iterate(model, 0)
    with model.no_sync(), torch.no_grad():
        before = model(running.batch(1))
    optimizer.step()
    with torch.no_grad():
        after = model(running.batch(1))
    assert not torch.equal(before, after)


# --- changes of parameters, and of outputs ---


@pytest.mark.spec("SHARD-13", "FWD-04")
@ranks(2)
def test_autograd_detects_change_of_no_shard_params() -> None:
    """Fails if the tensors in forward have separate version counters, which would allow wrong gradients."""
    model = apis.WRAPPED.shard(strategy=NO_SHARD)
    loss = model(running.batch()).sum()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match="have changed since the forward"):
        loss.backward()


@pytest.mark.spec("SHARD-13")
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@ranks(2)
def test_old_memory_of_replaced_flat_param_is_freed(strategy: Any) -> None:
    """Fails if any object other than the parameter holds a reference to the old shard."""
    model = apis.WRAPPED.shard(strategy=strategy)
    running.iterate(model)
    before = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
        parameter.grad = None
    running.iterate(model)
    gc.collect()
    assert comes_true(lambda: [ref.expired() for ref in before] == [True] * 5)


class View(nn.Linear):
    """A unit that returns a view of the result of its last operation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x)).view(-1, 6)


class Overwriting(nn.Module):
    """Changes views that its units return in place. Nothing else uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = View(6, 6), View(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).mul_(2.0)).add_(1.0)


@pytest.mark.spec("FWD-06", "SHARD-04", "FS2-13")
@some_settings
@ranks(2)
def test_a_view_that_a_unit_returns_may_be_changed_in_place_by_its_caller(api: Any, strategy: Any) -> None:
    model = api.shard(modules.seeded(Overwriting), unit_classes=(View,), strategy=strategy)
    for step in range(2):
        model.zero_grad()
        running.iterate(model, step)
        values.assert_same(api.gradients(model), values.mean_gradients(modules.seeded(Overwriting), [step]))
