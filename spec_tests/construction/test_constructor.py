"""The constructor of the wrapper: its arguments, its errors, and the properties of the resulting module."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_structure

from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models import running
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.models.sharding import wrapped
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ModuleWrapPolicy, ShardingStrategy, trace

# --- the arguments ---


@pytest.mark.spec("CTOR-02", "CTOR-08")
@ranks(2)
def test_wrapper_requires_a_module_and_refuses_an_unknown_keyword() -> None:
    plain = seeded()
    for given in (None, 3, "model", nn.Linear, nn.Parameter(torch.ones(4)), [nn.Linear(2, 2)], torch.relu):
        with refused(TypeError, "module must be a torch.nn.Module", type(given).__name__):
            FSDP(given)
    with pytest.raises(TypeError, match="module"):
        FSDP()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="reshard_after_forward"):
        FSDP(plain, reshard_after_forward=True)  # type: ignore[call-arg]
    assert_close(plain.state_dict(), seeded().state_dict(), rtol=0, atol=0)


@pytest.mark.spec("CTOR-09")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "full_shard", "", 1, True, ShardingStrategy])
@ranks(2)
def test_any_other_strategy_is_refused_with_the_list_of_members(strategy: Any) -> None:
    members = [f"ShardingStrategy.{member.name}" for member in ShardingStrategy]
    plain = seeded()
    with refused(TypeError, "sharding_strategy", repr(strategy), *members):
        FSDP(plain, sharding_strategy=strategy, sync_module_states=True)
    assert_close(plain.state_dict(), seeded().state_dict(), rtol=0, atol=0)


@pytest.mark.spec("CTOR-16", "WRAP-01")
@ranks(2)
def test_none_is_the_same_as_leaving_out() -> None:
    settings = ("process_group", "sharding_strategy", "cpu_offload", "mixed_precision")
    others = ("ignored_modules", "ignored_states", "auto_wrap_policy")
    given, left_out = FSDP(seeded(), **dict.fromkeys((*settings, *others))), FSDP(seeded())
    for name in (*settings, "backward_prefetch", "forward_prefetch", "limit_all_gathers"):
        assert getattr(given, name) == getattr(left_out, name)
    assert FSDP.fsdp_modules(given) == [given]
    assert_trains_like(given)


# --- forward ---


@dataclass
class Answer:
    value: Tensor
    words: list[str]


class Echo(nn.Module):
    """Records its arguments, and returns containers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, /, *args: Any, **kwargs: Any) -> Any:
        self.received = args, kwargs
        y = self.layer(x)
        return [y, (y.detach(), None), {"mean": y.mean(0), 7: [3, "word", torch.relu]}, (), Answer(y, ["some"])]


@pytest.mark.spec("CTOR-03")
@ranks(2)
def test_wrapper_passes_arguments_and_outputs_unchanged() -> None:
    plain, model = seeded(Echo), FSDP(seeded(Echo))
    x, given = running.batch(), (1.5, {"x": running.batch()[:1], "tag": object()}, 2)
    (*found, answer), (*expected, plain_answer) = (each(x, *given, mask=x > 0.5, shift=x) for each in (model, plain))
    # Tuples compare their elements by identity first.
    assert model.module.received[0] == given
    assert_close(model.module.received[1], {"mask": x > 0.5, "shift": x})
    assert answer.words == plain_answer.words
    assert tree_structure(found) == tree_structure(expected)
    pairs = zip(tree_leaves([found, answer.value]), tree_leaves([expected, plain_answer.value]), strict=True)
    for ours, theirs in pairs:
        assert torch.equal(ours, theirs) if isinstance(theirs, Tensor) else ours == theirs
        assert getattr(ours, "requires_grad", None) == getattr(theirs, "requires_grad", None)


# --- optimizers from before wrapping ---


@pytest.mark.spec("CTOR-05", "ORIG-02")
@pytest.mark.parametrize("strategy", [*ShardingStrategy][:3])
@ranks(2)
def test_with_original_parameters_an_optimizer_from_before_wrapping_trains(strategy: ShardingStrategy) -> None:
    plain, reference = seeded(), wrapped()
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    model = wrapped(plain, sharding_strategy=strategy, use_orig_params=True)
    running.iterate(model, 0, optimizer)
    running.iterate(reference, 0, torch.optim.SGD(reference.parameters(), lr=1.0))
    assert_close(model.state_dict(), reference.state_dict(), rtol=0, atol=0)
    assert not torch.equal(model.state_dict()["enter.weight"], seeded().enter.weight)


# --- ranks of the shard group ---


@pytest.mark.spec("CTOR-06")
@pytest.mark.parametrize("is_given", [True, False])
@ranks(4)
def test_a_given_process_group_or_all_ranks_all_gather_and_reduce(is_given: bool) -> None:
    members, group = (0, 1, 2, 3), dist.group.WORLD
    if is_given:
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group, members = pairs[dist.get_rank() % 2], ((0, 2), (1, 3))[dist.get_rank() % 2]
    plain, model = seeded(), wrapped(process_group=group if is_given else None)
    assert {unit.process_group for unit in FSDP.fsdp_modules(model)} == {group}
    with trace.record() as recorder:
        running.iterate(model)
    assert {(event.kind, event.ranks) for event in recorder.events if event.ranks} == {("AG", members), ("RS", members)}
    for rank in members:
        (plain(running.batch(rank=rank)).square().mean() / len(members)).backward()
    for each in (model, plain):
        torch.optim.SGD(each.parameters(), lr=1.0).step()
    assert_close(model.state_dict(), plain.state_dict())


def group_of_one() -> dist.ProcessGroup:
    return [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]


@pytest.mark.spec("CTOR-14")
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@ranks(2)
def test_a_rank_in_a_group_of_its_own_trains_like_the_plain_model_and_sends_nothing(strategy: ShardingStrategy) -> None:
    plain = seeded()
    with pytest.warns(UserWarning, match="since the world size is 1"):
        model = wrapped(sharding_strategy=strategy, process_group=group_of_one())
    # Flat tensors have other sizes and addresses, so another kernel may compute a step on a GPU. With this rate, a step
    # of SGD has only one rounding, so every kernel gets the same bits.
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
    with trace.record() as recorder:
        for step in range(2):
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                running.iterate(each, step, optimizer)
    assert not any(event.ranks for event in recorder.events)
    assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


@pytest.mark.spec("CTOR-18", "SHARD-18")
@pytest.mark.parametrize(
    ("strategy", "is_alone", "expected"),
    [
        ("FULL_SHARD", True, [UserWarning]),
        ("SHARD_GRAD_OP", True, [UserWarning]),
        ("NO_SHARD", True, []),
        ("FULL_SHARD", False, []),
        ("NO_SHARD", False, [FutureWarning]),
    ],
)
@pytest.mark.cpu
@ranks(2)
def test_a_warning_about_the_strategy_has_the_class_and_words_of_torch_and_appears_once(
    strategy: str, is_alone: bool, expected: list[type[Warning]]
) -> None:
    group, cpu = group_of_one() if is_alone else dist.group.WORLD, torch.device("cpu")
    found = []
    apis = [(torch_fsdp.FullyShardedDataParallel, torch_fsdp.ShardingStrategy), (FSDP, ShardingStrategy)]
    for wrapper, strategies in apis:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")  # the default for a program that sets no filter
            model = wrapper(seeded(), group, strategies[strategy], device_id=cpu)
        found.append([warning for warning in caught if "SHARD" in str(warning.message)])
    theirs, ours = found
    assert [warning.category for warning in theirs] == [warning.category for warning in ours] == expected
    if expected == [UserWarning]:
        text = str(theirs[0].message).removesuffix(".")
        assert str(ours[0].message).startswith(f"rank {dist.get_rank()}: {text}: ")
        assert model.sharding_strategy is ShardingStrategy.NO_SHARD


@pytest.mark.spec("CTOR-18", "HYB-05")
@ranks(2)
def test_hybrid_with_shard_groups_of_one_rank_warns_and_averages_gradients() -> None:
    groups = (group_of_one(), dist.group.WORLD)
    with pytest.warns(UserWarning, match="instead of ShardingStrategy.HYBRID_SHARD since the world size is 1"):
        model = FSDP(seeded(), groups, ShardingStrategy.HYBRID_SHARD, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert_trains_like(model)


# --- a module that is wrapped again ---


@pytest.mark.spec("CTOR-17")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("is_inside", [False, True])
@ranks(2)
def test_a_module_that_is_wrapped_again_stays_in_its_first_unit(is_inside: bool, use_orig_params: bool) -> None:
    # The second call must not broadcast the parameters of a unit: each rank has a different shard.
    options: Any = {"use_orig_params": use_orig_params, "device_id": device(), "sync_module_states": True}
    model = seeded()
    model.enter = first = FSDP(model.enter, **options)
    again = FSDP(first.module, **options)
    if is_inside:
        first._fsdp_wrapped_module = again
    else:
        model.also = again
    assert (first._has_params, again._has_params) == (True, False)
    assert_trains_like(FSDP(model, **options))


@pytest.mark.spec("CTOR-17")
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_empty_wrapper_around_a_wrapped_module_does_not_compute_with_shards(use_orig_params: bool) -> None:
    options: Any = {"use_orig_params": use_orig_params, "device_id": device()}
    first = FSDP(nn.Linear(6, 6), **options)
    again = FSDP(first.module, **options)
    with refused(RuntimeError, "is sharded right now"):
        again(running.batch())


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
