"""A unit in forward and backward: how often it all-gathers, when it frees memory, and that its gradients are correct.

The tests count collectives where PyTorch executes them, independently of the package's trace. Gradients are compared
with those of a plain model that computes the batches of all ranks.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from spec_tests.harness import device, ranks
from spec_tests.models.modules import MLP, Nested, chain
from spec_tests.models.small import (
    assert_trains,
    draw,
    mean_gradients,
    square_loss,
    train_once,
    units_of,
)
from spec_tests.models.three_units import (
    CASES,
    FULL,
    KEEP,
    NONE,
    Wrap,
    each_strategy,
    in_a_row,
    left_plain,
    without_waits,
    wrapper,
)
from spec_tests.models.three_units import from_an_input_with_gradient as with_input_gradient
from spec_tests.subject import ShardingStrategy, trace

# --- number of all-gathers and reductions ---


@pytest.mark.spec("SHARD-16", "PAR-07", "FWD-06")
@pytest.mark.parametrize("strategy", [FULL, KEEP], ids=lambda s: s.name)
@pytest.mark.parametrize("name", CASES)
@ranks(2)
def test_step_has_minimal_collectives_and_correct_gradients(name: str, strategy: ShardingStrategy) -> None:
    case = CASES[name]
    model: Any = case.build(wrapper(sharding_strategy=strategy))
    expected = mean_gradients(case.build(left_plain).to(device()), case.loss)
    with trace.record() as recorder:
        calls = assert_trains(model, expected, case.loss)
    counts = case.full_shard if strategy is FULL else case.shard_grad_op
    assert (calls.count("AG"), calls.count("RS")) == counts
    assert len(calls) == sum(counts), f"other collectives were started: {calls}"
    assert (recorder.count("AG"), recorder.count("RS")) == (2 * counts[0], 2 * counts[1]), "the trace is equal"


@pytest.mark.spec("SHARD-16")
@ranks(2)
def test_no_shard_unit_is_all_reduced_and_never_all_gathered() -> None:
    model: Any = in_a_row(wrapper(sharding_strategy=NONE))
    assert assert_trains(model, mean_gradients(in_a_row(left_plain), square_loss)) == ["AR"] * 3


# --- pre-backward hooks ---


# --- other kinds of backward ---


class Branches(nn.Module):
    """The output of the middle block is returned, and used only if the loss uses it."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        blocks = chain()
        self.first, self.middle, self.last = (wrap(block) for block in blocks)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        middle = self.middle(x)
        return middle, self.last(x)


def past_the_middle(model: nn.Module, rank: int) -> Tensor:
    return model(draw(rank))[1].square().mean()


def through_both(model: nn.Module, rank: int) -> Tensor:
    middle, last = model(draw(rank))
    return (middle * last).mean()


@pytest.mark.spec("PREF-08")
@each_strategy
@ranks(2)
def test_backward_that_skips_a_unit_leaves_it_sharded(strategy: ShardingStrategy) -> None:
    wrap = wrapper(sharding_strategy=strategy)
    model: Any = wrap(Branches(wrap))
    plain = Branches(left_plain)
    with trace.record() as recorder:
        assert_trains(model, mean_gradients(plain, past_the_middle), past_the_middle)
    if strategy is FULL:
        # The prefetch of the middle unit was wrong. It is dropped at the end of backward.
        order = without_waits(recorder)
        assert order[-10:] == [
            "B last", "AG last", "AG middle", "FREE last", "RS last", "B first", "AG first", "FREE first", "RS first",
            "FREE middle",
        ]  # fmt: skip
        assert order == order[: len(order) // 2] * 2
    with torch.no_grad():
        for here, there in zip(units_of(model), (plain.first, plain.middle, plain.last), strict=True):
            here.layout.local_parameters[0].mul_(0.5)
            for parameter in there.parameters():
                parameter.mul_(0.5)
    assert_trains(model, mean_gradients(plain, through_both), through_both)


# --- frozen units ---


@pytest.mark.spec("ORIG-14")
@ranks(2)
def test_frozen_unit_reshards_after_its_input_gradients_and_is_never_reduced() -> None:
    wrap, blocks = wrapper(), chain()
    blocks[1].requires_grad_(False)
    model: Any = wrap(nn.Sequential(*map(wrap, blocks)))
    train_once(model)
    with trace.record() as recorder:
        train_once(model)
    order = recorder.order()
    assert recorder.order("RS") == ["RS 2", "RS 0"]
    backward = order[order.index("B 2") :]
    assert backward.count("AG 1") == 1
    assert backward.index("B 1") < backward.index("FREE 1") < backward.index("FREE 0")


@pytest.mark.spec("ORIG-14")
@pytest.mark.parametrize("strategy", [FULL, KEEP], ids=lambda s: s.name)
@pytest.mark.parametrize("name", CASES)
@ranks(2)
def test_frozen_unit_stays_unsharded_during_each_kind_of_use(name: str, strategy: ShardingStrategy) -> None:
    case = CASES[name]

    def build(wrap: Wrap) -> Any:
        numbers = itertools.count()

        def freeze_the_second_one(module: nn.Module) -> nn.Module:
            return wrap(module.requires_grad_(False) if next(numbers) == 1 else module)

        return case.build(freeze_the_second_one)

    model = build(wrapper(sharding_strategy=strategy))
    expected = mean_gradients(build(left_plain).to(device()), case.loss)
    assert assert_trains(model, expected, case.loss).count("RS") == 2


@ranks(2)
def test_a_unit_may_be_frozen_and_thawed_between_iterations() -> None:
    model: Any = in_a_row(wrapper())
    plain: Any = in_a_row(left_plain)
    for trained in (True, False, True):
        model[1].requires_grad_(trained)
        plain[1].requires_grad_(trained)
        calls = assert_trains(model, mean_gradients(plain, square_loss), num_steps=1)
        assert calls.count("RS") == (3 if trained else 2)


# --- activation checkpointing of parts of a unit ---


@pytest.mark.spec("PAR-07")
@pytest.mark.parametrize("name", ["reentrant inside", "reentrant around", "checkpoint inside", "checkpoint around"])
@ranks(2)
def test_recomputed_unit_is_freed_before_next_one(name: str) -> None:
    case = CASES[name]
    model: Any = case.build(wrapper(backward_prefetch=None))
    for _ in range(2):
        with trace.record() as recorder:
            train_once(model, case.loss)
        order = [word.removesuffix("._checkpoint_wrapped_module") for word in recorder.order("AG", "FREE")]
        one_by_one = ["AG 2", "FREE 2", "AG 1", "FREE 1", "AG 0", "FREE 0"]
        assert order == one_by_one[4:] + one_by_one[2:4] + one_by_one[:2] + one_by_one


class Segments(nn.Module):
    """One unit with two parts, each of which is recomputed separately. The first layers may be units."""

    def __init__(self, use_reentrant: bool, wrap: Wrap = left_plain) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.parts = nn.ModuleList(nn.Sequential(wrap(MLP(3, 4)), nn.Linear(3, 3), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.spec("PAR-07")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("has_units", [False, True])
@each_strategy
@ranks(2)
def test_recomputed_parts_of_a_unit_train(strategy: ShardingStrategy, has_units: bool, use_reentrant: bool) -> None:
    def build(wrap: Wrap) -> Any:
        torch.manual_seed(6)
        inner = wrap if has_units else left_plain
        return wrap(nn.Sequential(*(wrap(Segments(use_reentrant, inner).to(device())) for _ in range(2))))

    model = build(wrapper(sharding_strategy=strategy))
    assert_trains(model, mean_gradients(build(left_plain), with_input_gradient), with_input_gradient)


@pytest.mark.spec("PAR-07")
@pytest.mark.parametrize("impl", [None, *CheckpointImpl], ids=str)
@each_strategy
@ranks(2)
def test_units_around_units_train_with_minimal_collectives(
    strategy: ShardingStrategy, impl: CheckpointImpl | None
) -> None:
    def build(wrap: Wrap) -> Any:
        torch.manual_seed(6)
        blocks = []
        for _ in range(2):
            block: Any = Nested(3, 4).to(device())
            block.inner = wrap(block.inner)
            block = wrap(block)
            blocks.append(block if impl is None else checkpoint_wrapper(block, impl))
        return wrap(nn.Sequential(*blocks))

    model = build(wrapper(sharding_strategy=strategy))
    calls = assert_trains(model, mean_gradients(build(left_plain), with_input_gradient), with_input_gradient)
    if strategy is FULL:
        # Four units, once for forward and once for backward.
        assert (calls.count("AG"), calls.count("RS")) == (8, 4)
