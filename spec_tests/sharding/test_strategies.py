"""Sharding strategies: the tensors that each one shards, all-gathers, reshards and reduces.

``test_timelines.py`` checks the order of whole iterations. The tests here check sizes, values and memory.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from spec_tests.harness import device, ranks
from spec_tests.models.apis import Api, every_setting
from spec_tests.models.modules import UNITS, WIDTH, seeded
from spec_tests.models.running import Watch, Wire, batch, iterate, loss_of, of_unit
from spec_tests.models.sharding import (
    FLAT_STRATEGIES,
    FULL_SHARD,
    HYBRID_STRATEGIES,
    NO_SHARD,
    SHARD_GRAD_OP,
    all_connected,
    wrapped,
)
from spec_tests.models.values import (
    assert_same,
    chunked,
    flat_gradients,
    flat_parameters,
    flattened,
    full_values,
    mean_gradients,
    named,
)
from spec_tests.models.whole import odd
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy, trace
from spec_tests.waiting import comes_true

SHARDING = (FULL_SHARD, SHARD_GRAD_OP)
NO_VIEWS = pytest.mark.not_simulated("it cannot view a part of a flat tensor in inference mode")

# --- layout of parameters ---


@pytest.mark.spec("SHARD-02", "SHARD-03")
@pytest.mark.parametrize("strategy", SHARDING)
@ranks(4)
def test_each_rank_stores_one_shard_of_each_unit(strategy: ShardingStrategy) -> None:
    plain = seeded(odd)
    model = wrapped(seeded(odd), sharding_strategy=strategy)
    assert_same(flat_parameters(model), chunked(plain, named(plain), 4, dist.get_rank()), bitwise=True)


@pytest.mark.spec("SHARD-03", "SHARD-06", "SHARD-08")
@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("strategy", SHARDING)
@ranks(4)
def test_odd_sizes_train_as_in_one_process(num: int, strategy: ShardingStrategy) -> None:
    group = dist.new_group(list(range(num)))
    all_connected()
    if dist.get_rank() >= num:
        return
    plain = seeded(odd)
    assert any(row.numel() % num for row in flattened(plain, named(plain)).values())
    model = wrapped(seeded(odd), process_group=group, sharding_strategy=strategy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for step in range(3):
        expected = mean_gradients(plain, [step], num)
        optimizers[1].zero_grad()
        iterate(model, step)
        assert_same(flat_gradients(model), chunked(plain, expected, num, dist.get_rank()), bitwise=num == 2)
        for name, parameter in plain.named_parameters():
            parameter.grad = expected[name]
        for optimizer in optimizers:
            optimizer.step()
    assert_same(full_values(model), named(plain), bitwise=num == 2)


@pytest.mark.spec("SHARD-03")
@pytest.mark.parametrize("strategy", SHARDING)
@ranks(4)
def test_values_written_to_padding_have_no_effect(strategy: ShardingStrategy) -> None:
    plain = seeded(odd)
    model = wrapped(seeded(odd), sharding_strategy=strategy)
    num_padding = 0
    for unit, row in flattened(plain, named(plain)).items():
        local_shard = flat_parameters(model)[unit]
        first_padding = max(0, row.numel() - dist.get_rank() * local_shard.numel())
        num_padding += local_shard[first_padding:].numel()
        with torch.no_grad():
            local_shard[first_padding:] = math.nan
    assert num_padding > 0 or dist.get_rank() < 3
    assert_same(model.state_dict(), plain.state_dict(), bitwise=True)
    iterate(model)
    assert_same(flat_gradients(model), chunked(plain, mean_gradients(plain), 4, dist.get_rank()))
    assert_same(full_values(model), named(plain), bitwise=True)


# --- gradients and optimizer state ---


@pytest.mark.spec("SHARD-06")
@ranks(2)
def test_a_float64_model_has_float64_gradients() -> None:
    model = FullyShardedDataParallel(nn.Linear(3, 2).double().to(device()))
    model(torch.ones(1, 3, dtype=torch.float64, device=device())).sum().backward()
    (parameter,) = model.parameters()
    assert parameter.grad.dtype is parameter.dtype is torch.float64


@pytest.mark.spec("SHARD-07", "SHARD-08")
@pytest.mark.parametrize("strategy", SHARDING)
@ranks(2)
def test_optimizer_state_has_the_size_of_the_shards_and_a_step_sends_nothing(strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    optimizer = torch.optim.Adam(model.parameters())
    iterate(model)
    with trace.record() as recorder, Wire() as wire:
        optimizer.step()
    assert recorder.events == []
    assert wire.sent == []
    for unit, row in flattened(plain, named(plain)).items():
        state = optimizer.state[flat_parameters(model)[unit]]
        assert state["exp_avg"].numel() == state["exp_avg_sq"].numel() == math.ceil(row.numel() / 2)


# --- all-gathers, resharding and reductions ---


@pytest.mark.spec("SHARD-05", "SHARD-09")
@pytest.mark.parametrize("strategy", SHARDING)
@ranks(2)
def test_only_local_shards_are_stored_between_iterations(strategy: ShardingStrategy) -> None:
    plain = seeded()
    watch = Watch(plain)
    model = wrapped(plain, sharding_strategy=strategy)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == 4 * parameter.numel()
    for step in range(2):
        assert watch.alive() == [], "before forward"
        loss = loss_of(model(batch(step)))
        unsharded = [""] if strategy is FULL_SHARD else list(UNITS)
        assert watch.alive() == unsharded, "between forward and backward"
        loss.backward()
        assert watch.alive() == [], "after backward"
        optimizer.step()
        optimizer.zero_grad()
    assert watch.alive() == []


@pytest.mark.spec("SHARD-01", "SHARD-16", "CTOR-09")
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, None])
@ranks(2)
def test_nothing_is_sent_except_the_recorded_collectives(strategy: ShardingStrategy | None) -> None:
    # ``test_timelines.py`` compares the recorded events.
    model = wrapped(sharding_strategy=strategy)
    strategy = strategy or FULL_SHARD
    assert {unit.sharding_strategy for unit in FullyShardedDataParallel.fsdp_modules(model)} == {strategy}
    counts = {FULL_SHARD: {"AG": 9, "RS": 5}, SHARD_GRAD_OP: {"AG": 5, "RS": 5}, NO_SHARD: {"AR": 5}}
    for step in range(3):
        with trace.record() as recorder, Wire() as wire:
            iterate(model, step)
        assert Counter(wire.kinds()) == counts[strategy]
        assert wire.kinds() == [event.kind for event in recorder.events if event.ranks]
        assert step == 0 or wire.sent == wire.values


@pytest.mark.spec("SHARD-04")
@ranks(2)
def test_full_shard_all_gathers_twice_and_reduces_once() -> None:
    model = wrapped()
    for step in range(2):
        with trace.record() as recorder:
            iterate(model, step)
        for unit in UNITS[1:]:
            assert of_unit(recorder, unit) == ["AG", "F", "FREE", "AG", "B", "FREE", "RS"]


@pytest.mark.spec("SHARD-10")
@ranks(2)
def test_parameters_kept_by_no_sync_are_not_used_after_an_optimizer_step() -> None:
    model = wrapped(sharding_strategy=SHARD_GRAD_OP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    iterate(model, 0)
    with model.no_sync(), torch.no_grad():
        before = model(batch(1))
    optimizer.step()
    with torch.no_grad():
        after = model(batch(1))
    assert not torch.equal(before, after)


@pytest.mark.spec("SHARD-11")
@ranks(2)
def test_no_shard_replicates_parameters_and_gradients() -> None:
    plain, model = seeded(), wrapped(sharding_strategy=NO_SHARD)
    assert_same(flat_parameters(model), flattened(plain, named(plain)), bitwise=True)
    iterate(model)
    assert_same(flat_gradients(model), flattened(plain, mean_gradients(plain)), bitwise=True)


@pytest.mark.spec("SHARD-12")
@ranks(2)
def test_no_shard_trains_like_distributed_data_parallel() -> None:
    model = wrapped(sharding_strategy=NO_SHARD)
    parallel = DistributedDataParallel(seeded())
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, parallel)]
    for step in range(4):
        for each, optimizer in zip((model, parallel), optimizers, strict=True):
            iterate(each, step, optimizer)
    assert_same(full_values(model), named(parallel.module), bitwise=True)


@pytest.mark.spec("SHARD-13")
@pytest.mark.parametrize("strategy", SHARDING)
@ranks(2)
def test_resharded_unit_has_no_memory(strategy: ShardingStrategy) -> None:
    plain = seeded()
    watch = Watch(plain)
    model = wrapped(plain, sharding_strategy=strategy)
    freed_before: set[str] = set()

    def check_freed(unit: str) -> None:
        last = {event.unit: event.kind for event in recorder.events if event.kind in ("AG", "FREE")}
        freed = {unit for unit, kind in last.items() if kind == "FREE"}
        assert freed.isdisjoint(watch.alive())
        assert unit in watch.alive(), "a unit that computes has its memory"
        freed_before.update(freed)

    watch.in_forward = watch.in_backward = check_freed
    with trace.record() as recorder:
        iterate(model)
    assert watch.alive() == []
    assert freed_before == set(UNITS[1:])
    frees = {event.unit: event.num_bytes for event in recorder.events if event.kind == "FREE"}
    assert frees == {"": 56 * 4, **dict.fromkeys(UNITS[1:], 42 * 4)}


@pytest.mark.spec("SHARD-14", "FRESH-03")
@pytest.mark.parametrize("without_gradients", [torch.no_grad, pytest.param(torch.inference_mode, marks=NO_VIEWS)])
@pytest.mark.parametrize("strategy", SHARDING)
@ranks(2)
def test_evaluation_all_gathers_and_never_reduces(
    strategy: ShardingStrategy, without_gradients: Callable[[], torch.no_grad]
) -> None:
    plain = seeded()
    watch = Watch(plain)
    model = wrapped(plain, sharding_strategy=strategy).eval()
    for number in range(3):
        with Wire() as wire, without_gradients():
            assert torch.equal(model(batch()), seeded()(batch()))
        # SHARD_GRAD_OP keeps all parameters unsharded for the next evaluation, FULL_SHARD only those of the root.
        kept = list(UNITS) if strategy is SHARD_GRAD_OP else [""]
        assert watch.alive() == kept
        assert wire.kinds() == ["AG"] * (len(UNITS) - (len(kept) if number > 0 else 0))


@pytest.mark.spec("SHARD-14", "SHARD-15", "FS2-13")
@pytest.mark.parametrize("records", [False, True])
@every_setting
@ranks(2)
def test_a_forward_without_backward_between_two_steps_changes_nothing(
    api: Api, strategy: ShardingStrategy, records: bool
) -> None:
    results = []
    for evaluates in (True, False):
        model = api.shard(strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            iterate(model, step, optimizer)
            if evaluates:
                with torch.set_grad_enabled(records):
                    model(batch(100 + step))
        results.append(api.values(model))
    assert_same(*results, bitwise=True)


# --- results and counts ---


@pytest.mark.spec("SHARD-15", "CTOR-04", "SUMMON-02")
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, *HYBRID_STRATEGIES])
@ranks(4)
def test_loss_curve_is_that_of_one_process_with_the_concatenated_batch(strategy: ShardingStrategy) -> None:
    plain, model = seeded(), wrapped(sharding_strategy=strategy)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (plain, model)]
    curve, expected = [], []
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(plain(torch.cat([batch(step, rank) for rank in range(4)])))
        loss.backward()
        expected.append(float(loss.detach()))
        mine = torch.tensor(iterate(model, step), device=device())
        dist.all_reduce(mine)
        curve.append(float(mine) / 4)
        for optimizer in optimizers:
            optimizer.step()
    assert curve == pytest.approx(expected, rel=1e-4)
    assert expected[4] < 0.9 * expected[0], "the loss decreases"
    torch.testing.assert_close(full_values(model), named(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.spec("SHARD-13", "FWD-04")
@ranks(2)
def test_autograd_detects_change_of_no_shard_params() -> None:
    """Fails if the tensors in forward have separate version counters, which would allow wrong gradients."""
    model = wrapped(sharding_strategy=ShardingStrategy.NO_SHARD)
    loss = loss_of(model(batch()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match="have changed since the forward"):
        loss.backward()


@pytest.mark.spec("SHARD-13")
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@ranks(2)
def test_old_memory_of_replaced_flat_param_is_freed(strategy: ShardingStrategy) -> None:
    """Fails if any object other than the parameter holds a reference to the old shard."""
    model = wrapped(sharding_strategy=strategy)
    iterate(model)
    before = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
        parameter.grad = None
    iterate(model)
    gc.collect()
    assert comes_true(lambda: [ref.expired() for ref in before] == [True] * 5)


# --- outputs of units ---


class View(nn.Module):
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
        self.first, self.last = View(), View()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.mul_(2.0)
        z = self.last(y)
        z.add_(1.0)
        return z


@pytest.mark.spec("FWD-06", "SHARD-04", "FS2-13")
@every_setting
@ranks(2)
def test_a_view_that_a_unit_returns_may_be_changed_in_place_by_its_caller(api: Api, strategy: ShardingStrategy) -> None:
    model = api.shard(seeded(Overwriting), unit_classes=(View,), strategy=strategy)
    for step in range(2):
        model.zero_grad()
        iterate(model, step)
        assert_same(api.gradients(model), mean_gradients(seeded(Overwriting), [step]))
