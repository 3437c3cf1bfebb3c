"""The constructor of the wrapper: its arguments, its errors, and the properties of the resulting module."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import minifsdp
from spec_tests.checkpoint.refusals import caught_warnings, refused
from spec_tests.harness import device, ranks
from spec_tests.models.modules import UNITS, WIDTH, Block, Stack, seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of, recorded_iteration
from spec_tests.models.sharding import FLAT_STRATEGIES, FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, wrapped
from spec_tests.models.values import (
    assert_same,
    chunked,
    flat_gradients,
    flat_parameters,
    full_values,
    local_gradients,
    mean_gradients,
    named,
)
from spec_tests.subject import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardingStrategy,
    trace,
)

FSDP = FullyShardedDataParallel

# --- the arguments ---


@pytest.mark.spec("CTOR-01")
@pytest.mark.pure
def test_the_arguments_are_those_of_torch() -> None:
    *ours, old_keyword = inspect.signature(FSDP).parameters.values()
    theirs = inspect.signature(torch_fsdp.FullyShardedDataParallel).parameters.values()
    our_arguments, their_arguments = (
        [(p.name, p.kind, getattr(p.default, "name", p.default)) for p in parameters] for parameters in (ours, theirs)
    )
    assert our_arguments == their_arguments
    assert (old_keyword.name, old_keyword.default) == ("fsdp_auto_wrap_policy", None)
    assert old_keyword.kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.spec("CTOR-01")
@ranks(2)
def test_the_arguments_may_be_given_by_position() -> None:
    offload, prefetch, precision = CPUOffload(), BackwardPrefetch.BACKWARD_POST, MixedPrecision()
    model = FSDP(
        seeded(), dist.group.WORLD, SHARD_GRAD_OP, offload, ModuleWrapPolicy({Block}), prefetch, precision, None, None,
        device(), True, True, False, True, [],
    )  # fmt: skip
    assert len(FSDP.fsdp_modules(model)) == len(UNITS)
    assert (model.sharding_strategy, model.backward_prefetch) == (SHARD_GRAD_OP, prefetch)
    assert (model.cpu_offload, model.mixed_precision) == (offload, precision)
    assert (model.forward_prefetch, model.limit_all_gathers) == (True, False)
    assert sum(1 for _ in model.parameters()) == sum(1 for _ in seeded().parameters()), "use_orig_params=True"


@pytest.mark.spec("CTOR-02")
@ranks(2)
def test_wrapper_requires_a_module() -> None:
    assert isinstance(FSDP(seeded()), nn.Module)
    with pytest.raises(TypeError, match="module"):
        FSDP()  # type: ignore[call-arg]
    for given in (None, 3, "model", nn.Linear, nn.Parameter(torch.ones(4)), [nn.Linear(2, 2)], torch.relu):
        with refused(TypeError, "module must be a torch.nn.Module", type(given).__name__):
            FSDP(given)


@pytest.mark.spec("CTOR-08")
@pytest.mark.parametrize("keyword", ["flatten_parameters", "shard_strategy", "reshard_after_forward"])
@ranks(2)
def test_an_unknown_keyword_is_refused(keyword: str) -> None:
    plain = seeded()
    with pytest.raises(TypeError, match=keyword):
        FSDP(plain, **{keyword: True})
    assert_same(named(plain), named(seeded()), bitwise=True)


@pytest.mark.spec("CTOR-09")
@pytest.mark.parametrize(
    "strategy", ["FULL_SHARD", "full_shard", "", 1, True, ShardingStrategy, torch_fsdp.ShardingStrategy.FULL_SHARD]
)
@ranks(2)
def test_any_other_strategy_is_refused_with_the_list_of_members(strategy: Any) -> None:
    members = [f"ShardingStrategy.{member.name}" for member in ShardingStrategy]
    plain = seeded()
    with refused(TypeError, "sharding_strategy", repr(strategy), *members):
        FSDP(plain, sharding_strategy=strategy, sync_module_states=True)
    assert_same(named(plain), named(seeded()), bitwise=True)


SETTINGS = (
    *("process_group", "sharding_strategy", "cpu_offload", "mixed_precision"),
    *("backward_prefetch", "forward_prefetch", "limit_all_gathers"),
)


@pytest.mark.spec("CTOR-16")
@pytest.mark.parametrize("argument", [*SETTINGS[:4], "ignored_modules", "ignored_states", "auto_wrap_policy"])
@ranks(2)
def test_none_is_the_same_as_leaving_out(argument: str) -> None:
    policy = {} if argument == "auto_wrap_policy" else {"auto_wrap_policy": ModuleWrapPolicy({Block})}
    given, left_out = FSDP(seeded(), **policy, **{argument: None}), FSDP(seeded(), **policy)
    for mine, theirs in zip(FSDP.fsdp_modules(given), FSDP.fsdp_modules(left_out), strict=True):
        assert [getattr(mine, name) for name in SETTINGS] == [getattr(theirs, name) for name in SETTINGS]
    assert everything_recorded(given) == everything_recorded(left_out)
    assert_same(flat_gradients(given), flat_gradients(left_out), bitwise=True)


@pytest.mark.spec("CTOR-16")
@ranks(2)
def test_none_for_backward_prefetch_is_not_the_same_as_leaving_it_out() -> None:
    assert "| AG3 B3 AG2 FREE3" in recorded_iteration(wrapped())
    assert "| B3 AG3 FREE3 RS3 B2 AG2" in recorded_iteration(wrapped(backward_prefetch=None))


def everything_recorded(model: FSDP) -> list[tuple[Any, ...]]:
    with trace.record() as recorder:
        iterate(model)
    return [(e.kind, e.unit, e.num_bytes, e.ranks, e.dtype, e.stream) for e in recorder.events]


# --- forward ---


class Both(NamedTuple):
    left: Tensor
    right: Any


@dataclass
class Answer:
    value: Tensor
    words: list[str]


UNKNOWN = object()
OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, None, 3, "word"),
    "list": lambda y: [y, [y.detach(), (y.sum(),)]],
    "dict": lambda y: {"value": y, 7: {"inner": y.mean(0)}, "nothing": None},
    "named tuple": lambda y: Both(y, {"right": y + 1}),
    "dataclass": lambda y: Answer(y, ["some", "words"]),
    "empty": lambda y: (),
    "nothing": lambda y: None,
    "a number": lambda y: float(y.detach().sum()),
    "a string": lambda y: "word",
    "a function": lambda y: torch.relu,
    "an unknown object": lambda y: UNKNOWN,
}


class Mixed(nn.Module):
    """Takes arguments of every kind and returns the kind of output that ``output`` selects."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.layer, self.output = nn.Linear(WIDTH, WIDTH), output

    def forward(self, x: Tensor, /, factor: float, *more: Any, mask: Tensor | None = None, **named: Any) -> Any:
        self.received = (factor, more, sorted(named), None if mask is None else mask.dtype)
        y = self.layer(x) * factor + sum(named.values())
        for item in more:
            y = y + item["x"]
        return OUTPUTS[self.output](y if mask is None else y.masked_fill(mask, 0.0))


class Passes(nn.Module):
    """Passes its arguments to an inner unit and returns that unit's output."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.before, self.mixed = nn.Linear(WIDTH, WIDTH), Mixed(output)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.mixed(self.before(x), *args, **kwargs)


@pytest.mark.spec("CTOR-03")
@pytest.mark.parametrize("output", list(OUTPUTS))
@ranks(2)
def test_wrapper_passes_arguments_and_outputs_unchanged(output: str) -> None:
    plain = seeded(lambda: Passes(output))
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({Mixed}))
    x = batch()
    mask = x > 0.5
    more, named_ones = ({"x": x[:1], "tag": UNKNOWN}, {"x": x[1:2]}), {"shift": x[2:], "other": 2.0}
    expected = plain(x, 1.5, *more, mask=mask, **named_ones)
    actual = model(x, 1.5, *more, mask=mask, **named_ones)
    assert_same_structure(actual, expected)
    assert model.mixed.module.received == plain.mixed.received == (1.5, more, ["other", "shift"], torch.bool)


def assert_same_structure(actual: Any, expected: Any) -> None:
    (mine, structure), (theirs, expected_structure) = tree_flatten(actual), tree_flatten(expected)
    assert structure == expected_structure
    for one, other in zip(mine, theirs, strict=True):
        assert type(one) is type(other)
        if isinstance(other, Tensor):
            assert torch.equal(one, other)
            assert one.requires_grad is other.requires_grad
        elif isinstance(other, Answer):
            assert_same_structure(vars(one), vars(other))
        else:
            assert one == other


@pytest.mark.spec("CTOR-03")
@ranks(2)
def test_forward_runs_between_all_gather_and_reshard() -> None:
    inside: list[list[str]] = []
    plain = nn.Linear(WIDTH, 2).to(device())
    plain.register_forward_hook(lambda *_: inside.append(recorder.order()))
    model = FSDP(nn.Sequential(FSDP(plain)))
    with trace.record() as recorder, torch.no_grad():
        model(batch())
    assert inside == [["AG 0", "F 0"]]
    assert recorder.order() == ["AG 0", "F 0", "FREE 0"]


@pytest.mark.spec("CTOR-05")
@pytest.mark.parametrize("was_used", [False, True], ids=["new", "has stepped before"])
@ranks(2)
def test_an_optimizer_from_before_wrapping_changes_nothing_and_warns_once(was_used: bool) -> None:
    # Wrap another model first, so that the package already watches optimizers.
    FSDP(nn.Linear(2, 2, device=device()))
    plain = seeded()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    if was_used:
        loss_of(plain(batch(rank=0))).backward()
        optimizer.step()
        optimizer.zero_grad()
    num_stale = len(list(plain.parameters()))
    model = wrapped(plain)
    before = full_values(model)
    heard: list[str] = []
    for step in range(3):
        iterate(model, step)
        with caught_warnings() as caught:
            optimizer.step()
        heard += [str(warning.message) for warning in caught]
    assert_same(full_values(model), before, bitwise=True)
    (message,) = heard
    assert f"rank {dist.get_rank()}: {num_stale} of {num_stale} parameters of this Adam" in message
    assert "build the optimizer after wrapping" in message


@pytest.mark.spec("CTOR-05", "ORIG-02")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_with_original_parameters_an_optimizer_from_before_wrapping_trains(strategy: ShardingStrategy) -> None:
    plain = seeded()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    model = wrapped(plain, sharding_strategy=strategy, use_orig_params=True)
    iterate(model, 0, optimizer)
    mean = mean_gradients(seeded())
    assert_same(full_values(model), {name: value - mean[name] for name, value in named(seeded()).items()})


# --- ranks of the shard group ---


@pytest.mark.spec("CTOR-06")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(4)
def test_given_process_group_all_gathers_and_reduces(strategy: ShardingStrategy) -> None:
    members = (0, 2) if dist.get_rank() % 2 == 0 else (1, 3)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[dist.get_rank() % 2]
    plain = seeded()
    model = wrapped(process_group=mine, sharding_strategy=strategy)
    with trace.record() as recorder:
        iterate(model)
    communication = [event for event in recorder.events if event.kind in ("AG", "RS", "AR")]
    assert {event.kind for event in communication} == {"AG", "RS"}
    assert {event.ranks for event in communication} == {members}
    assert {unit.process_group for unit in FSDP.fsdp_modules(model)} == {mine}
    # The group has two ranks. A sum of two terms does not depend on their order, so the results are bitwise equal.
    gradients = [local_gradients(plain, [0], rank) for rank in members]
    mean = {name: (gradients[0][name] + gradients[1][name]) / 2 for name in gradients[0]}
    expected = chunked(plain, mean, 2, members.index(dist.get_rank()))
    assert_same(flat_gradients(model), expected, bitwise=True)


@pytest.mark.spec("CTOR-06")
@ranks(4)
def test_default_process_group_is_used_without_a_given_group() -> None:
    plain = seeded()
    model = wrapped(process_group=None)
    with trace.record() as recorder:
        iterate(model)
    assert {event.ranks for event in recorder.events if event.kind in ("AG", "RS")} == {(0, 1, 2, 3)}
    assert model.process_group is dist.group.WORLD
    assert_same(flat_parameters(model), chunked(plain, named(plain), 4, dist.get_rank()), bitwise=True)


@pytest.mark.spec("CTOR-07")
@pytest.mark.parametrize("strategy", [None, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD])
@pytest.mark.pure
def test_error_without_process_group_names_init_process_group(strategy: ShardingStrategy | None) -> None:
    assert not dist.is_initialized()
    # The device is given, because this process belongs to no rank and must not create a context on a GPU.
    options: Any = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": torch.device("cpu")}
    with pytest.raises(RuntimeError, match="init_process_group"):
        FSDP(Stack(), sharding_strategy=strategy, **options)


@pytest.mark.spec("CTOR-17")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("is_inside", [False, True])
@ranks(2)
def test_a_module_that_is_wrapped_again_stays_in_its_first_unit(is_inside: bool, use_orig_params: bool) -> None:
    names = []
    for library in (torch_fsdp, minifsdp):
        twice: Any = {
            "use_orig_params": use_orig_params,
            "device_id": device(),
            # The second call must not broadcast a unit's parameters: each rank has a different shard. (torch does not
            # broadcast tensors that are on a CPU.)
            "sync_module_states": library is minifsdp,
        }
        model, once = seeded(), seeded()
        for plain in (model, once):
            plain.enter = library.FullyShardedDataParallel(plain.enter, **twice)
        first = model.enter
        again = library.FullyShardedDataParallel(first.module, **twice)
        if is_inside:
            first._fsdp_wrapped_module = again
        else:
            model.also = again
        assert (first._has_params, again._has_params) == (True, False)
        model, once = (library.FullyShardedDataParallel(plain, **twice) for plain in (model, once))
        names.append([name for name, _ in model.named_parameters()])
    assert names[0] == names[1]
    for whole in (model, once):
        iterate(whole)
    for ours, expected in zip(model.parameters(), once.parameters(), strict=True):
        assert torch.equal(ours, expected)
        # A parameter that the other rank stores completely has no gradient here.
        assert (ours.grad is None) is (expected.grad is None) is (ours.numel() == 0)
        assert ours.grad is None or torch.equal(ours.grad, expected.grad)


@pytest.mark.spec("CTOR-17")
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_empty_wrapper_around_a_wrapped_module_does_not_compute_with_shards(use_orig_params: bool) -> None:
    options: Any = {"use_orig_params": use_orig_params, "device_id": device()}
    first = FSDP(nn.Linear(WIDTH, WIDTH), **options)
    again = FSDP(first.module, **options)
    with refused(RuntimeError, "is sharded right now"):
        again(batch())


@pytest.mark.spec("CTOR-14")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(1)
def test_a_single_rank_behaves_as_no_shard(strategy: ShardingStrategy) -> None:
    assert_trains_alone(strategy, None)


@pytest.mark.spec("CTOR-14")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(2)
def test_a_rank_in_a_group_of_its_own_behaves_as_no_shard(strategy: ShardingStrategy) -> None:
    groups = [dist.new_group([rank]) for rank in range(2)]
    assert_trains_alone(strategy, groups[dist.get_rank()])


def assert_trains_alone(strategy: ShardingStrategy, group: dist.ProcessGroup | None) -> None:
    plain = seeded()
    with pytest.warns(UserWarning, match="since the world size is 1"):
        model = wrapped(sharding_strategy=strategy, process_group=group)
    not_sharded = wrapped(sharding_strategy=NO_SHARD, process_group=group)
    sizes = {unit: parameter.shape for unit, parameter in flat_parameters(model).items()}
    assert sizes == {unit: parameter.shape for unit, parameter in flat_parameters(not_sharded).items()}
    assert sum(size.numel() for size in sizes.values()) == sum(p.numel() for p in plain.parameters())
    # Flat tensors have other sizes and addresses, so another kernel may compute a step on a GPU. With this rate, a step
    # of SGD has only one rounding, so every kernel gets the same bits.
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
    for step in range(2):
        with Wire() as wire:
            assert recorded_iteration(model, step) == recorded_iteration(not_sharded, step)
        assert wire.sent == [], "a single rank sends nothing"
        loss_of(plain(batch(step))).backward()
        assert_same(flat_gradients(model), chunked(plain, {n: p.grad for n, p in plain.named_parameters()}, 1, 0))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        not_sharded.zero_grad()
    assert_same(full_values(model), named(plain), bitwise=True)


@pytest.mark.spec("CTOR-18")
@pytest.mark.parametrize("strategy", [None, FULL_SHARD, SHARD_GRAD_OP])
@ranks(1)
def test_single_rank_warning_equals_torch_and_appears_once_for_many_units(strategy: ShardingStrategy | None) -> None:
    theirs = None if strategy is None else torch_fsdp.ShardingStrategy[strategy.name]
    with pytest.warns(UserWarning) as by_torch:
        torch_fsdp.FullyShardedDataParallel(seeded(), sharding_strategy=theirs, device_id=device())
    with warnings.catch_warnings(record=True) as by_us:
        warnings.simplefilter("default")  # the default for a program that sets no filter
        model = wrapped(sharding_strategy=strategy)
    # Torch can give other warnings on an accelerator. Every warning of minifsdp begins with the rank.
    (said,) = [text for each in by_torch if "NO_SHARD" in (text := str(each.message))]
    (ours,) = [text for each in by_us if (text := str(each.message)).startswith("rank ")]
    assert ours.startswith(f"rank 0: {said.removesuffix('.')}: ")
    assert "torchrun" in ours
    assert {unit.sharding_strategy for unit in FSDP.fsdp_modules(model)} == {NO_SHARD}


@pytest.mark.spec("CTOR-18")
@ranks(2)
def test_no_shard_with_one_rank_and_full_shard_with_several_give_no_warning() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with caught_warnings() as caught:
        wrapped(sharding_strategy=NO_SHARD, process_group=alone)
        wrapped()
    assert [each for each in caught if str(each.message).startswith("rank ")] == []


@pytest.mark.spec("SHARD-18", "CTOR-18")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.cpu
@ranks(2)
def test_the_warnings_about_a_strategy_have_the_classes_of_torch(strategy: str, num_ranks: int) -> None:
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    group = own if num_ranks == 1 else dist.group.WORLD
    about: list[list[tuple[str, str]]] = []
    for wrapper, strategies in ((FSDP, ShardingStrategy), (torch_fsdp.FullyShardedDataParallel, None)):
        options = strategies or torch_fsdp.ShardingStrategy
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapper(seeded(), group, options[strategy], device_id=torch.device("cpu"))
        texts = [(each.category.__name__, str(each.message)) for each in caught]
        about.append([(name, "deprecated" if "deprecated" in text else "") for name, text in texts if "SHARD" in text])
    ours, theirs = about
    assert ours == theirs
    expected = {("NO_SHARD", 2): [("FutureWarning", "deprecated")], ("NO_SHARD", 1): []}
    assert ours == expected.get((strategy, num_ranks), [("UserWarning", "")] if num_ranks == 1 else [])


@pytest.mark.spec("CTOR-18", "HYB-05")
@ranks(2)
def test_hybrid_with_shard_groups_of_one_rank_warns_and_averages_gradients() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.warns(UserWarning, match="instead of ShardingStrategy.HYBRID_SHARD since the world size is 1"):
        model = FSDP(seeded(), (alone, dist.group.WORLD), HYBRID_SHARD, auto_wrap_policy=ModuleWrapPolicy({Block}))
    iterate(model)
    assert_same(flat_gradients(model), chunked(seeded(), mean_gradients(seeded()), 1, 0), bitwise=True)


@pytest.mark.spec("CTOR-17")
@ranks(2)
def test_a_module_with_new_parameters_can_be_wrapped_again() -> None:
    linear = nn.Linear(4, 4, device=device())
    FSDP(linear, device_id=device())
    linear.weight = nn.Parameter(torch.ones(4, 4, device=device()))
    linear.bias = nn.Parameter(torch.ones(4, device=device()))
    again = FSDP(linear, device_id=device())
    again(torch.ones(2, 4, device=device())).sum().backward()
    assert again._flat_param.grad is not None
