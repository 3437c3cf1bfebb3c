"""``no_sync``: gradient accumulation without communication.

Inside, a backward keeps this rank's unreduced, unsharded gradient. The first backward outside reduces the sum.
``test_timelines.py`` checks the order of whole iterations.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.harness import device, ranks
from spec_tests.models.modules import UNITS, seeded
from spec_tests.models.running import Watch, Wire, batch, iterate, loss_of, of_unit
from spec_tests.models.sharding import (
    FLAT_STRATEGIES,
    FULL_SHARD,
    HYBRID_STRATEGIES,
    NO_SHARD,
    SHARD_GRAD_OP,
    as_torch,
    wrapped,
)
from spec_tests.models.values import (
    assert_same,
    chunked,
    flat_gradients,
    flat_parameters,
    flattened,
    full_values,
    local_gradients,
    mean_gradients,
    named,
)
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy, trace

flat_strategies = pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
hybrid_strategies = pytest.mark.parametrize("strategy", HYBRID_STRATEGIES)


def chunks_of(model: FullyShardedDataParallel) -> tuple[int, int]:
    """The number of shards of a unit, and the index of this rank's shard."""
    if model.sharding_strategy is NO_SHARD:
        return 1, 0
    if model.sharding_strategy in HYBRID_STRATEGIES:
        return 2, dist.get_rank() % 2
    return dist.get_world_size(), dist.get_rank()


# --- inside the context ---


@pytest.mark.spec("NOSYNC-01")
@flat_strategies
@ranks(2)
def test_no_sync_reduces_nothing_and_accumulates_local_gradients(strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    with trace.record() as recorder, Wire() as wire, model.no_sync():
        for step in range(3):
            iterate(model, step)
    assert not {"RS", "AR"} & {event.kind for event in recorder.events}
    assert not {"RS", "AR"} & set(wire.kinds())
    mine = local_gradients(plain, range(3), dist.get_rank())
    others = local_gradients(plain, range(3), 1 - dist.get_rank())
    assert_same(flat_gradients(model), flattened(plain, mine), bitwise=True)
    assert not torch.equal(flat_gradients(model)[""], flattened(plain, others)[""]), "ranks differ"


@pytest.mark.spec("NOSYNC-05")
@flat_strategies
@ranks(2)
def test_no_sync_shows_unreduced_gradients_of_original_parameters_also_with_kept_memory(
    strategy: ShardingStrategy,
) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    with model.no_sync():
        iterate(model)
        mine = local_gradients(plain, range(1), dist.get_rank())
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, nn.Parameter), name
            gradient = mine[name.replace("_fsdp_wrapped_module.", "")]
            torch.testing.assert_close(parameter.grad.view_as(gradient), gradient)
        model.zero_grad()
        iterate(model, 1)
    iterate(model, 2)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        seen = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert_same(seen, mean_gradients(plain, (1, 2)))


@pytest.mark.spec("NOSYNC-05")
@flat_strategies
@ranks(2)
def test_no_sync_gradient_has_size_of_full_unit(strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    with model.no_sync():
        iterate(model)
        for unit, row in flattened(plain, named(plain)).items():
            assert flat_parameters(model)[unit].grad.numel() == row.numel()
    iterate(model, 1)
    for parameter in flat_parameters(model).values():
        assert parameter.grad.shape == parameter.shape


@pytest.mark.spec("NOSYNC-08")
@pytest.mark.parametrize(
    ("strategy", "block", "root"),
    [
        (FULL_SHARD, ["AG", "F", "FREE", "AG", "B", "FREE"] * 3, ["AG", "F", "B", "FREE"] * 3),
        (SHARD_GRAD_OP, ["AG", "F", "B", "F", "B", "F", "B"], ["AG", "F", "B", "F", "B", "F", "B"]),
    ],
)
@ranks(2)
def test_no_sync_with_full_shard_reshards_in_every_micro_batch_unlike_shard_grad_op(
    strategy: ShardingStrategy, block: list[str], root: list[str]
) -> None:
    plain = seeded()
    watch = Watch(plain)
    model = wrapped(plain, sharding_strategy=strategy)
    with trace.record() as recorder, model.no_sync():
        for step in range(3):
            iterate(model, step)
            assert watch.alive() == ([] if strategy is FULL_SHARD else list(UNITS))
    for unit in UNITS:
        assert of_unit(recorder, unit) == (block if unit else root)


@pytest.mark.spec("NOSYNC-09")
@hybrid_strategies
@ranks(4)
def test_no_sync_also_skips_the_all_reduce_of_a_hybrid(strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    with trace.record() as recorder, Wire() as wire, model.no_sync():
        for step in range(2):
            iterate(model, step)
    assert {event.kind for event in recorder.events if event.ranks} == {"AG"}
    assert set(wire.kinds()) == {"AG"}
    assert_same(flat_gradients(model), flattened(plain, local_gradients(plain, range(2), dist.get_rank())))
    with trace.record() as recorder:
        iterate(model, 2)
    for unit in UNITS:
        assert of_unit(recorder, unit, "RS", "AR") == ["RS", "AR"]
    expected = mean_gradients(plain, range(3))
    assert_same(flat_gradients(model), chunked(plain, expected, *chunks_of(model)))


# --- leaving the context ---


@pytest.mark.spec("NOSYNC-02")
@flat_strategies
@ranks(2)
def test_first_backward_after_no_sync_reduces_the_sum_once(strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    with model.no_sync():
        iterate(model, 0)
        iterate(model, 1)
    with trace.record() as recorder:
        iterate(model, 2)
    reduction = "AR" if strategy is NO_SHARD else "RS"
    for unit in UNITS:
        assert of_unit(recorder, unit, "RS", "AR") == [reduction]
    expected = mean_gradients(plain, range(3))
    assert_same(flat_gradients(model), chunked(plain, expected, *chunks_of(model)))


@pytest.mark.spec("NOSYNC-02")
@ranks(2)
def test_an_accumulated_gradient_is_bit_by_bit_that_of_torch() -> None:
    ours, theirs = wrapped(), as_torch(seeded())
    for model in (ours, theirs):
        iterate(model, 0)
        with model.no_sync():
            iterate(model, 1)
            iterate(model, 2)
        iterate(model, 3)
    assert_same(flat_gradients(ours), flat_gradients(theirs), bitwise=True)


@pytest.mark.spec("NOSYNC-02")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_no_sync_keeps_earlier_reduced_gradients(strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    iterate(model, 0)
    with model.no_sync():
        iterate(model, 1)
    iterate(model, 2)
    iterate(model, 3)
    expected = mean_gradients(plain, range(4))
    assert_same(flat_gradients(model), chunked(plain, expected, *chunks_of(model)), bitwise=False)


@pytest.mark.spec("NOSYNC-02")
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_no_shard_uses_gradient_replaced_inside_no_sync(
    use_orig_params: bool,
) -> None:
    plain, model = seeded(), wrapped(sharding_strategy=NO_SHARD, use_orig_params=use_orig_params)
    with model.no_sync():
        iterate(model, 0)
    for parameter in model.parameters():
        parameter.grad = parameter.grad / 2
    iterate(model, 1)
    halved, last = mean_gradients(plain, [0]), mean_gradients(plain, [1])
    expected = {name: halved[name] / 2 + last[name] for name in last}
    found = flat_gradients(model)
    assert_same(found, expected if use_orig_params else flattened(plain, expected), bitwise=False)


@pytest.mark.spec("NOSYNC-03")
@pytest.mark.parametrize("num_micro_batches", [2, 4])
@flat_strategies
@ranks(2)
def test_micro_batches_equal_one_big_batch(strategy: ShardingStrategy, num_micro_batches: int) -> None:
    compare_with_one_big_batch(strategy, num_micro_batches)


@pytest.mark.spec("NOSYNC-03")
@hybrid_strategies
@ranks(4)
def test_micro_batches_of_a_hybrid_equal_one_big_batch(strategy: ShardingStrategy) -> None:
    compare_with_one_big_batch(strategy, 3)


def compare_with_one_big_batch(strategy: ShardingStrategy, num: int) -> None:
    """Compares two optimizer steps with a single process that uses the batches of all ranks."""
    plain, model = seeded(), wrapped(sharding_strategy=strategy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for first in (0, num):
        steps = range(first, first + num)
        for optimizer in optimizers:
            optimizer.zero_grad()
        big = torch.cat([batch(step, rank) for step in steps for rank in range(dist.get_world_size())])
        loss_of(plain(big)).backward()
        with model.no_sync():
            for step in steps[:-1]:
                (loss_of(model(batch(step))) / num).backward()
        (loss_of(model(batch(steps[-1]))) / num).backward()
        reduced = {name: parameter.grad for name, parameter in plain.named_parameters()}
        assert_same(flat_gradients(model), chunked(plain, reduced, *chunks_of(model)), bitwise=False)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(full_values(model), named(plain), bitwise=False)


# --- allowed calls ---


@pytest.mark.spec("NOSYNC-04")
@pytest.mark.parametrize("has_run", [False, True])
@ranks(2)
def test_inner_unit_refuses_no_sync_and_keeps_working(has_run: bool) -> None:
    model = wrapped()
    if has_run:
        iterate(model)
    with pytest.raises(RuntimeError, match=f"rank {dist.get_rank()}: no_sync"), model.blocks[1].no_sync():
        pytest.fail("it was entered")
    with trace.record() as recorder:
        iterate(model, 1)
    for unit in UNITS:
        assert of_unit(recorder, unit, "RS") == ["RS"]


@pytest.mark.spec("NOSYNC-04")
@pytest.mark.parametrize("has_run", [False, True])
@ranks(2)
def test_no_sync_of_the_root_applies_to_all_units(has_run: bool) -> None:
    model = wrapped()
    if has_run:
        iterate(model)
        model.zero_grad()
    with trace.record() as recorder, model.no_sync():
        iterate(model, 1)
    assert recorder.count("RS") == 0
    assert_same(flat_gradients(model), flattened(seeded(), local_gradients(seeded(), [1], dist.get_rank())))


@pytest.mark.spec("NOSYNC-04")
@ranks(2)
def test_no_sync_applies_to_units_below_a_root_without_parameters() -> None:
    model = FullyShardedDataParallel(nn.Sequential(*(sharded_layer() for _ in range(2))))
    with trace.record() as recorder:
        with model.no_sync():
            model(torch.ones(1, 4, device=device())).sum().backward()
        assert recorder.count("RS") == 0
        model(torch.ones(1, 4, device=device())).sum().backward()
        assert recorder.count("RS") == 2


def sharded_layer() -> FullyShardedDataParallel:
    return FullyShardedDataParallel(nn.Linear(4, 4).to(device()))


# --- entering and leaving ---


def reduces(model: FullyShardedDataParallel, step: int) -> bool:
    """Whether an iteration reduces. All units must give the same result."""
    with trace.record() as recorder:
        iterate(model, step)
    reduced = {unit: bool(of_unit(recorder, unit, "RS")) for unit in UNITS}
    assert len(set(reduced.values())) == 1, reduced
    return reduced[""]


@pytest.mark.spec("NOSYNC-06")
@ranks(2)
def test_nested_contexts_end_with_the_outermost() -> None:
    model = wrapped()
    with model.no_sync():
        with model.no_sync():
            assert not reduces(model, 0)
        assert not reduces(model, 1), "still inside the outer one"
        with model.no_sync():
            pass
        assert not reduces(model, 2)
    assert reduces(model, 3)
    expected = mean_gradients(seeded(), range(4))
    assert_same(flat_gradients(model), chunked(seeded(), expected, *chunks_of(model)), bitwise=False)


@pytest.mark.spec("NOSYNC-06")
@pytest.mark.parametrize("depth", [1, 2])
@ranks(2)
def test_exception_inside_no_sync_restores_gradient_sync(depth: int) -> None:
    model = wrapped()

    def fail(levels: int) -> None:
        with model.no_sync():
            if levels > 1:
                fail(levels - 1)
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail(depth)
    assert reduces(model, 0)
    with model.no_sync():
        with pytest.raises(KeyError, match="inside"):
            fail(depth)
        assert not reduces(model, 1), "the outer one is still on"
    assert reduces(model, 2)


@pytest.mark.spec("NOSYNC-07")
@flat_strategies
@ranks(2)
def test_forward_inside_no_sync_with_backward_outside_is_reduced(strategy: ShardingStrategy) -> None:
    plain = seeded()
    watch = Watch(plain)
    model = wrapped(plain, sharding_strategy=strategy)
    with model.no_sync():
        loss = loss_of(model(batch()))
    with trace.record() as recorder:
        loss.backward()
    assert recorder.count("AR" if strategy is NO_SHARD else "RS") == len(UNITS)
    assert_same(flat_gradients(model), chunked(seeded(), mean_gradients(seeded()), *chunks_of(model)))
    assert strategy is NO_SHARD or watch.alive() == []


@pytest.mark.spec("NOSYNC-07")
@flat_strategies
@ranks(2)
def test_forward_outside_no_sync_with_backward_inside_is_not_reduced(strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    loss = loss_of(model(batch()))
    with trace.record() as recorder, model.no_sync():
        loss.backward()
    assert not {"RS", "AR"} & {event.kind for event in recorder.events}
    assert_same(flat_gradients(model), flattened(plain, local_gradients(plain, [0], dist.get_rank())))
    iterate(model, 1)
    assert_same(flat_gradients(model), chunked(plain, mean_gradients(plain, [0, 1]), *chunks_of(model)), bitwise=False)


# --- leaving without a reduction ---


def step_of(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def clip_of(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    model.clip_grad_norm_(1.0)


@pytest.mark.spec("NOSYNC-10")
@pytest.mark.parametrize("act", [step_of, clip_of])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(2)
def test_a_step_and_clipping_refuse_gradients_that_were_never_reduced(
    strategy: ShardingStrategy, act: Callable[[FullyShardedDataParallel, torch.optim.Optimizer], None]
) -> None:
    compare_refusal(strategy, act)


@pytest.mark.spec("NOSYNC-10")
@pytest.mark.parametrize("act", [step_of, clip_of])
@hybrid_strategies
@ranks(4)
def test_step_and_clipping_of_a_hybrid_refuse_unreduced_gradients(
    strategy: ShardingStrategy, act: Callable[[FullyShardedDataParallel, torch.optim.Optimizer], None]
) -> None:
    compare_refusal(strategy, act)


def compare_refusal(
    strategy: ShardingStrategy, act: Callable[[FullyShardedDataParallel, torch.optim.Optimizer], None]
) -> None:
    """``act`` raises and leaves gradients and parameters unchanged. After a reducing backward it works."""
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        iterate(model)
    unreduced = flattened(plain, local_gradients(plain, [0], dist.get_rank()))
    assert_same(flat_gradients(model), unreduced, bitwise=True)
    before = {unit: parameter.detach().clone() for unit, parameter in flat_parameters(model).items()}
    for _ in range(2):
        message = rf"rank {dist.get_rank()}: .* found gradients that were never reduced.*zero_grad\(\)"
        with Wire() as wire, pytest.raises(RuntimeError, match=message):
            act(model, optimizer)
        assert wire.sent == [], "before any collective"
    assert_same(flat_gradients(model), unreduced, bitwise=True)
    assert_same(flat_parameters(model), before, bitwise=True)
    iterate(model, 1)
    assert_same(flat_gradients(model), chunked(plain, mean_gradients(plain, [0, 1]), *chunks_of(model)), bitwise=False)
    act(model, optimizer)


@pytest.mark.spec("NOSYNC-10")
@pytest.mark.parametrize("set_to_none", [True, False])
@flat_strategies
@ranks(2)
def test_dropping_unreduced_gradients_makes_a_step_possible_again(
    strategy: ShardingStrategy, set_to_none: bool
) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        iterate(model, 0)
    optimizer.zero_grad(set_to_none=set_to_none)
    iterate(model, 1)
    expected = mean_gradients(plain, [1])
    assert_same(flat_gradients(model), chunked(plain, expected, *chunks_of(model)), bitwise=True)
    optimizer.step()
    for name, parameter in plain.named_parameters():
        parameter.grad = expected[name]
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same(full_values(model), named(plain), bitwise=True)


@pytest.mark.spec("NOSYNC-10")
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(2)
def test_step_with_a_closure_checks_gradients_after_the_closure(strategy: ShardingStrategy, by_name: bool) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(closure: Callable[[], object]) -> object:
        return optimizer.step(closure=closure) if by_name else optimizer.step(closure)

    def accumulate() -> None:
        with model.no_sync():
            iterate(model, 0)

    before = full_values(model)
    with pytest.raises(RuntimeError, match=r"SGD\.step\(\) found gradients that were never reduced"):
        step(accumulate)
    assert_same(full_values(model), before, bitwise=True)
    optimizer.zero_grad()

    def last_micro_batch() -> str:
        iterate(model, 1)
        return "the loss"

    accumulate()
    assert step(last_micro_batch) == "the loss"
    expected = mean_gradients(plain, [0, 1])
    for name, parameter in plain.named_parameters():
        parameter.grad = expected[name]
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same(full_values(model), named(plain), bitwise=False)
