"""A unit in forward and backward: how often it all-gathers, when it frees memory, and that its gradients are correct.

The tests count collectives in the package's trace, which contains all of them (SHARD-16,
``sharding/test_strategies.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from spec_tests.harness import ranks
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import MLP, seeded
from spec_tests.models.running import batch
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy, trace

Wrap = Callable[[nn.Module], Any]
FULL, KEEP, NONE = [*ShardingStrategy][:3]
each_strategy = pytest.mark.parametrize("strategy", [FULL, KEEP, NONE], ids=lambda s: s.name)


def with_options(**options: Any) -> Wrap:
    return lambda module: FullyShardedDataParallel(module, **options)


def left_plain(module: nn.Module) -> nn.Module:
    return module


def three() -> Any:
    """Three blocks of 45 parameters, so that two ranks need padding."""
    return seeded(lambda: nn.Sequential(*(MLP(6, 3) for _ in range(3))))


def in_a_row(blocks: nn.Module, wrap: Wrap) -> Any:
    return wrap(nn.Sequential(*map(wrap, blocks)))


def each_twice(blocks: nn.Module, wrap: Wrap) -> Any:
    return wrap(nn.Sequential(*(unit for block in blocks for unit in [wrap(block)] * 2)))


def checkpoint_inside(impl: CheckpointImpl) -> Callable[[nn.Module, Wrap], Any]:
    return lambda blocks, wrap: wrap(nn.Sequential(*(wrap(checkpoint_wrapper(block, impl)) for block in blocks)))


def checkpoint_around(impl: CheckpointImpl) -> Callable[[nn.Module, Wrap], Any]:
    return lambda blocks, wrap: wrap(nn.Sequential(*(checkpoint_wrapper(wrap(block), impl) for block in blocks)))


def of_one_forward(model: nn.Module, x: Tensor) -> Tensor:
    # Reentrant checkpointing computes no gradients if no input requires a gradient.
    return model(x.requires_grad_()).square().mean()


def of_two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + model(2 * x).sin().mean()


# A model, its loss, and the number of all-gathers in an iteration with FULL_SHARD.
CASES = {
    "plain": (in_a_row, of_one_forward, 6),
    "each block twice": (each_twice, of_one_forward, 9),
    "two forwards, one backward": (in_a_row, of_two_forwards, 9),
    "checkpoint inside": (checkpoint_inside(CheckpointImpl.NO_REENTRANT), of_one_forward, 6),
    "checkpoint around": (checkpoint_around(CheckpointImpl.NO_REENTRANT), of_one_forward, 6),
    # torch all-gathers 9 times in these two cases.
    "reentrant inside": (checkpoint_inside(CheckpointImpl.REENTRANT), of_one_forward, 6),
    "reentrant around": (checkpoint_around(CheckpointImpl.REENTRANT), of_one_forward, 6),
}

# --- number of all-gathers and reductions ---


@pytest.mark.spec("SHARD-16", "PAR-07", "FWD-06", "ORIG-14")
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("strategy", [FULL, KEEP], ids=lambda s: s.name)
@pytest.mark.parametrize("name", CASES)
@ranks(2)
def test_step_has_minimal_collectives_and_correct_gradients(
    name: str, strategy: ShardingStrategy, is_frozen: bool
) -> None:
    build, loss, num_gathers = CASES[name]
    blocks, same = three(), three()
    for each in (blocks, same):
        each[1].requires_grad_(not is_frozen)
    model, plain = build(blocks, with_options(sharding_strategy=strategy)), build(same, left_plain)
    assert_trains_like(model, plain, range(2), loss=loss)
    with trace.record() as recorder:
        loss(model, batch()).backward()
    assert recorder.count("RS") == (2 if is_frozen else 3)
    if not is_frozen:
        assert recorder.count("AG") == (num_gathers if strategy is FULL else 3)


# --- a backward that does not use a unit ---


class Branches(nn.Module):
    """The output of the middle block is returned, and used only if the loss uses it."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.first, self.middle, self.last = map(wrap, three())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        middle = self.middle(x)
        return middle, self.last(x)


@pytest.mark.spec("PREF-08")
@each_strategy
@ranks(2)
def test_backward_that_skips_a_unit_leaves_it_sharded(strategy: ShardingStrategy) -> None:
    wrap = with_options(sharding_strategy=strategy)
    model, plain = wrap(Branches(wrap)), Branches(left_plain)
    loss = model(batch())[1].sum()
    with trace.record() as recorder:
        loss.backward()
    assert all(parameter.grad is None for parameter in model.middle.parameters())
    if strategy is FULL:
        # The prefetch of the middle unit was wrong. It is dropped at the end of backward.
        assert recorder.order("AG", "FREE", "RS") == [
            "AG last", "AG middle", "FREE last", "RS last", "AG first", "FREE first", "RS first", "FREE middle",
        ]  # fmt: skip
    model.zero_grad()
    for loss_of in (lambda net, x: net(x)[1].square().mean(), lambda net, x: (net(x)[0] * net(x)[1]).mean()):
        assert_trains_like(model, plain, range(2), loss=loss_of)


# --- frozen units ---


@pytest.mark.spec("ORIG-14")
@ranks(2)
def test_frozen_unit_reshards_after_its_input_gradients_and_is_never_reduced() -> None:
    blocks = three()
    blocks[1].requires_grad_(False)
    model = in_a_row(blocks, with_options())
    for _ in range(2):
        loss = model(batch()).sum()
        with trace.record() as recorder:
            loss.backward()
        assert recorder.order("RS") == ["RS 2", "RS 0"]
        order = recorder.order("AG", "B", "FREE")
        assert order.count("AG 1") == 1
        assert order.index("B 1") < order.index("FREE 1") < order.index("FREE 0")


@ranks(2)
def test_a_unit_may_be_frozen_and_thawed_between_iterations() -> None:
    model, plain = in_a_row(three(), with_options()), three()
    for trains in (True, False, True):
        for each in (model, plain):
            each[1].requires_grad_(trains)
        with trace.record() as recorder:
            assert_trains_like(model, plain)
        assert recorder.count("RS") == (3 if trains else 2)


# --- activation checkpointing of parts of a unit ---


@pytest.mark.spec("PAR-07")
@pytest.mark.parametrize("name", ["reentrant inside", "reentrant around", "checkpoint inside", "checkpoint around"])
@ranks(2)
def test_recomputed_unit_is_freed_before_next_one(name: str) -> None:
    build, loss, _ = CASES[name]
    model = build(three(), with_options(backward_prefetch=None))
    for _ in range(2):
        with trace.record() as recorder:
            loss(model, batch()).backward()
        order = [word.removesuffix("._checkpoint_wrapped_module") for word in recorder.order("AG", "FREE")]
        assert order == [f"{kind} {index}" for index in (0, 1, 2, 2, 1, 0) for kind in ("AG", "FREE")]


class Segments(nn.Module):
    """One unit with two parts, each of which is recomputed separately. The first layers may be units."""

    def __init__(self, use_reentrant: bool, wrap: Wrap) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.parts = nn.ModuleList(nn.Sequential(wrap(block), nn.Tanh()) for block in three()[:2])
        self.scale = nn.Parameter(torch.ones_like(batch()[0]))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(lambda y, part=part: part(y) * self.scale, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.spec("PAR-07")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("has_units", [False, True])
@each_strategy
@ranks(2)
def test_recomputed_parts_of_a_unit_train(strategy: ShardingStrategy, has_units: bool, use_reentrant: bool) -> None:
    def build(wrap: Wrap) -> Any:
        inner = wrap if has_units else left_plain
        return wrap(nn.Sequential(*(wrap(Segments(use_reentrant, inner)) for _ in range(2))))

    model = build(with_options(sharding_strategy=strategy))
    assert_trains_like(model, build(left_plain), range(2), loss=of_one_forward)


@pytest.mark.spec("PAR-07")
@pytest.mark.parametrize("impl", [None, *CheckpointImpl], ids=str)
@each_strategy
@ranks(2)
def test_units_around_units_train_with_minimal_collectives(
    strategy: ShardingStrategy, impl: CheckpointImpl | None
) -> None:
    def build(wrap: Wrap) -> Any:
        blocks = [wrap(nn.Sequential(before, wrap(inner), after)) for before, inner, after in (three(), three())]
        return wrap(nn.Sequential(*(block if impl is None else checkpoint_wrapper(block, impl) for block in blocks)))

    model = build(with_options(sharding_strategy=strategy))
    assert_trains_like(model, build(left_plain), range(2), loss=of_one_forward)
    with trace.record() as recorder:
        of_one_forward(model, batch()).backward()
    if strategy is FULL:
        # Four units, once for forward and once for backward.
        assert (recorder.count("AG"), recorder.count("RS")) == (8, 4)
