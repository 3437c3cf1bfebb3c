"""A unit in forward and backward: how often it all-gathers, when it frees memory, and that its gradients are correct.

The tests count collectives where PyTorch executes them, independently of the package's trace. Gradients are compared
with those of a plain model that computes the batches of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from spec_tests.engine.small import (
    assert_at_rest,
    assert_gradients,
    draw,
    full_gradients,
    is_open,
    mean_gradients,
    square_loss,
    train_once,
    units_of,
)
from spec_tests.harness import device, ranks
from spec_tests.models.modules import MLP, Nested, Twice, chain
from spec_tests.models.running import Wire
from spec_tests.subject import BackwardPrefetch, ShardingStrategy, trace
from spec_tests.subject import FullyShardedDataParallel as FSDP

FULL, KEEP, NONE = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
Wrap = Callable[[nn.Module], nn.Module]


def wrapper(**options: Any) -> Wrap:
    return lambda module: FSDP(module, device_id=device(), **options)


def left_plain(module: nn.Module) -> nn.Module:
    return module


# --- number of all-gathers and reductions of a unit ---


def from_an_input_with_gradient(model: nn.Module, rank: int) -> Tensor:
    # Reentrant checkpointing computes no gradients if no input requires a gradient.
    return model(draw(rank).requires_grad_()).square().mean()


def of_two_forwards(model: nn.Module, rank: int) -> Tensor:
    first, second = model(draw(rank)), model(draw(rank, step=1))
    return first.square().mean() + second.sin().mean()


def checkpointed(impl: CheckpointImpl, *, inside: bool) -> Callable[[Wrap], nn.Module]:
    def build(wrap: Wrap) -> nn.Module:
        blocks = []
        for block in chain():
            made = wrap(checkpoint_wrapper(block, impl)) if inside else checkpoint_wrapper(wrap(block), impl)
            blocks.append(made)
        return wrap(nn.Sequential(*blocks))

    return build


@dataclass(frozen=True)
class Case:
    """A way to use three units, and the numbers of all-gathers and reductions in one step."""

    name: str
    build: Callable[[Wrap], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    full_shard: tuple[int, int]
    shard_grad_op: tuple[int, int] = (3, 3)


def in_a_row(wrap: Wrap) -> nn.Module:
    return wrap(nn.Sequential(*map(wrap, chain())))


def each_twice(wrap: Wrap) -> nn.Module:
    return wrap(Twice([wrap(block) for block in chain()]))


REENTRANT, NO_REENTRANT = CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT
CASES = {
    case.name: case
    for case in [
        Case("plain", in_a_row, square_loss, (6, 3)),
        Case("each block twice", each_twice, square_loss, (9, 3)),
        Case("two forwards, one backward", in_a_row, of_two_forwards, (9, 3)),
        Case("checkpoint inside", checkpointed(NO_REENTRANT, inside=True), square_loss, (6, 3)),
        Case("checkpoint around", checkpointed(NO_REENTRANT, inside=False), square_loss, (6, 3)),
        # torch all-gathers 9 times in these two cases.
        Case("reentrant inside", checkpointed(REENTRANT, inside=True), from_an_input_with_gradient, (6, 3)),
        Case("reentrant around", checkpointed(REENTRANT, inside=False), from_an_input_with_gradient, (6, 3)),
    ]
}


@pytest.mark.spec("SHARD-16", "PAR-07", "FWD-06")
@pytest.mark.parametrize("strategy", [FULL, KEEP], ids=lambda s: s.name)
@pytest.mark.parametrize("name", CASES)
@ranks(2)
def test_step_has_minimal_collectives_and_correct_gradients(name: str, strategy: ShardingStrategy) -> None:
    case = CASES[name]
    model: Any = case.build(wrapper(sharding_strategy=strategy))
    expected = mean_gradients(case.build(left_plain).to(device()), case.loss)
    train_once(model, case.loss)
    assert_gradients(model, expected)
    model.zero_grad()
    with Wire() as wire, trace.record() as recorder:
        train_once(model, case.loss)
    assert_gradients(model, expected)
    counts = case.full_shard if strategy is FULL else case.shard_grad_op
    assert (wire.calls().count("AG"), wire.calls().count("RS")) == counts
    assert len(wire.calls()) == sum(counts), f"nothing else goes over the wire: {wire.calls()}"
    assert (recorder.count("AG"), recorder.count("RS")) == counts, "the trace says the same"
    assert_at_rest(model)


@pytest.mark.spec("SHARD-16")
@ranks(2)
def test_no_shard_unit_is_all_reduced_and_never_all_gathered() -> None:
    model: Any = in_a_row(wrapper(sharding_strategy=NONE))
    train_once(model)
    with Wire() as wire:
        train_once(model)
    assert wire.calls() == ["AR"] * 3


@pytest.mark.spec("SHARD-14", "FRESH-03")
@pytest.mark.parametrize("strategy", [FULL, KEEP], ids=lambda s: s.name)
@ranks(2)
def test_evaluation_all_gathers_units_once_without_reduction(strategy: ShardingStrategy) -> None:
    model: Any = in_a_row(wrapper(sharding_strategy=strategy))
    train_once(model)
    for number in range(2):
        with Wire() as wire, torch.no_grad():
            model(draw(0))
        # SHARD_GRAD_OP keeps the parameters for the next evaluation.
        assert wire.calls() == (["AG"] * 3 if number == 0 or strategy is FULL else [])
        if strategy is FULL:
            assert_at_rest(model)
    train_once(model)
    assert_at_rest(model)


# --- the order of events ---


def with_own_layer(wrap: Wrap) -> nn.Module:
    """Three blocks, followed by a layer that belongs to the root."""
    blocks = [wrap(block) for block in chain()]
    layer = nn.Linear(3, 2).to(device())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.25)
    return wrap(nn.Sequential(*blocks, layer))


FORWARD = "AG, F, AG 0, F 0, FREE 0, AG 1, F 1, FREE 1, AG 2, F 2, FREE 2"
BACKWARDS = {
    BackwardPrefetch.BACKWARD_PRE: (
        "B, AG 2, B 2, AG 1, FREE 2, RS 2, B 1, AG 0, FREE 1, RS 1, B 0, FREE 0, RS 0, FREE, RS"
    ),
    BackwardPrefetch.BACKWARD_POST: (
        "B, B 2, AG 2, FREE 2, AG 1, RS 2, B 1, FREE 1, AG 0, RS 1, B 0, FREE 0, RS 0, FREE, RS"
    ),
    None: "B, B 2, AG 2, FREE 2, RS 2, B 1, AG 1, FREE 1, RS 1, B 0, AG 0, FREE 0, RS 0, FREE, RS",
}


def without_waits(recorder: trace.Recorder) -> list[str]:
    """The order of events without waits. The waits depend on the rate limiter, which has its own tests."""
    return [word for word in recorder.order() if not word.startswith("WAIT")]


@pytest.mark.spec("SHARD-04", "SHARD-05", "PREF-02", "PREF-04", "PREF-06", "PREF-08", "PREF-11")
@pytest.mark.parametrize("prefetch", BACKWARDS, ids=str)
@ranks(2)
def test_a_step_of_full_shard_goes_in_this_order(prefetch: BackwardPrefetch | None) -> None:
    model: Any = with_own_layer(wrapper(backward_prefetch=prefetch))
    for _ in range(2):
        with trace.record() as recorder:
            train_once(model)
        assert ", ".join(without_waits(recorder)) == f"{FORWARD}, {BACKWARDS[prefetch]}"


@pytest.mark.spec("SHARD-08", "PREF-15")
@pytest.mark.parametrize("prefetch", BACKWARDS, ids=str)
@ranks(2)
def test_a_step_of_shard_grad_op_keeps_everything_until_its_backward(prefetch: BackwardPrefetch | None) -> None:
    model: Any = with_own_layer(wrapper(sharding_strategy=KEEP, backward_prefetch=prefetch))
    with trace.record() as recorder:
        train_once(model)
    assert ", ".join(without_waits(recorder)) == (
        "AG, F, AG 0, F 0, AG 1, F 1, AG 2, F 2, B, B 2, FREE 2, RS 2, B 1, FREE 1, RS 1, B 0, FREE 0, RS 0, FREE, RS"
    )


@pytest.mark.spec("PREF-12")
@ranks(2)
def test_forward_prefetch_starts_in_second_iteration() -> None:
    model: Any = with_own_layer(wrapper(forward_prefetch=True))
    expected = mean_gradients(with_own_layer(left_plain), square_loss)
    orders = []
    for _ in range(2):
        model.zero_grad()
        with trace.record() as recorder:
            train_once(model)
        orders.append(", ".join(without_waits(recorder)))
    assert_gradients(model, expected)
    assert orders[0] == f"{FORWARD}, {BACKWARDS[BackwardPrefetch.BACKWARD_PRE]}"
    # The backward order does not change: views are created when they are used, not when they are prefetched.
    assert orders[1] == (
        f"AG, AG 0, F, AG 1, F 0, FREE 0, AG 2, F 1, FREE 1, F 2, FREE 2, {BACKWARDS[BackwardPrefetch.BACKWARD_PRE]}"
    )


@pytest.mark.spec("PREF-07")
@ranks(2)
def test_prefetching_or_not_the_gradients_are_the_same_to_the_last_bit() -> None:
    found = []
    for prefetch in BACKWARDS:
        for ahead in (False, True):
            model: Any = with_own_layer(wrapper(backward_prefetch=prefetch, forward_prefetch=ahead))
            for _ in range(2):
                model.zero_grad()
                train_once(model)
            found.append(full_gradients(model))
    for other in found[1:]:
        for name, gradient in found[0].items():
            assert torch.equal(gradient, other[name]), name


# --- pre-backward hooks ---


@dataclass
class Answer:
    first: Tensor
    note: str
    second: Tensor


class TwoOutputs(nn.Module):
    """A block for each of two outputs, which are returned in the container ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.left, self.right = kind, MLP(3, 4), MLP(3, 4)

    def forward(self, x: Tensor) -> Any:
        left, right = self.left(x), self.right(x)
        if self.kind == "tuple":
            return left, right
        if self.kind == "list":
            return [None, left, 3, right]
        if self.kind == "dict":
            return {"first": left, "nested": {"second": (right,)}}
        return Answer(left, "a note", right)


def pick(output: Any, kind: str, index: int) -> Tensor:
    found: list[Tensor] = {
        "tuple": lambda: list(output),
        "list": lambda: [output[1], output[3]],
        "dict": lambda: [output["first"], output["nested"]["second"][0]],
        "dataclass": lambda: [output.first, output.second],
    }[kind]()
    return found[index]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "dataclass"])
@ranks(2)
def test_a_backward_may_begin_at_any_tensor_of_a_nested_output(kind: str, index: int) -> None:
    def build(wrap: Wrap) -> nn.Module:
        torch.manual_seed(2)
        return wrap(nn.Sequential(wrap(TwoOutputs(kind).to(device()))))

    def loss(model: nn.Module, rank: int) -> Tensor:
        return pick(model(draw(rank)), kind, index).square().mean()

    model: Any = build(wrapper())
    expected = mean_gradients(build(left_plain), loss)
    unused = "right" if index == 0 else "left"
    for name, gradient in expected.items():
        # A flat gradient is one tensor; the gradients of unused parameters are zero in it.
        if gradient is None:
            assert unused in name
            expected[name] = torch.zeros_like(dict(build(left_plain).named_parameters())[name])
    for _ in range(2):
        model.zero_grad()
        train_once(model, loss)
        assert_gradients(model, expected)
        assert_at_rest(model)


@ranks(2)
def test_a_loss_may_change_the_output_in_place() -> None:
    def loss(model: nn.Module, rank: int) -> Tensor:
        return model(draw(rank)).mul_(2).square().mean()

    model: Any = with_own_layer(wrapper())
    train_once(model, loss)
    assert_gradients(model, mean_gradients(with_own_layer(left_plain), loss))


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
    for _ in range(2):
        model.zero_grad()
        train_once(model)
        assert_gradients(model, mean_gradients(Pair(left_plain), square_loss))
        assert_at_rest(model)


# --- other kinds of backward ---


STRATEGIES = [FULL, KEEP, NONE]
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)


@each_strategy
@ranks(2)
def test_a_graph_may_be_run_backward_twice(strategy: ShardingStrategy) -> None:
    model: Any = with_own_layer(wrapper(sharding_strategy=strategy))
    loss = square_loss(model, dist.get_rank())
    loss.backward(retain_graph=True)
    assert_at_rest(model)
    loss.backward()
    assert_at_rest(model)
    expected = mean_gradients(with_own_layer(left_plain), lambda m, r: 2 * square_loss(m, r))
    assert_gradients(model, expected)


@each_strategy
@ranks(2)
def test_autograd_grad_of_input_alone_works(strategy: ShardingStrategy) -> None:
    model: Any = with_own_layer(wrapper(sharding_strategy=strategy))
    plain = with_own_layer(left_plain)
    x = draw(dist.get_rank()).requires_grad_()
    with Wire() as wire:
        (gradient,) = torch.autograd.grad(model(x).square().mean(), [x])
    (expected,) = torch.autograd.grad(plain(x).square().mean(), [x])
    torch.testing.assert_close(gradient, expected)
    assert wire.calls().count("RS") == 0
    assert_at_rest(model)
    assert all(p.grad is None for p in model.parameters())
    train_once(model)
    assert_gradients(model, mean_gradients(plain, square_loss))


@each_strategy
@ranks(2)
def test_an_evaluation_between_forward_and_backward_changes_nothing(strategy: ShardingStrategy) -> None:
    model: Any = with_own_layer(wrapper(sharding_strategy=strategy))
    plain = with_own_layer(left_plain)
    for _ in range(2):
        model.zero_grad()
        loss = square_loss(model, dist.get_rank())
        with torch.no_grad():
            output = model(draw(7))
        torch.testing.assert_close(output, plain(draw(7)).detach())
        loss.backward()
        assert_gradients(model, mean_gradients(plain, square_loss))
        assert_at_rest(model)


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
@ranks(2)
def test_a_prefetch_that_was_wrong_is_dropped_at_the_end_of_backward() -> None:
    model: Any = FSDP(Branches(wrapper()), device_id=device())
    plain = Branches(left_plain)
    expected = mean_gradients(plain, past_the_middle)
    for _ in range(2):
        model.zero_grad()
        with trace.record() as recorder:
            train_once(model, past_the_middle)
        order = without_waits(recorder)
        assert order[order.index("B last") :] == [
            "B last", "AG last", "AG middle", "FREE last", "RS last", "B first", "AG first", "FREE first", "RS first",
            "FREE middle",
        ]  # fmt: skip
        assert_gradients(model, expected)
        assert_at_rest(model)
    model.zero_grad()
    train_once(model, through_both)
    assert_gradients(model, mean_gradients(plain, through_both))


@each_strategy
@ranks(2)
def test_backward_that_skips_unit_leaves_it_sharded(strategy: ShardingStrategy) -> None:
    model: Any = FSDP(Branches(wrapper(sharding_strategy=strategy)), device_id=device(), sharding_strategy=strategy)
    plain = Branches(left_plain)
    for _ in range(2):
        model.zero_grad()
        train_once(model, past_the_middle)
        assert_gradients(model, mean_gradients(plain, past_the_middle))
        assert_at_rest(model)
    with torch.no_grad():
        for here, there in zip(units_of(model), (plain.first, plain.middle, plain.last), strict=True):
            here.layout.local_parameters()[0].mul_(0.5)
            for parameter in there.parameters():
                parameter.mul_(0.5)
    model.zero_grad()
    train_once(model, through_both)
    assert_gradients(model, mean_gradients(plain, through_both))


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
    for _ in range(2):
        model.zero_grad()
        with trace.record() as recorder:
            train_once(model)
        order = recorder.order()
        assert recorder.order("RS") == ["RS 2", "RS 0"]
        backward = order[order.index("B 2") :]
        assert backward.count("AG 1") == 1
        assert backward.index("B 1") < backward.index("FREE 1") < backward.index("FREE 0")
        assert_gradients(model, mean_gradients(build(left_plain), square_loss))
        assert_at_rest(model)


@pytest.mark.spec("ORIG-14")
@pytest.mark.parametrize("index", [0, 1, 2])
@each_strategy
@ranks(2)
def test_other_units_train_correctly_for_any_position_of_the_frozen_unit(
    index: int, strategy: ShardingStrategy
) -> None:
    build = with_frozen(index)
    model: Any = build(wrapper(sharding_strategy=strategy))
    for _ in range(2):
        model.zero_grad()
        with Wire() as wire:
            train_once(model)
        assert_gradients(model, mean_gradients(build(left_plain), square_loss))
        assert_at_rest(model)
    assert wire.calls().count("RS") == (0 if strategy is NONE else 2)


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
    for _ in range(2):
        model.zero_grad()
        with Wire() as wire:
            train_once(model, case.loss)
        assert_gradients(model, mean_gradients(plain, case.loss))
        assert_at_rest(model)
    assert wire.calls().count("RS") == 2


@ranks(2)
def test_frozen_first_unit_is_all_gathered_only_for_forward() -> None:
    model: Any = with_frozen(0)(wrapper())
    train_once(model)
    with trace.record() as recorder:
        train_once(model)
    assert recorder.order().count("AG 0") == 1


@ranks(2)
def test_a_unit_may_be_frozen_and_thawed_between_iterations() -> None:
    model: Any = in_a_row(wrapper())
    plain: Any = in_a_row(left_plain)
    for trained in (True, False, True):
        model[1].requires_grad_(trained)
        plain[1].requires_grad_(trained)
        model.zero_grad()
        with trace.record() as recorder:
            train_once(model)
        assert ("RS 1" in recorder.order()) is trained
        assert_gradients(model, mean_gradients(plain, square_loss))
        assert_at_rest(model)


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
@pytest.mark.parametrize("use_reentrant", [True, False])
@each_strategy
@ranks(2)
def test_two_recomputed_segments_in_one_unit_train_right(strategy: ShardingStrategy, use_reentrant: bool) -> None:
    def build(wrap: Wrap) -> nn.Module:
        torch.manual_seed(6)
        units = [Segments(use_reentrant=use_reentrant).to(device()) for _ in range(2)]
        return wrap(nn.Sequential(*map(wrap, units)))

    model: Any = build(wrapper(sharding_strategy=strategy))
    expected = mean_gradients(build(left_plain), from_an_input_with_gradient)
    for _ in range(2):
        model.zero_grad()
        train_once(model, from_an_input_with_gradient)
        assert_gradients(model, expected)
        assert_at_rest(model)


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


@pytest.mark.spec("PAR-07")
@each_strategy
@ranks(2)
def test_unit_is_kept_until_inner_segments_are_recomputed(
    strategy: ShardingStrategy,
) -> None:
    def build(wrap: Wrap) -> nn.Module:
        torch.manual_seed(6)
        return wrap(nn.Sequential(*(wrap(SegmentsAroundUnits(wrap)) for _ in range(2))))

    model: Any = build(wrapper(sharding_strategy=strategy))
    expected = mean_gradients(build(left_plain), from_an_input_with_gradient)
    for _ in range(2):
        model.zero_grad()
        train_once(model, from_an_input_with_gradient)
        assert_gradients(model, expected)
        assert_at_rest(model)


@pytest.mark.spec("PAR-07")
@pytest.mark.parametrize("impl", [None, NO_REENTRANT, REENTRANT], ids=str)
@each_strategy
@ranks(2)
def test_a_unit_around_a_unit_trains_right_also_when_it_is_recomputed(
    strategy: ShardingStrategy, impl: CheckpointImpl | None
) -> None:
    def build(wrap: Wrap) -> nn.Module:
        torch.manual_seed(6)
        blocks = [Nested(3, 4).to(device()) for _ in range(2)]
        for block in blocks:
            block.inner = wrap(block.inner)
        units = [wrap(block) for block in blocks]
        if impl is not None:
            units = [checkpoint_wrapper(unit, impl) for unit in units]
        return wrap(nn.Sequential(*units))

    model: Any = build(wrapper(sharding_strategy=strategy))
    expected = mean_gradients(build(left_plain), from_an_input_with_gradient)
    for _ in range(2):
        model.zero_grad()
        with Wire() as wire:
            train_once(model, from_an_input_with_gradient)
        assert_gradients(model, expected)
        assert_at_rest(model)
    if strategy is FULL:
        assert wire.calls().count("RS") == 4
        assert wire.calls().count("AG") == 8, "four units, once for forward and once for backward"


# --- accumulation ---


@pytest.mark.spec("NOSYNC-01", "NOSYNC-02", "NOSYNC-08", "SHARD-10")
@each_strategy
@ranks(2)
def test_first_backward_after_no_sync_reduces_the_sum_and_no_sync_reduces_nothing(
    strategy: ShardingStrategy,
) -> None:
    model: Any = in_a_row(wrapper(sharding_strategy=strategy))
    train_once(model)
    model.zero_grad()
    with Wire() as inside, model.no_sync():
        for step in (1, 2):
            model(draw(dist.get_rank(), step)).square().mean().backward()
    num_gathers = {FULL: 12, KEEP: 3, NONE: 0}[strategy]
    assert inside.calls() == ["AG"] * num_gathers
    with Wire() as after:
        train_once(model)
    assert after.calls().count("AG") == {FULL: 6, KEEP: 0, NONE: 0}[strategy]
    assert len(after.calls()) - after.calls().count("AG") == 3

    def of_three(plain: nn.Module, rank: int) -> Tensor:
        return sum((plain(draw(rank, step)).square().mean() for step in (0, 1, 2)), torch.zeros((), device=device()))

    assert_gradients(model, mean_gradients(in_a_row(left_plain), of_three))
    assert_at_rest(model)


@pytest.mark.spec("NOSYNC-07")
@pytest.mark.parametrize("forward_inside", [True, False])
@each_strategy
@ranks(2)
def test_no_sync_depends_only_on_backward(strategy: ShardingStrategy, forward_inside: bool) -> None:
    model: Any = in_a_row(wrapper(sharding_strategy=strategy))
    plain = in_a_row(left_plain)
    if forward_inside:
        with model.no_sync():
            loss = square_loss(model, dist.get_rank())
        loss.backward()
        assert_gradients(model, mean_gradients(plain, square_loss))
        assert_at_rest(model)
        return
    loss = square_loss(model, dist.get_rank())
    with model.no_sync(), Wire() as wire:
        loss.backward()
    assert wire.calls().count("RS") == 0
    assert "AR" not in wire.calls()
    train_once(model)
    assert_gradients(model, mean_gradients(plain, lambda m, r: 2 * square_loss(m, r)))


# --- the root ---


@pytest.mark.spec("SHARD-05", "SHARD-13")
@ranks(2)
def test_only_root_is_kept_until_backward() -> None:
    model: Any = with_own_layer(wrapper())
    loss = square_loss(model, dist.get_rank())
    assert [is_open(unit) for unit in units_of(model)] == [True, False, False, False]
    loss.backward()
    assert_at_rest(model)


@pytest.mark.spec("SHARD-14")
@ranks(2)
def test_root_is_resharded_after_an_evaluation() -> None:
    model: Any = with_own_layer(wrapper())
    with torch.no_grad():
        model(draw(0))
    assert_at_rest(model)
