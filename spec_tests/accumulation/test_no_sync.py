"""``no_sync``: gradient accumulation without communication.

Inside, a backward keeps this rank's unreduced, unsharded gradient. The first backward outside reduces the sum.
``test_timelines.py`` checks the order of whole iterations.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.harness import device, ranks
from spec_tests.models.apis import WRAPPED
from spec_tests.models.modules import UNITS, seeded
from spec_tests.models.running import Watch, Wire, batch, iterate, loss_of, of_unit
from spec_tests.models.sharding import (
    FLAT_STRATEGIES,
    FULL_SHARD,
    HYBRID_STRATEGIES,
    NO_SHARD,
    SHARD_GRAD_OP,
    wrapped,
)
from spec_tests.models.values import (
    assert_same,
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


# --- inside the context ---


@pytest.mark.spec("NOSYNC-01", "NOSYNC-04", "NOSYNC-05")
@flat_strategies
@ranks(2)
def test_gradients_inside_no_sync_are_unreduced_and_have_the_size_of_the_full_unit(strategy: ShardingStrategy) -> None:
    compare_unreduced(strategy)


@pytest.mark.spec("NOSYNC-01", "NOSYNC-09")
@hybrid_strategies
@ranks(4)
def test_gradients_of_a_hybrid_inside_no_sync_are_unreduced(strategy: ShardingStrategy) -> None:
    compare_unreduced(strategy)


def compare_unreduced(strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = WRAPPED.shard(strategy=strategy)
    for steps in (range(3), range(3, 5)):
        with model.no_sync():
            for step in steps:
                iterate(model, step)
        assert_same(flat_gradients(model), flattened(plain, local_gradients(plain, steps, dist.get_rank())))
        model.zero_grad()
    iterate(model)
    for parameter in flat_parameters(model).values():
        assert parameter.grad.shape == parameter.shape


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
    model = WRAPPED.shard(plain, strategy=strategy)
    with trace.record() as recorder, model.no_sync():
        for step in range(3):
            iterate(model, step)
            assert watch.alive() == ([] if strategy is FULL_SHARD else list(UNITS))
    for unit in UNITS:
        assert of_unit(recorder, unit) == (block if unit else root)


# --- leaving the context ---


@pytest.mark.spec("NOSYNC-02")
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_no_shard_uses_gradient_replaced_inside_no_sync(use_orig_params: bool) -> None:
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


# --- allowed calls ---


@pytest.mark.spec("NOSYNC-04")
@ranks(2)
def test_inner_unit_refuses_no_sync_and_keeps_working() -> None:
    model = WRAPPED.shard()
    # Before the first iteration, and after it.
    for step in range(2):
        with pytest.raises(RuntimeError, match=f"rank {dist.get_rank()}: no_sync"), model.blocks[1].no_sync():
            pytest.fail("it was entered")
        assert reduces(model, step)


@pytest.mark.spec("NOSYNC-04")
@ranks(2)
def test_no_sync_applies_to_units_below_a_root_without_parameters() -> None:
    layers = [FullyShardedDataParallel(nn.Linear(4, 4).to(device())) for _ in range(2)]
    model = FullyShardedDataParallel(nn.Sequential(*layers))
    with trace.record() as recorder:
        with model.no_sync():
            model(torch.ones(1, 4, device=device())).sum().backward()
        assert recorder.count("RS") == 0
        model(torch.ones(1, 4, device=device())).sum().backward()
        assert recorder.count("RS") == 2


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
    model = WRAPPED.shard()
    with model.no_sync():
        with model.no_sync():
            assert not reduces(model, 0)
        assert not reduces(model, 1), "still inside the outer no_sync"
        with model.no_sync():
            pass
        assert not reduces(model, 2)
    assert reduces(model, 3)
    expected = mean_gradients(seeded(), range(4))
    assert_same(WRAPPED.gradients(model), expected, bitwise=False)


@pytest.mark.spec("NOSYNC-06")
@ranks(2)
def test_exception_inside_no_sync_restores_gradient_sync() -> None:
    model = WRAPPED.shard()

    def fail() -> None:
        with model.no_sync(), model.no_sync():
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()
    assert reduces(model, 0)
    with model.no_sync():
        with pytest.raises(KeyError, match="inside"):
            fail()
        assert not reduces(model, 1), "the outer no_sync is still active"
    assert reduces(model, 2)


@pytest.mark.spec("NOSYNC-07")
@flat_strategies
@ranks(2)
def test_forward_inside_no_sync_with_backward_outside_is_reduced(strategy: ShardingStrategy) -> None:
    plain = seeded()
    watch = Watch(plain)
    model = WRAPPED.shard(plain, strategy=strategy)
    with model.no_sync():
        loss = loss_of(model(batch()))
    with trace.record() as recorder:
        loss.backward()
    assert recorder.count("AR" if strategy is NO_SHARD else "RS") == len(UNITS)
    assert_same(WRAPPED.gradients(model), mean_gradients(seeded()))
    assert strategy is NO_SHARD or watch.alive() == []


@pytest.mark.spec("NOSYNC-07")
@flat_strategies
@ranks(2)
def test_forward_outside_no_sync_with_backward_inside_is_not_reduced(strategy: ShardingStrategy) -> None:
    plain = seeded()
    model = WRAPPED.shard(strategy=strategy)
    loss = loss_of(model(batch()))
    with trace.record() as recorder, model.no_sync():
        loss.backward()
    assert not {"RS", "AR"} & {event.kind for event in recorder.events}
    assert_same(flat_gradients(model), flattened(plain, local_gradients(plain, [0], dist.get_rank())))
    iterate(model, 1)
    assert_same(WRAPPED.gradients(model), mean_gradients(plain, [0, 1]), bitwise=False)


# --- leaving without a reduction ---


@pytest.mark.spec("NOSYNC-10")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(2)
def test_a_step_and_clipping_refuse_gradients_that_were_never_reduced(strategy: ShardingStrategy) -> None:
    compare_refusal(strategy)


@pytest.mark.spec("NOSYNC-10")
@hybrid_strategies
@ranks(4)
def test_step_and_clipping_of_a_hybrid_refuse_unreduced_gradients(strategy: ShardingStrategy) -> None:
    compare_refusal(strategy)


def compare_refusal(strategy: ShardingStrategy) -> None:
    """Both raise and leave gradients and parameters unchanged. After a reducing backward they work."""
    plain = seeded()
    model = WRAPPED.shard(strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acts: tuple[Callable[[], object], ...] = (optimizer.step, lambda: model.clip_grad_norm_(1.0))
    with model.no_sync():
        iterate(model)
    unreduced = flattened(plain, local_gradients(plain, [0], dist.get_rank()))
    before = {unit: parameter.detach().clone() for unit, parameter in flat_parameters(model).items()}
    for act in 2 * acts:
        message = rf"rank {dist.get_rank()}: .* found gradients that were never reduced.*zero_grad\(\)"
        with Wire() as wire, pytest.raises(RuntimeError, match=message):
            act()
        assert wire.sent == [], "before any collective"
        assert_same(flat_gradients(model), unreduced, bitwise=True)
        assert_same(flat_parameters(model), before, bitwise=True)
    iterate(model, 1)
    assert_same(WRAPPED.gradients(model), mean_gradients(plain, [0, 1]), bitwise=False)
    for act in acts:
        act()


@pytest.mark.spec("NOSYNC-10")
@pytest.mark.parametrize("set_to_none", [True, False])
@flat_strategies
@ranks(2)
def test_dropping_unreduced_gradients_makes_a_step_possible_again(
    strategy: ShardingStrategy, set_to_none: bool
) -> None:
    plain = seeded()
    model = WRAPPED.shard(strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        iterate(model, 0)
    optimizer.zero_grad(set_to_none=set_to_none)
    iterate(model, 1)
    expected = mean_gradients(plain, [1])
    assert_same(WRAPPED.gradients(model), expected, bitwise=True)
    optimizer.step()
    assert_same(full_values(model), stepped(plain, expected), bitwise=True)


@pytest.mark.spec("NOSYNC-10")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(2)
def test_step_with_a_closure_checks_gradients_after_the_closure(strategy: ShardingStrategy) -> None:
    for by_name in (False, True):
        plain, model = seeded(), WRAPPED.shard(strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = functools.partial(step_with, optimizer, by_name)

        def accumulate(model: Any = model) -> None:
            with model.no_sync():
                iterate(model, 0)

        def last_micro_batch(model: Any = model) -> str:
            iterate(model, 1)
            return "the loss"

        before = full_values(model)
        with pytest.raises(RuntimeError, match=r"SGD\.step\(\) found gradients that were never reduced"):
            step(accumulate)
        assert_same(full_values(model), before, bitwise=True)
        optimizer.zero_grad()
        accumulate()
        assert step(last_micro_batch) == "the loss"
        assert_same(full_values(model), stepped(plain, mean_gradients(plain, [0, 1])), bitwise=False)


def step_with(optimizer: torch.optim.Optimizer, by_name: bool, closure: Callable[[], Any]) -> Any:
    return optimizer.step(closure=closure) if by_name else optimizer.step(closure)


def stepped(plain: nn.Module, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values after a step of SGD with a learning rate of 0.1."""
    return {name: value.add(gradients[name], alpha=-0.1) for name, value in named(plain).items()}


class UsesOneLayer(nn.Module):
    """Two layers of one unit. Without ``both``, the gradient of the second one is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.first(x).sum() + self.second(x).sum() * both


@pytest.mark.spec("FWD-07", "NOSYNC-02")
@pytest.mark.parametrize("clears", ["both", "second", "neither"])
@ranks(2)
def test_only_zero_grad_clears_a_reduced_gradient_that_an_unreduced_one_replaces(clears: str) -> None:
    """Defect: a change in place, such as a division, clears a parameter whose unreduced gradient is zero."""
    model = FullyShardedDataParallel(UsesOneLayer(), device_id=device(), use_orig_params=True)
    x, parameters = torch.ones(1, 4, device=device()), list(model.parameters())
    model(x, both=True).backward()
    with model.no_sync():
        model(x, both=clears == "second").backward()
    for parameter in parameters[clears == "second" :]:
        assert parameter.grad is not None
        parameter.grad.mul_(float(clears == "neither"))
    model(x, both=True).backward()
    (mine,) = [parameter.grad for parameter in parameters if parameter.grad is not None]
    expected = {"both": [1.0, 1.0], "second": [3.0, 1.0], "neither": [3.0, 2.0]}[clears]
    assert mine.unique().tolist() == [expected[dist.get_rank()]]


@pytest.mark.spec("NOSYNC-02")
@pytest.mark.parametrize("use_orig_params", [True, False])
@ranks(2)
def test_an_unreduced_gradient_of_zeros_is_added_to_the_reduced_gradient(use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(UsesOneLayer(), device_id=device(), use_orig_params=use_orig_params)
    for factor in (1, 0, 1):
        with model.no_sync() if factor == 0 else contextlib.nullcontext():
            (factor * model(torch.ones(1, 4, device=device()), both=True)).backward()
    (mine,) = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert mine.unique().tolist() == [2.0]
