"""The constructor of the wrapper: its arguments, its errors, and the properties of the resulting module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from spec_tests.checkpoint.refusals import caught_warnings, refused
from spec_tests.harness import device, ranks
from spec_tests.models.modules import UNITS, WIDTH, Block, Stack, seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of, recorded_iteration
from spec_tests.models.sharding import FLAT_STRATEGIES, FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP, wrapped
from spec_tests.models.values import assert_same, chunked, flat_gradients, full_values, mean_gradients, named
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
    given = FSDP(seeded(), **policy, **{argument: None})
    left_out = FSDP(seeded(), **policy)
    for mine, theirs in zip(FSDP.fsdp_modules(given), FSDP.fsdp_modules(left_out), strict=True):
        assert [getattr(mine, name) for name in SETTINGS] == [getattr(theirs, name) for name in SETTINGS]
    assert recorded_iteration(given) == recorded_iteration(left_out)
    assert_same(flat_gradients(given), flat_gradients(left_out), bitwise=True)


@pytest.mark.spec("CTOR-16")
@ranks(2)
def test_none_for_backward_prefetch_is_not_the_same_as_leaving_it_out() -> None:
    assert "| AG3 B3 AG2 FREE3" in recorded_iteration(wrapped())
    assert "| B3 AG3 FREE3 RS3 B2 AG2" in recorded_iteration(wrapped(backward_prefetch=None))


# --- forward ---


@dataclass
class Answer:
    value: Tensor
    words: list[str]


UNKNOWN = object()
OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda y: y,
    "nested containers": lambda y: [y, (y.detach(), None), {"mean": y.mean(0), 7: [3, "word", torch.relu]}],
    "a dataclass": lambda y: Answer(y, ["some", "words"]),
    "an empty tuple": lambda y: (),
    "nothing": lambda y: None,
    "an unknown object": lambda y: UNKNOWN,
}


class Mixed(nn.Module):
    """Takes arguments of every kind and returns one kind of output."""

    def __init__(self, output: str) -> None:
        super().__init__()
        self.layer, self.output = nn.Linear(WIDTH, WIDTH), output

    def forward(self, x: Tensor, /, factor: float, *more: Any, mask: Tensor | None = None, **named: Any) -> Any:
        self.received = (factor, more, mask, named)
        return OUTPUTS[self.output](self.layer(x) * factor)


@pytest.mark.spec("CTOR-03")
@pytest.mark.parametrize("output", list(OUTPUTS))
@ranks(2)
def test_wrapper_passes_arguments_and_outputs_unchanged(output: str) -> None:
    plain = seeded(lambda: Mixed(output))
    model = FSDP(copy.deepcopy(plain))
    x = batch()
    mask, record = x > 0.5, {"x": x[:1], "tag": UNKNOWN}
    found, structure = tree_flatten(model(x, 1.5, record, 2, mask=mask, shift=x))
    # Tuples compare their elements by identity first.
    assert model.module.received == (1.5, (record, 2), mask, {"shift": x})
    expected, expected_structure = tree_flatten(plain(x, 1.5, record, 2, mask=mask, shift=x))
    assert structure == expected_structure
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, Answer):
            assert ours.words == theirs.words
            ours, theirs = ours.value, theirs.value
        if isinstance(theirs, Tensor):
            assert torch.equal(ours, theirs)
            assert ours.requires_grad is theirs.requires_grad
        else:
            assert ours == theirs


# --- optimizers from before wrapping ---


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
    model = wrapped(plain)
    before = full_values(model)
    with caught_warnings() as caught:
        for step in range(3):
            iterate(model, step)
            optimizer.step()
    assert_same(full_values(model), before, bitwise=True)
    (warning,) = caught
    num_stale = len(list(seeded().parameters()))
    assert f"rank {dist.get_rank()}: {num_stale} of {num_stale} parameters of this Adam" in str(warning.message)
    assert "build the optimizer after wrapping" in str(warning.message)


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
@pytest.mark.parametrize("is_given", [True, False])
@ranks(4)
def test_a_given_process_group_or_all_ranks_all_gather_and_reduce(is_given: bool, strategy: ShardingStrategy) -> None:
    members, group = (0, 1, 2, 3), dist.group.WORLD
    if is_given:
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group, members = pairs[dist.get_rank() % 2], ((0, 2), (1, 3))[dist.get_rank() % 2]
    model = wrapped(process_group=group if is_given else None, sharding_strategy=strategy)
    with trace.record() as recorder:
        iterate(model)
    found = {(event.kind, event.ranks) for event in recorder.events if event.ranks}
    assert found == {("AG", members), ("RS", members)}
    assert {unit.process_group for unit in FSDP.fsdp_modules(model)} == {group}
    plain = seeded()
    for rank in members:
        (loss_of(plain(batch(rank=rank))) / len(members)).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    mine = chunked(plain, expected, len(members), members.index(dist.get_rank()))
    assert_same(flat_gradients(model), mine, bitwise=False)


@pytest.mark.spec("CTOR-07")
@pytest.mark.parametrize("strategy", [None, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD])
@pytest.mark.pure
def test_error_without_process_group_names_init_process_group(strategy: ShardingStrategy | None) -> None:
    assert not dist.is_initialized()
    # The device is given, because this process belongs to no rank and must not create a context on a GPU.
    options: Any = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": torch.device("cpu")}
    with pytest.raises(RuntimeError, match="init_process_group"):
        FSDP(Stack(), sharding_strategy=strategy, **options)


def group_of_one() -> dist.ProcessGroup:
    return [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]


@pytest.mark.spec("CTOR-14")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])
@ranks(2)
def test_a_rank_in_a_group_of_its_own_behaves_as_no_shard(strategy: ShardingStrategy) -> None:
    group, plain = group_of_one(), seeded()
    with pytest.warns(UserWarning, match="since the world size is 1"):
        model = wrapped(sharding_strategy=strategy, process_group=group)
    not_sharded = wrapped(sharding_strategy=NO_SHARD, process_group=group)
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(p.numel() for p in plain.parameters())
    # Flat tensors have other sizes and addresses, so another kernel may compute a step on a GPU. With this rate, a step
    # of SGD has only one rounding, so every kernel gets the same bits.
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model, not_sharded)]
    for step in range(2):
        with Wire() as wire:
            assert recorded_iteration(model, step) == recorded_iteration(not_sharded, step)
        assert wire.sent == [], "a single rank sends nothing"
        iterate(plain, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(full_values(model), named(plain), bitwise=True)


@pytest.mark.spec("CTOR-18", "SHARD-18")
@pytest.mark.parametrize(
    ("strategy", "is_alone", "expected"),
    [
        ("FULL_SHARD", True, UserWarning),
        ("SHARD_GRAD_OP", True, UserWarning),
        ("NO_SHARD", True, None),
        ("FULL_SHARD", False, None),
        ("NO_SHARD", False, FutureWarning),
    ],
)
@pytest.mark.cpu
@ranks(2)
def test_a_warning_about_the_strategy_has_the_class_and_words_of_torch_and_appears_once(
    strategy: str, is_alone: bool, expected: type[Warning] | None
) -> None:
    group = group_of_one() if is_alone else dist.group.WORLD
    with warnings.catch_warnings(record=True) as ours:
        warnings.simplefilter("default")  # the default for a program that sets no filter
        model = wrapped(process_group=group, sharding_strategy=ShardingStrategy[strategy])
    with warnings.catch_warnings(record=True) as theirs:
        warnings.simplefilter("default")
        torch_strategy = torch_fsdp.ShardingStrategy[strategy]
        torch_fsdp.FullyShardedDataParallel(seeded(), group, torch_strategy, device_id=torch.device("cpu"))
    of_torch = [warning for warning in theirs if "SHARD" in str(warning.message)]
    categories = [] if expected is None else [expected]
    assert [warning.category for warning in ours] == [warning.category for warning in of_torch] == categories
    if expected is UserWarning:
        words = str(of_torch[0].message).removesuffix(".")
        assert str(ours[0].message).startswith(f"rank {dist.get_rank()}: {words}: ")
        assert {unit.sharding_strategy for unit in FSDP.fsdp_modules(model)} == {NO_SHARD}


@pytest.mark.spec("CTOR-18", "HYB-05")
@ranks(2)
def test_hybrid_with_shard_groups_of_one_rank_warns_and_averages_gradients() -> None:
    groups = (group_of_one(), dist.group.WORLD)
    with pytest.warns(UserWarning, match="instead of ShardingStrategy.HYBRID_SHARD since the world size is 1"):
        model = FSDP(seeded(), groups, HYBRID_SHARD, auto_wrap_policy=ModuleWrapPolicy({Block}))
    iterate(model)
    assert_same(flat_gradients(model), chunked(seeded(), mean_gradients(seeded()), 1, 0), bitwise=True)


# --- a module that is wrapped again ---


@pytest.mark.spec("CTOR-17")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("is_inside", [False, True])
@ranks(2)
def test_a_module_that_is_wrapped_again_stays_in_its_first_unit(is_inside: bool, use_orig_params: bool) -> None:
    # The second call must not broadcast the parameters of a unit: each rank has a different shard.
    options: Any = {"use_orig_params": use_orig_params, "device_id": device(), "sync_module_states": True}
    twice, once = seeded(), seeded()
    for plain in (twice, once):
        plain.enter = FSDP(plain.enter, **options)
    first = twice.enter
    again = FSDP(first.module, **options)
    if is_inside:
        first._fsdp_wrapped_module = again
    else:
        twice.also = again
    assert (first._has_params, again._has_params) == (True, False)
    twice, once = FSDP(twice, **options), FSDP(once, **options)
    for model in (twice, once):
        iterate(model)
    for ours, expected in zip(twice.parameters(), once.parameters(), strict=True):
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
