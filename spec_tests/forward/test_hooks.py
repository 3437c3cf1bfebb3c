"""A unit in forward and backward: how often it all-gathers, when it frees memory, and that its gradients are correct.

The tests count collectives where PyTorch executes them, independently of the package's trace. Gradients are compared
with those of a plain model that computes the batches of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
    NO_REENTRANT,
    NONE,
    REENTRANT,
    Wrap,
    each_strategy,
    from_an_input_with_gradient,
    in_a_row,
    left_plain,
    without_waits,
    wrapper,
)
from spec_tests.subject import FullyShardedDataParallel as FSDP
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


@ranks(2)
def test_output_equal_to_the_input_does_not_affect_gradients() -> None:
    class Passing(MLP):
        def forward(self, x: Tensor) -> Any:
            return x, super().forward(x)

    class Pair(nn.Module):
        def __init__(self, wrap: Wrap) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.first, self.second = wrap(MLP(3, 4).to(device())), wrap(Passing(3, 4).to(device()))

        def forward(self, x: Tensor) -> Tensor:
            before, after = self.second(self.first(x))
            return before * after

    model: Any = FSDP(Pair(wrapper()), device_id=device())
    assert_trains(model, mean_gradients(Pair(left_plain), square_loss))


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


def with_frozen(index: int) -> Callable[[Wrap], nn.Module]:
    def build(wrap: Wrap) -> nn.Module:
        blocks = chain()
        blocks[index].requires_grad_(False)
        return wrap(nn.Sequential(*map(wrap, blocks)))

    return build


@pytest.mark.spec("ORIG-14")
@ranks(2)
def test_frozen_unit_reshards_after_its_input_gradients_and_is_never_reduced() -> None:
    build = with_frozen(1)
    model: Any = build(wrapper())
    train_once(model)
    with trace.record() as recorder:
        train_once(model)
    order = recorder.order()
    assert recorder.order("RS") == ["RS 2", "RS 0"]
    backward = order[order.index("B 2") :]
    assert backward.count("AG 1") == 1
    assert backward.index("B 1") < backward.index("FREE 1") < backward.index("FREE 0")


@pytest.mark.spec("ORIG-14")
@pytest.mark.parametrize("index", [0, 1, 2])
@each_strategy
@ranks(2)
def test_other_units_train_correctly_for_any_position_of_the_frozen_unit(
    index: int, strategy: ShardingStrategy
) -> None:
    build = with_frozen(index)
    model: Any = build(wrapper(sharding_strategy=strategy))
    calls = assert_trains(model, mean_gradients(build(left_plain), square_loss))
    assert calls.count("RS") == (0 if strategy is NONE else 2)
    # The backward of the first unit needs no parameters, because nothing before it is trained.
    assert calls.count("AG") == {FULL: 5 if index == 0 else 6, KEEP: 3, NONE: 0}[strategy]


def with_the_second_one_frozen(build: Callable[[Wrap], nn.Module], wrap: Wrap) -> nn.Module:
    num_wrapped = 0

    def freeze_and_wrap(module: nn.Module) -> nn.Module:
        nonlocal num_wrapped
        num_wrapped += 1
        return wrap(module.requires_grad_(False) if num_wrapped == 2 else module)

    return build(freeze_and_wrap).to(device())


@pytest.mark.spec("ORIG-14")
@pytest.mark.parametrize("strategy", [FULL, KEEP], ids=lambda s: s.name)
@pytest.mark.parametrize("name", CASES)
@ranks(2)
def test_frozen_unit_stays_unsharded_during_each_kind_of_use(name: str, strategy: ShardingStrategy) -> None:
    case = CASES[name]
    model: Any = with_the_second_one_frozen(case.build, wrapper(sharding_strategy=strategy))
    plain = with_the_second_one_frozen(case.build, left_plain)
    assert assert_trains(model, mean_gradients(plain, case.loss), case.loss).count("RS") == 2


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


class Segments(nn.Module):
    """One unit with two parts, each of which is recomputed separately."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.first, self.between, self.last = MLP(3, 4), nn.Linear(3, 3), MLP(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=self.use_reentrant)
        return checkpoint(self.last, torch.tanh(self.between(x)), use_reentrant=self.use_reentrant)


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


class SegmentsAroundUnits(nn.Module):
    """One unit with two parts that are recomputed separately. Each part has an inner unit, then a layer of its own."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.inner = nn.ModuleList(wrap(MLP(3, 4).to(device())) for _ in range(2))
        self.own = nn.ModuleList(nn.Linear(3, 3) for _ in range(2)).to(device())

    def segment(self, index: int) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.tanh(self.own[index](self.inner[index](x)))

    def forward(self, x: Tensor) -> Tensor:
        for index in range(2):
            x = checkpoint(self.segment(index), x, use_reentrant=True)
        return x


def two_units_of_segments(wrap: Wrap, *, use_reentrant: bool) -> nn.Module:
    return nn.Sequential(*[wrap(Segments(use_reentrant=use_reentrant).to(device())) for _ in range(2)])


def two_units_of_segments_around_units(wrap: Wrap) -> nn.Module:
    return nn.Sequential(*[wrap(SegmentsAroundUnits(wrap)) for _ in range(2)])


def two_units_around_units(wrap: Wrap, impl: CheckpointImpl | None) -> nn.Module:
    blocks: list[nn.Module] = [Nested(3, 4).to(device()) for _ in range(2)]
    for block in blocks:
        block.inner = wrap(block.inner)
    blocks = [wrap(block) for block in blocks]
    return nn.Sequential(*[block if impl is None else checkpoint_wrapper(block, impl) for block in blocks])


RECOMPUTED: dict[str, Callable[[Wrap], nn.Module]] = {
    "two segments in one unit": partial(two_units_of_segments, use_reentrant=False),
    "two reentrant segments in one unit": partial(two_units_of_segments, use_reentrant=True),
    "segments around units": two_units_of_segments_around_units,
    "a unit around a unit": partial(two_units_around_units, impl=None),
    "a recomputed unit around a unit": partial(two_units_around_units, impl=NO_REENTRANT),
    "a reentrantly recomputed unit around a unit": partial(two_units_around_units, impl=REENTRANT),
}


@pytest.mark.spec("PAR-07")
@pytest.mark.parametrize("name", RECOMPUTED)
@each_strategy
@ranks(2)
def test_recomputed_parts_and_nested_units_train_correctly(strategy: ShardingStrategy, name: str) -> None:
    def build(wrap: Wrap) -> nn.Module:
        torch.manual_seed(6)
        return wrap(RECOMPUTED[name](wrap))

    model: Any = build(wrapper(sharding_strategy=strategy))
    expected = mean_gradients(build(left_plain), from_an_input_with_gradient)
    calls = assert_trains(model, expected, from_an_input_with_gradient)
    if strategy is FULL and "around a unit" in name:
        assert calls.count("RS") == 4
        assert calls.count("AG") == 8, "four units, once for forward and once for backward"
