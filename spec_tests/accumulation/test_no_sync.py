"""``no_sync``: gradient accumulation without communication.

Inside, a backward keeps this rank's unreduced, unsharded gradient. The first backward outside reduces the sum.
``test_timelines.py`` checks the order of whole iterations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_tests.harness import device, ranks
from spec_tests.models import apis, modules, running, values
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy

FULL_SHARD, _, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 = ShardingStrategy

flat_strategies = pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])


def assert_unreduced(model: FullyShardedDataParallel, *steps: int) -> None:
    """The flat gradients are the sums of this rank's gradients of some steps."""
    plain, found = modules.seeded(), values.flat_gradients(model)
    expected = values.flattened(plain, values.local_gradients(plain, steps, dist.get_rank()))
    # On four ranks, units end with padding.
    values.assert_same({unit: found[unit][: len(row)] for unit, row in expected.items()}, expected)


def reduces(model: FullyShardedDataParallel, step: int) -> bool:
    """Whether an iteration reduces. All units must give the same result."""
    with running.Wire() as wire:
        running.iterate(model, step)
    count = len(wire.calls("RS", "AR"))
    assert count in (0, len(modules.UNITS))
    return count > 0


# --- inside the context ---


@pytest.mark.spec("NOSYNC-01", "NOSYNC-04", "NOSYNC-05", "NOSYNC-09")
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD, HYBRID_SHARD])
@ranks(4)
def test_gradients_inside_no_sync_are_unreduced_and_have_the_size_of_the_full_unit(strategy: ShardingStrategy) -> None:
    model = apis.WRAPPED.shard(strategy=strategy)
    for steps in ((0, 1, 2), (3, 4)):
        with model.no_sync():
            for step in steps:
                running.iterate(model, step)
        assert_unreduced(model, *steps)
        model.zero_grad()
    running.iterate(model)
    for parameter in values.flat_parameters(model).values():
        assert parameter.grad.shape == parameter.shape


@pytest.mark.spec("NOSYNC-05")
@flat_strategies
@ranks(2)
def test_no_sync_shows_unreduced_gradients_of_original_parameters(strategy: ShardingStrategy) -> None:
    plain, model = modules.seeded(), apis.ORIGINALS.shard(strategy=strategy)
    with model.no_sync():
        running.iterate(model)
        mine = values.local_gradients(plain, [0], dist.get_rank())
        for parameter, gradient in zip(model.parameters(), mine.values(), strict=True):
            assert isinstance(parameter, nn.Parameter)
            assert torch.equal(parameter.grad.view_as(gradient), gradient)
        model.zero_grad()
        running.iterate(model, 1)
    running.iterate(model, 2)
    values.assert_same(apis.ORIGINALS.gradients(model), values.mean_gradients(plain, (1, 2)))


# --- allowed calls ---


@pytest.mark.spec("NOSYNC-04")
@ranks(2)
def test_inner_unit_refuses_no_sync_and_keeps_working() -> None:
    model = apis.WRAPPED.shard()
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
    with running.Wire() as wire:
        with model.no_sync():
            model(torch.ones(1, 4, device=device())).sum().backward()
        assert wire.calls("RS") == []
        model(torch.ones(1, 4, device=device())).sum().backward()
        assert wire.calls("RS") == ["RS", "RS"]


# --- entering and leaving ---


@pytest.mark.spec("NOSYNC-06")
@pytest.mark.parametrize("error", [None, KeyError])
@ranks(2)
def test_nested_contexts_end_with_the_outermost(error: type[Exception] | None) -> None:
    model = apis.WRAPPED.shard()

    def leave() -> None:
        if error is not None:
            raise error

    with contextlib.suppress(KeyError), model.no_sync(), model.no_sync():
        leave()
    assert reduces(model, 0)
    with model.no_sync():
        with contextlib.suppress(KeyError), model.no_sync():
            assert not reduces(model, 1)
            leave()
        assert not reduces(model, 2), "still inside the outer no_sync"
    assert reduces(model, 3)
    expected = values.accumulated_gradients(modules.seeded(), [0], [1, 2, 3])
    values.assert_same(apis.WRAPPED.gradients(model), expected, bitwise=False)


@pytest.mark.spec("NOSYNC-07")
@flat_strategies
@ranks(2)
def test_the_context_of_the_backward_decides_and_not_that_of_the_forward(strategy: ShardingStrategy) -> None:
    plain = modules.seeded()
    watch = running.Watch(plain)
    model = apis.WRAPPED.shard(plain, strategy=strategy)
    with model.no_sync():
        loss = model(running.batch()).square().mean()
    loss.backward()
    values.assert_same(apis.WRAPPED.gradients(model), values.mean_gradients(modules.seeded()))
    assert strategy is NO_SHARD or watch.alive() == []
    model.zero_grad()
    loss = model(running.batch()).square().mean()
    with running.Wire() as wire, model.no_sync():
        loss.backward()
    assert wire.calls("RS", "AR") == []
    assert_unreduced(model, 0)
    running.iterate(model, 1)
    values.assert_same(apis.WRAPPED.gradients(model), values.mean_gradients(modules.seeded(), [0, 1]), bitwise=False)


# --- leaving without a reduction ---


@pytest.mark.spec("NOSYNC-10")
@pytest.mark.parametrize("strategy", [FULL_SHARD, HYBRID_SHARD_ZERO2])
@ranks(4)
def test_a_step_and_clipping_refuse_gradients_that_were_never_reduced(strategy: ShardingStrategy) -> None:
    model = apis.WRAPPED.shard(strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acts: tuple[Callable[[], object], ...] = (optimizer.step, lambda: model.clip_grad_norm_(1.0))
    with model.no_sync():
        running.iterate(model)
    before = {unit: parameter.detach().clone() for unit, parameter in values.flat_parameters(model).items()}
    for act in 2 * acts:
        message = rf"rank {dist.get_rank()}: .* found gradients that were never reduced.*zero_grad\(\)"
        with running.Wire() as wire, pytest.raises(RuntimeError, match=message):
            act()
        assert wire.sent == [], "before any collective"
        assert_unreduced(model, 0)
        values.assert_same(values.flat_parameters(model), before, bitwise=True)
    running.iterate(model, 1)
    values.assert_same(apis.WRAPPED.gradients(model), values.mean_gradients(modules.seeded(), [0, 1]), bitwise=False)
    for act in acts:
        act()


@pytest.mark.spec("NOSYNC-10")
@pytest.mark.parametrize("set_to_none", [True, False])
@flat_strategies
@ranks(2)
def test_dropping_unreduced_gradients_makes_a_step_possible_again(
    strategy: ShardingStrategy, set_to_none: bool
) -> None:
    model = apis.WRAPPED.shard(strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        running.iterate(model, 0)
    optimizer.zero_grad(set_to_none=set_to_none)
    running.iterate(model, 1)
    values.assert_same(apis.WRAPPED.gradients(model), values.mean_gradients(modules.seeded(), [1]), bitwise=True)
    optimizer.step()


@pytest.mark.spec("NOSYNC-10")
@pytest.mark.parametrize("is_by_name", [False, True])
@ranks(2)
def test_step_with_a_closure_checks_gradients_after_the_closure(is_by_name: bool) -> None:
    plain, model = modules.seeded(), apis.WRAPPED.shard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(closure: Callable[[], Any]) -> Any:
        return optimizer.step(closure=closure) if is_by_name else optimizer.step(closure)

    def accumulate() -> None:
        with model.no_sync():
            running.iterate(model, 0)

    with pytest.raises(RuntimeError, match=r"SGD\.step\(\) found gradients that were never reduced"):
        step(accumulate)
    values.assert_same(apis.WRAPPED.values(model), values.named(plain), bitwise=True)
    optimizer.zero_grad()
    accumulate()
    assert isinstance(step(lambda: running.iterate(model, 1)), float)
    stepped = values.mean_gradients(plain, [0, 1])
    expected = {name: value.add(stepped[name], alpha=-0.1) for name, value in values.named(plain).items()}
    values.assert_same(apis.WRAPPED.values(model), expected, bitwise=False)


# --- gradients that are replaced or zero ---


@pytest.mark.spec("NOSYNC-02")
@apis.wrapper_apis
@ranks(2)
def test_no_shard_uses_gradient_replaced_inside_no_sync(api: Any) -> None:
    plain, model = modules.seeded(), api.shard(strategy=NO_SHARD)
    with model.no_sync():
        running.iterate(model, 0)
    for parameter in model.parameters():
        parameter.grad = parameter.grad / 2
    running.iterate(model, 1)
    halved, last = values.mean_gradients(plain, [0]), values.mean_gradients(plain, [1])
    expected = {name: halved[name] / 2 + last[name] for name in last}
    values.assert_same(api.gradients(model), expected, bitwise=False)


class UsesOneLayer(nn.Module):
    """Two layers of one unit. Without ``both``, the gradient of the second one is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, both: bool) -> Tensor:
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
