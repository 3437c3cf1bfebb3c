"""The constructor of the wrapper: its arguments, its errors, and the properties of the resulting module."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

import minifsdp
from spec_tests.checkpoint.refusals import caught_warnings, refused
from spec_tests.harness import device, ranks
from spec_tests.models.modules import UNITS, WIDTH, Block, Stack, seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of, recorded_iteration
from spec_tests.models.sharding import (
    FLAT_STRATEGIES,
    FULL_SHARD,
    HYBRID_SHARD,
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
def test_constructor_arguments_have_this_order_and_these_defaults() -> None:
    parameters = list(inspect.signature(FSDP).parameters.values())
    assert [(parameter.name, parameter.default) for parameter in parameters[:15]] == [
        ("module", inspect.Parameter.empty),
        ("process_group", None),
        ("sharding_strategy", None),
        ("cpu_offload", None),
        ("auto_wrap_policy", None),
        ("backward_prefetch", BackwardPrefetch.BACKWARD_PRE),
        ("mixed_precision", None),
        ("ignored_modules", None),
        ("param_init_fn", None),
        ("device_id", None),
        ("sync_module_states", False),
        ("forward_prefetch", False),
        ("limit_all_gathers", True),
        ("use_orig_params", False),
        ("ignored_states", None),
    ]
    *parameters, old_keyword = parameters
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert old_keyword.kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.spec("CTOR-01")
@pytest.mark.pure
def test_the_arguments_are_those_of_torch() -> None:
    ours, theirs = (
        [(p.name, getattr(p.default, "name", p.default)) for p in inspect.signature(wrapper).parameters.values()]
        for wrapper in (FSDP, torch_fsdp.FullyShardedDataParallel)
    )
    assert ours == [*theirs, ("fsdp_auto_wrap_policy", None)]


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
def test_only_the_module_is_required_and_the_result_is_a_module() -> None:
    model = FSDP(seeded())
    assert isinstance(model, nn.Module)
    iterate(model)
    with pytest.raises(TypeError, match="module"):
        FSDP()  # type: ignore[call-arg]


@pytest.mark.spec("CTOR-02")
@pytest.mark.parametrize("name", ["nothing", "a number", "a string", "a class", "a parameter", "a list", "a function"])
@ranks(2)
def test_wrapper_refuses_invalid_module(name: str) -> None:
    given: dict[str, Any] = {
        "nothing": None,
        "a number": 3,
        "a string": "model",
        "a class": nn.Linear,
        "a parameter": nn.Parameter(torch.ones(4)),
        "a list": [nn.Linear(2, 2)],
        "a function": torch.relu,
    }
    with refused(TypeError, "module must be a torch.nn.Module", type(given[name]).__name__):
        FSDP(given[name])


@pytest.mark.spec("CTOR-08")
@pytest.mark.parametrize("keyword", ["flatten_parameters", "shard_strategy", "reshard_after_forward"])
@ranks(2)
def test_an_unknown_keyword_is_refused(keyword: str) -> None:
    plain = seeded()
    with pytest.raises(TypeError, match=keyword):
        FSDP(plain, **{keyword: True})
    assert_same(named(plain), named(seeded()), bitwise=True)


@pytest.mark.spec("CTOR-09")
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, None])
@ranks(2)
def test_strategy_is_a_member_of_the_enum_or_none(strategy: ShardingStrategy | None) -> None:
    model = wrapped(sharding_strategy=strategy)
    iterate(model)
    assert model.sharding_strategy is (strategy or FULL_SHARD)


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


LEFT_OUT = (
    "sharding_strategy",
    "cpu_offload",
    "mixed_precision",
    "auto_wrap_policy",
    "process_group",
    "ignored_modules",
    "ignored_states",
)


@pytest.mark.spec("CTOR-16")
@pytest.mark.parametrize("argument", LEFT_OUT)
@ranks(2)
def test_none_is_the_same_as_leaving_out(argument: str) -> None:
    given = FSDP(FourLayers(), **{argument: None})
    left_out = FSDP(FourLayers())
    assert public_values(given) == public_values(left_out)
    assert everything_recorded(given) == everything_recorded(left_out)
    assert_same(flat_gradients(given), flat_gradients(left_out), bitwise=True)


@pytest.mark.spec("CTOR-16")
@pytest.mark.parametrize("argument", [name for name in LEFT_OUT if name != "auto_wrap_policy"])
@ranks(2)
def test_none_is_the_same_as_leaving_out_for_many_units_too(argument: str) -> None:
    given, left_out = wrapped(**{argument: None}), wrapped()
    for mine, theirs in zip(FSDP.fsdp_modules(given), FSDP.fsdp_modules(left_out), strict=True):
        assert public_values(mine) == public_values(theirs)
    assert everything_recorded(given) == everything_recorded(left_out)
    assert_same(flat_gradients(given), flat_gradients(left_out), bitwise=True)


@pytest.mark.spec("CTOR-16")
@ranks(2)
def test_none_for_backward_prefetch_is_not_the_same_as_leaving_it_out() -> None:
    assert "| AG3 B3 AG2 FREE3" in recorded_iteration(wrapped())
    assert "| B3 AG3 FREE3 RS3 B2 AG2" in recorded_iteration(wrapped(backward_prefetch=None))


class FourLayers(nn.Sequential):
    """One unit with the same parameters in every process."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 2))
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, 0.25)
        self.to(device())


def public_values(model: FSDP) -> dict[str, Any]:
    """The wrapper's own public attributes, without those of the wrapped module."""
    return {name: value for name, value in vars(model).items() if name[0] != "_" and name != "mesh"}


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


class Opaque:
    """An object that does not look like a container."""


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
    more, named_ones = ({"x": x[:1], "tag": "a"}, {"x": x[1:2]}), {"shift": x[2:], "other": 2.0}
    expected = plain(x, 1.5, *more, mask=mask, **named_ones)
    actual = model(x, 1.5, *more, mask=mask, **named_ones)
    assert_same_structure(actual, expected)
    assert model.mixed.module.received == plain.mixed.received == (1.5, more, ["other", "shift"], torch.bool)


def assert_same_structure(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, Tensor):
        assert torch.equal(actual, expected)
        assert actual.requires_grad is expected.requires_grad
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_same_structure(list(actual.values()), list(expected.values()))
    elif isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected)
        for mine, theirs in zip(actual, expected, strict=True):
            assert_same_structure(mine, theirs)
    elif isinstance(expected, Answer):
        assert_same_structure(vars(actual), vars(expected))
    else:
        assert actual == expected


@pytest.mark.spec("CTOR-03")
@ranks(2)
def test_forward_passes_unknown_object_unchanged() -> None:
    class Gives(nn.Linear):
        def forward(self, x: Tensor, given: Any = None) -> Any:
            super().forward(x)
            return given

    opaque = Opaque()
    model = FSDP(Gives(WIDTH, 2).to(device()))
    assert model(batch(), given=opaque) is opaque
    assert model(batch(), opaque) is opaque


@pytest.mark.spec("CTOR-03")
@ranks(2)
def test_forward_runs_between_all_gather_and_reshard() -> None:
    inside: list[list[str]] = []
    plain = nn.Linear(WIDTH, 2).to(device())
    plain.register_forward_hook(lambda *_: inside.append(recorder.order()))
    model = FSDP(plain)
    with trace.record() as recorder, torch.no_grad():
        model(batch())
    assert inside == [["AG", "F"]]
    assert recorder.order() == ["AG", "F", "FREE"]


@pytest.mark.spec("CTOR-04")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
@ranks(2)
def test_one_step_of_adam_is_one_step_of_a_single_process(strategy: ShardingStrategy, keep: bool) -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=strategy, use_orig_params=keep)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    loss_of(model(batch())).backward()
    optimizer.step()
    before = named(plain)
    reference = torch.optim.Adam(plain.parameters(), lr=1e-4)
    gradients = mean_gradients(plain)
    for name, parameter in plain.named_parameters():
        parameter.grad = gradients[name]
    reference.step()
    after = full_values(model)
    assert_same(after, named(plain))
    assert all(not torch.equal(after[name], before[name]) for name in before), "the step did something"


@pytest.mark.spec("CTOR-05")
@ranks(2)
def test_an_optimizer_from_before_wrapping_changes_nothing_and_warns_once() -> None:
    plain = seeded()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
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
    with pytest.raises(RuntimeError, match="init_process_group"):
        FSDP(Stack(), sharding_strategy=strategy, auto_wrap_policy=ModuleWrapPolicy({Block}))


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
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (plain, model)]
    for step in range(2):
        with Wire() as wire:
            assert recorded_iteration(model, step) == recorded_iteration(not_sharded, step)
        assert wire.sent == [], "there is nobody to talk to"
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
def test_single_rank_warning_equals_torch(strategy: ShardingStrategy | None) -> None:
    name = None if strategy is None else strategy.name
    theirs = None if name is None else torch_fsdp.ShardingStrategy[name]
    with pytest.warns(UserWarning) as by_torch:
        torch_fsdp.FullyShardedDataParallel(seeded(), sharding_strategy=theirs, device_id=device())
    with pytest.warns(UserWarning) as by_us:
        model = FSDP(seeded(), sharding_strategy=strategy)
    (said,), (ours,) = ([str(each.message) for each in caught] for caught in (by_torch, by_us))
    assert ours.startswith(f"rank 0: {said.removesuffix('.')}: ")
    assert "torchrun" in ours
    assert model.sharding_strategy is NO_SHARD


@pytest.mark.spec("CTOR-18")
@ranks(1)
def test_single_rank_warning_appears_once_for_many_units() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # the default for a program that sets no filter
        model = wrapped()
    assert len(FSDP.fsdp_modules(model)) == 5
    assert len(caught) == 1


@pytest.mark.spec("CTOR-18")
@ranks(2)
def test_no_shard_and_multiple_ranks_give_no_warning() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with caught_warnings() as caught:
        wrapped(sharding_strategy=NO_SHARD, process_group=alone)
        wrapped()
    assert caught == []


@pytest.mark.spec("CTOR-18", "HYB-05")
@ranks(2)
def test_hybrid_with_shard_groups_of_one_rank_warns_and_averages_gradients() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.warns(UserWarning, match="instead of ShardingStrategy.HYBRID_SHARD since the world size is 1"):
        model = FSDP(seeded(), (alone, dist.group.WORLD), HYBRID_SHARD, auto_wrap_policy=ModuleWrapPolicy({Block}))
    iterate(model)
    assert_same(flat_gradients(model), chunked(seeded(), mean_gradients(seeded()), 1, 0), bitwise=True)


# --- nesting ---


@pytest.mark.spec("CTOR-10")
@pytest.mark.parametrize("has_run", [False, True])
@ranks(2)
def test_the_outermost_instance_is_the_root_and_the_others_are_not(has_run: bool) -> None:
    model = wrapped()
    if has_run:
        iterate(model)
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    inner = model.blocks[1]
    assert inner in FSDP.fsdp_modules(model)
    # These methods can only be called on the root.
    for call in (inner.no_sync().__enter__, lambda: inner.clip_grad_norm_(1.0)):
        with refused(RuntimeError, "root"):
            call()
    with refused(AssertionError, "root"):
        inner.register_comm_hook(None, print)
    with model.no_sync():
        iterate(model)
    model.zero_grad()
    iterate(model)
    assert float(model.clip_grad_norm_(1.0)) > 0.0


@pytest.mark.spec("CTOR-10")
@ranks(2)
def test_unit_names_start_at_root_that_ran_forward() -> None:
    outer = nn.Sequential(wrapped(), nn.Linear(2, 2).to(device()))
    root = FSDP(outer)
    with trace.record() as recorder:
        iterate(root)
    assert recorder.order("F") == ["F", "F 0", *(f"F 0.blocks.{index}" for index in range(4))]
    # Only the root stays unsharded between its forward and its backward.
    assert recorder.order("AG", "FREE", "B").index("B") < recorder.order("AG", "FREE", "B").index("FREE")
    assert FSDP.fsdp_modules(root, root_only=True) == [root]


@pytest.mark.spec("CTOR-11")
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
@ranks(2)
def test_inner_instance_that_ran_first_joins_larger_tree(trains: bool, keep: bool) -> None:
    plain = seeded()
    model = wrapped(use_orig_params=keep)
    for index in (2, 0):
        output = model.blocks[index](batch(5))
        if trains:
            loss_of(output).backward()
    model.zero_grad()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(2):
        expected = mean_gradients(plain, [step])
        with trace.record() as recorder:
            iterate(model, step)
        assert recorder.order("AG")[:5] == ["AG", *(f"AG blocks.{index}" for index in range(4))]
        for name, parameter in plain.named_parameters():
            parameter.grad = expected[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(full_values(model), named(plain))


@pytest.mark.spec("CTOR-11")
@ranks(2)
def test_instance_used_before_wrapping_joins_larger_tree() -> None:
    plain = seeded()
    inner = FSDP(copy.deepcopy(plain.blocks[1]))
    loss_of(inner(batch(5))).backward()
    inner.zero_grad()
    whole = copy.deepcopy(plain)
    whole.blocks[1] = inner
    model = FSDP(whole)
    iterate(model)
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    mean = mean_gradients(plain)
    inside = {name: gradient for name, gradient in mean.items() if name.startswith("blocks.1.")}
    for gradients, parameter in (
        (inside, inner.module._flat_param),
        ({name: gradient for name, gradient in mean.items() if name not in inside}, model.module._flat_param),
    ):
        row = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
        assert torch.equal(parameter.grad, row.chunk(2)[dist.get_rank()])


@pytest.mark.spec("CTOR-15", "WRAP-01")
@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
@ranks(2)
def test_outer_instance_manages_the_parameters_of_no_inner_instance(strategy: ShardingStrategy) -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 4)]  # 72, 36 and 20 elements
    total = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    options = {"sharding_strategy": strategy}
    inner = FSDP(layers[1].to(device()), **options)
    middle = FSDP(nn.Sequential(layers[0], inner).to(device()), **options)
    model = FSDP(nn.Sequential(middle, layers[2]).to(device()), **options)
    parts = 2 if strategy is FULL_SHARD else 1
    sizes = [parameter.numel() * parts for parameter in model.parameters()]
    assert sorted(sizes) == [20, 36, 72]
    assert sum(sizes) == total
    assert [sum(p.numel() for p in each.parameters()) * parts for each in (inner, middle, model)] == [36, 108, 128]
    assert FSDP.fsdp_modules(model) == [model, middle, inner]
    with trace.record() as recorder:
        model(torch.ones(2, 8, device=device())).sum().backward()
    reduced = {event.unit: event.num_bytes for event in recorder.events if event.kind in ("RS", "AR")}
    assert reduced == {"": 4 * 20, "0": 4 * 72, "0.1": 4 * 36}, "each gradient travels once"


@pytest.mark.spec("CTOR-15")
@ranks(2)
def test_manually_nested_instances_train_like_those_of_a_policy() -> None:
    by_hand = seeded()
    for index in range(4):
        by_hand.blocks[index] = FSDP(by_hand.blocks[index])
    models = [FSDP(by_hand), wrapped()]
    for model in models:
        iterate(model)
    assert_same(flat_parameters(models[0]), flat_parameters(models[1]), bitwise=True)
    assert_same(flat_gradients(models[0]), flat_gradients(models[1]), bitwise=True)
    theirs = as_torch(seeded())
    iterate(theirs)
    assert_same(flat_gradients(models[0]), flat_gradients(theirs), bitwise=True)


@pytest.mark.spec("CTOR-13")
@pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
@ranks(2)
def test_printing_shows_every_unit_as_a_layer(keep: bool) -> None:
    model = FSDP(nn.Sequential(wrapped(use_orig_params=keep), FSDP(nn.Linear(2, 2, device=device()))))
    assert len(FSDP.fsdp_modules(model)) == 7
    for each in (model, model[0], model[1]):
        assert num_printed(each) == len(FSDP.fsdp_modules(each))
        assert str(each) == repr(each)
    iterate(model[0])
    assert num_printed(model) == 7
    lines = [line.strip() for line in repr(model[0]).splitlines()]
    assert any(line.startswith("(enter): Linear(") for line in lines), "and what is no unit stays a layer"


def num_printed(model: nn.Module) -> int:
    """The number of wrappers in ``repr``. A list of equal layers is printed once, with their number in front."""
    found = re.findall(r"(?:(\d+) x )?FullyShardedDataParallel\(", repr(model))
    return sum(int(number or 1) for number in found)


# --- changing the wrapped module without the wrapper ---


def remove(layer: nn.Module) -> None:
    del layer.weight


def rebind_to_a_parameter(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(torch.ones(WIDTH, WIDTH, device=device()))


def rebind_to_a_tensor(layer: nn.Module) -> None:
    if "weight" in layer._parameters:
        del layer.weight  # nn.Module does not allow a tensor to replace a parameter
    layer.weight = torch.ones(WIDTH, WIDTH, device=device())


def rename(layer: nn.Module) -> None:
    layer.kernel = layer.weight
    del layer.weight


def rebind_to_nothing(layer: nn.Module) -> None:
    layer.weight = None


CHANGES = {
    change.__name__: change for change in (remove, rebind_to_a_parameter, rebind_to_a_tensor, rename, rebind_to_nothing)
}
MARKS_VIEWS = pytest.mark.not_simulated("it marks parameters, and the package keeps marks on views")


@pytest.mark.spec("CTOR-12")
@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_deleted_or_replaced_name_raises_at_the_next_forward(
    change: str, keep: bool, strategy: ShardingStrategy
) -> None:
    model = FSDP(seeded(), sharding_strategy=strategy, use_orig_params=keep)
    iterate(model)
    CHANGES[change](model.module.blocks[1].linear)
    for _ in range(2):
        with refused(RuntimeError, "'blocks.1.linear.weight'", "Linear", "summon_full_params"):
            model(batch())


@pytest.mark.spec("CTOR-12")
@pytest.mark.parametrize("keep", [pytest.param(False, marks=MARKS_VIEWS), True], ids=["flat", "original"])
@ranks(2)
def test_parameter_replaced_before_the_first_forward_raises_and_can_be_restored(keep: bool) -> None:
    plain = seeded()
    model = FSDP(seeded(), use_orig_params=keep)
    layer = model.module.leave
    before = layer.bias
    layer.bias = nn.Parameter(torch.zeros(2, device=device()))
    with pytest.raises(RuntimeError, match=r"leave\.bias"):
        model(batch())
    del layer.bias
    layer.bias = before
    iterate(model)
    with FSDP.summon_full_params(model, with_grads=keep):
        assert_same(named(model), named(plain), bitwise=True)
        if keep:
            assert_same({name: p.grad for name, p in model.named_parameters()}, mean_gradients(plain))


@pytest.mark.spec("CTOR-12", "FWD-05")
@pytest.mark.parametrize(
    "change", [*(name for name in CHANGES if name != "rename"), pytest.param("rename", marks=MARKS_VIEWS)]
)
@pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_parameter_replaced_between_forward_and_backward_raises_in_backward(
    change: str, keep: bool, strategy: ShardingStrategy
) -> None:
    model = FSDP(seeded(), sharding_strategy=strategy, use_orig_params=keep)
    loss = model(batch()).sum()
    CHANGES[change](model.module.blocks[1].linear)
    with refused(RuntimeError, "'blocks.1.linear.weight'", "Linear", "summon_full_params"):
        loss.backward()


@pytest.mark.spec("CTOR-12")
@ranks(2)
def test_missing_param_error_names_unit_in_tree() -> None:
    model = wrapped()
    iterate(model)
    del model.module.blocks[2].module.linear.bias
    with pytest.raises(RuntimeError, match=rf"rank {dist.get_rank()}: parameter '.*linear\.bias'"):
        model(batch())
