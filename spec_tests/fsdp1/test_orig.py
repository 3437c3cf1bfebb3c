"""Flat and original parameters: the optimizer's objects, when modules have them, and parameters that share a unit.

Comparisons with torch use unsharded tensors: torch pads between original parameters, so a rank can have different parts
of them in the two libraries.
"""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

from minifsdp.engine import flat
from minifsdp.engine.flat_tensor import FlatSharding
from spec_tests.fsdp1.whole import by_name, group_of, memory_of, train, whole
from spec_tests.harness import device, ranks
from spec_tests.models.modules import UNITS, Block, Stack, Tied, seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of
from spec_tests.models.sharding import (
    FLAT_STRATEGIES,
    FULL_SHARD,
    HYBRID_SHARD,
    HYBRID_SHARD_ZERO2,
    HYBRID_STRATEGIES,
    NO_SHARD,
    SHARD_GRAD_OP,
    as_torch,
    wrapped,
)
from spec_tests.models.values import assert_same, full_values, mean_gradients, named, own_names
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, StateDictType, trace

SHARDING = (FULL_SHARD, SHARD_GRAD_OP)
flat_strategies = pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
sharding = pytest.mark.parametrize("strategy", SHARDING)


def torch_strategy(strategy: ShardingStrategy) -> torch_fsdp.ShardingStrategy:
    return torch_fsdp.ShardingStrategy[strategy.name]


# --- flat parameters ---


@pytest.mark.spec("ORIG-01")
@flat_strategies
@ranks(2)
def test_a_hook_on_a_flat_parameter_gets_the_unsharded_gradient_and_may_change_it(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy)
    seen: list[torch.Size] = []

    def double(gradient: Tensor) -> Tensor:
        seen.append(gradient.shape)
        return 2 * gradient

    for parameter in model.parameters():
        parameter.register_hook(double)
    iterate(model)
    assert sorted(seen) == sorted([torch.Size([56]), *4 * [torch.Size([42])]])
    expected = {name: 2 * gradient for name, gradient in mean_gradients(seeded()).items()}
    assert_same(whole(model, group=group_of(strategy))[1], expected)


@pytest.mark.spec("ORIG-01", "ORIG-13")
@flat_strategies
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_params_frozen_before_backward_get_no_gradient(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)
    iterate(model)
    model.zero_grad()
    frozen = list(model.parameters())[-2:]
    loss = loss_of(model(batch(1)))
    for parameter in frozen:
        parameter.requires_grad_(False)
    loss.backward()
    assert [parameter.grad for parameter in frozen] == [None, None]
    assert any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.spec("ORIG-01", "ORIG-05")
@flat_strategies
@pytest.mark.parametrize("use_orig_params", [False, True])
@ranks(2)
def test_post_accumulate_hook_is_called_after_the_reduction(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    plain, rate = seeded(), 0.1
    model = wrapped(sharding_strategy=strategy, use_orig_params=use_orig_params)

    @torch.no_grad()
    def step(parameter: nn.Parameter) -> None:
        parameter.sub_(rate * parameter.grad)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    iterate(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    moved = {name: value - rate * mean_gradients(plain)[name] for name, value in named(plain).items()}
    assert_same(full_values(model), moved)


@pytest.mark.spec("ORIG-01")
@sharding
@pytest.mark.parametrize("options", [{}, {"use_orig_params": False}])
@ranks(2)
def test_by_default_there_is_one_flat_parameter_for_each_unit(
    strategy: ShardingStrategy, options: dict[str, bool]
) -> None:
    model = wrapped(sharding_strategy=strategy, **options)
    for _ in range(2):
        found = dict(model.named_parameters())
        assert len(found) == len(UNITS) == len(FullyShardedDataParallel.fsdp_modules(model))
        assert all(isinstance(parameter, nn.Parameter) and parameter.dim() == 1 for parameter in found.values())
        assert sorted(by_name(model)) == sorted(UNITS), "each under the path of its unit"
        iterate(model)


@pytest.mark.spec("ORIG-01")
@ranks(2)
def test_by_default_the_flat_parameters_of_no_shard_are_1d_as_well() -> None:
    model = wrapped(sharding_strategy=NO_SHARD)
    assert [parameter.dim() for parameter in model.parameters()] == [1] * len(UNITS)


# --- original parameters: the objects ---


@pytest.mark.spec("ORIG-02")
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, *HYBRID_STRATEGIES])
@ranks(4)
def test_original_names_and_parameter_objects_do_not_change(strategy: ShardingStrategy) -> None:
    plain = seeded()
    before = dict(plain.named_parameters())
    model = wrapped(plain, sharding_strategy=strategy, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def check(moment: str) -> None:
        now = by_name(model)
        assert list(now) == list(before), moment
        if moment == "after forward" and strategy in (SHARD_GRAD_OP, HYBRID_SHARD_ZERO2):
            return  # ORIG-09 describes the visible parameters here, and other tests check them.
        assert all(now[name] is before[name] for name in before), moment
        assert list(map(id, model.parameters())) == list(map(id, before.values())), moment
        # The attributes that the model's own code uses.
        assert model.module.enter.weight is before["enter.weight"], moment
        assert model.module.blocks[2].module.linear.bias is before["blocks.2.linear.bias"], moment

    check("after wrapping")
    loss = loss_of(model(batch()))
    check("after forward")
    loss.backward()
    check("after backward")
    optimizer.step()
    check("after the step")
    with FullyShardedDataParallel.summon_full_params(model):
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
    check("after summoning")
    with torch.no_grad():
        model(batch())
    check("after an evaluation")


# --- parameters with replaced storage ---


def summoned(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    with FullyShardedDataParallel.summon_full_params(model):
        return {name: value.detach().clone() for name, value in named(model).items()}


def in_form(form: StateDictType) -> Callable[[FullyShardedDataParallel], dict[str, Tensor]]:
    """Returns a function that saves a model in this form, loads it into a fresh model and returns its values."""

    def saved(model: FullyShardedDataParallel) -> dict[str, Tensor]:
        fresh = wrapped(sharding_strategy=model.sharding_strategy, use_orig_params=True)
        for each in (model, fresh):
            FullyShardedDataParallel.set_state_dict_type(each, form)
        fresh.load_state_dict(model.state_dict())
        return summoned(fresh)

    return saved


READERS = {"summoned": summoned, **{form.name: in_form(form) for form in StateDictType}}


@pytest.mark.spec("ORIG-17")
@pytest.mark.parametrize("reader", list(READERS))
@flat_strategies
@ranks(2)
def test_all_readers_get_data_assigned_to_param(strategy: ShardingStrategy, reader: str) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    slices = list(model.parameters())
    # After this forward, some strategies keep units unsharded, with the current values.
    model(batch())
    for parameter in slices:
        parameter.data = 3 * parameter.data
    tripled = {name: 3 * value for name, value in named(seeded()).items()}
    assert_same(READERS[reader](model), tripled, bitwise=True)
    plain = seeded()
    plain.load_state_dict(tripled)
    assert_same({"": model(batch())}, {"": plain(batch())}, bitwise=True)


@pytest.mark.spec("ORIG-17", "META-04")
@pytest.mark.parametrize("form", list(StateDictType))
@pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
@flat_strategies
@ranks(2)
def test_load_state_dict_fills_a_model_after_to_empty(
    strategy: ShardingStrategy, keep: bool, form: StateDictType
) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=keep)
    FullyShardedDataParallel.set_state_dict_type(model, form)
    saved = model.state_dict()
    iterate(model)
    model.to_empty(device=device(), recurse=True)
    model.load_state_dict(saved)
    iterate(model)
    assert_same(summoned(model), named(seeded()), bitwise=True)
    plain = seeded()
    assert_same({"": model(batch())}, {"": plain(batch())}, bitwise=True)


# --- original parameters: the sharded form ---


@pytest.mark.spec("ORIG-03")
@pytest.mark.parametrize("strategy", [*SHARDING, *HYBRID_STRATEGIES])
@ranks(4)
def test_shards_are_1d_and_concatenate_to_full_parameter(strategy: ShardingStrategy) -> None:
    shapes = {name: tensor.shape for name, tensor in named(seeded()).items()}
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    group = model.process_group if strategy in HYBRID_STRATEGIES else dist.group.WORLD
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = set()
    for step in range(2):
        for name, parameter in by_name(model).items():
            assert parameter.dim() == 1
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, parameter.numel(), group=group)
            assert sum(parts) == shapes[name].numel()
            mine = parts[group.rank()]
            assert 0 <= mine <= shapes[name].numel()
            seen.update("none" if part == 0 else "all" if part == sum(parts) else "part" for part in parts)
        optimizer.zero_grad()
        iterate(model, step)
        optimizer.step()
    assert seen == {"none", "part", "all"}


@pytest.mark.spec("ORIG-03")
@sharding
@ranks(2)
def test_shards_of_all_ranks_have_original_values(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    assert_same(whole(model)[0], named(seeded()), bitwise=True)


@pytest.mark.spec("ORIG-03")
@flat_strategies
@ranks(2)
def test_gradients_have_the_shape_of_the_visible_parameters(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    iterate(model)
    for parameter in model.parameters():
        if parameter.numel():
            assert parameter.grad.shape == parameter.shape
        else:
            assert parameter.grad is None, "nothing here, so nothing to step on"


@pytest.mark.spec("ORIG-04")
@sharding
@ranks(2)
def test_sharded_parameters_are_contiguous_in_the_memory_of_the_unit_shard(strategy: ShardingStrategy) -> None:
    units = own_names(seeded())
    sizes = {unit: sum(named(seeded())[name].numel() for name in names) for unit, names in units.items()}
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    memory: dict[str, int] = {}
    for step in range(3):
        for unit, names in units.items():
            here = [by_name(model)[name] for name in names if by_name(model)[name].numel()]
            assert len({memory_of(parameter) for parameter in here}) == 1
            assert here[0].untyped_storage().nbytes() == 4 * -(-sizes[unit] // 2), "the chunk and not more"
            ends = [parameter.storage_offset() + parameter.numel() for parameter in here]
            assert [parameter.storage_offset() for parameter in here] == [0, *ends[:-1]]
            assert memory.setdefault(unit, memory_of(here[0])) == memory_of(here[0]), "made once, for good"
        iterate(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert len(set(memory.values())) == len(UNITS), "and each unit has its own"


@pytest.mark.spec("ORIG-04")
@pytest.mark.parametrize("use_orig_params", [True, False])
@flat_strategies
@ranks(2)
def test_unsharded_parameters_are_views_of_one_memory(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    plain = seeded()
    layers = {"": [plain.enter, plain.leave], **{f"blocks.{i}": [b.linear] for i, b in enumerate(plain.blocks)}}
    seen: dict[str, list[Tensor]] = {}
    for unit, its_layers in layers.items():
        for layer in its_layers:
            layer.register_forward_hook(
                lambda layer, i, o, unit=unit: seen.setdefault(unit, []).extend([layer.weight, layer.bias])
            )
    model = wrapped(plain, sharding_strategy=strategy, use_orig_params=use_orig_params)
    for step in range(2):
        seen.clear()
        model(batch(step))
        for unit, views in seen.items():
            assert len({memory_of(view) for view in views}) == 1
            ends = [view.storage_offset() + view.numel() for view in views]
            assert [view.storage_offset() for view in views] == [0, *ends[:-1]], f"end to end in {unit!r}"
    with FullyShardedDataParallel.summon_full_params(model):
        for unit, names in own_names(seeded()).items():
            views = [dict(model.named_parameters())[name] for name in names]
            assert len({memory_of(view) for view in views}) == 1, unit


@pytest.mark.spec("ORIG-04")
@flat_strategies
@ranks(2)
def test_forward_uses_values_written_to_sharded_param(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    expected = seeded()
    model(batch())
    with torch.no_grad():
        for each in (model, expected):
            for name, parameter in by_name(each).items():
                parameter.add_(1.0 if "bias" in name else 0.5)
        assert torch.equal(model(batch()), expected(batch()))


# --- original parameters: optimizing ---


def adamw_with_groups(model: nn.Module) -> torch.optim.Optimizer:
    """The usual two groups: biases have no weight decay, and here also a higher learning rate."""
    is_bias = {True: [], False: []}
    for name, parameter in by_name(model).items():
        is_bias[name.endswith("bias")].append(parameter)
    groups = [
        {"params": is_bias[False], "weight_decay": 0.3},
        {"params": is_bias[True], "weight_decay": 0.0, "lr": 0.2},
    ]
    return torch.optim.AdamW(groups, lr=0.05)


def train_plain(plain: nn.Module, optimizer: torch.optim.Optimizer, steps: int, num_ranks: int | None = None) -> None:
    for step in range(steps):
        for name, gradient in mean_gradients(plain, [step], num_ranks).items():
            dict(plain.named_parameters())[name].grad = gradient
        optimizer.step()


@pytest.mark.spec("ORIG-05")
@flat_strategies
@ranks(2)
def test_groups_of_parameters_train_as_in_one_process_and_as_in_torch(strategy: ShardingStrategy) -> None:
    plain = seeded()
    train_plain(plain, adamw_with_groups(plain), 4)
    without_groups = seeded()
    train_plain(without_groups, torch.optim.AdamW(without_groups.parameters(), lr=0.05), 4)
    ours = wrapped(sharding_strategy=strategy, use_orig_params=True)
    theirs = as_torch(seeded(), sharding_strategy=torch_strategy(strategy), use_orig_params=True)
    for model in (ours, theirs):
        train(model, adamw_with_groups(model), 4, iterate)
    values = whole(ours, group=group_of(strategy))[0]
    assert_same(values, named(plain), bitwise=False)
    assert_same(values, whole(theirs, group=group_of(strategy))[0], bitwise=True)
    for name, value in values.items():
        assert not torch.allclose(value, without_groups.get_parameter(name), atol=1e-2), "groups make a difference"


@pytest.mark.spec("ORIG-05")
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, *HYBRID_STRATEGIES])
@ranks(4)
def test_on_four_ranks_groups_of_parameters_train_as_in_one_process(strategy: ShardingStrategy) -> None:
    plain = seeded()
    train_plain(plain, adamw_with_groups(plain), 3)
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    train(model, adamw_with_groups(model), 3, iterate)
    torch.testing.assert_close(full_values(model), named(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.spec("ORIG-05")
@ranks(2)
def test_optimizer_state_is_kept_for_the_visible_part_of_each_original_parameter() -> None:
    model = wrapped(use_orig_params=True)
    optimizer = adamw_with_groups(model)
    iterate(model)
    optimizer.step()
    for parameter in model.parameters():
        if parameter.numel():
            assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


# --- original parameters: visible tensors between forward and backward ---


def visible(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in by_name(model).items()}


@pytest.mark.spec("ORIG-08")
@pytest.mark.parametrize("strategy", [FULL_SHARD, HYBRID_SHARD])
@ranks(4)
def test_after_the_forward_of_full_shard_the_sharded_parameters_are_visible(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    before = visible(model)
    assert {len(shape) for shape in before.values()} == {1}
    for step in range(2):
        loss = loss_of(model(batch(step)))
        assert visible(model) == before, "the root's too, which is still gathered"
        assert model.module.leave.weight.dim() == 1
        parts = {name: parameter.detach().clone() for name, parameter in by_name(model).items()}
        assert all(parameter.isfinite().all() for parameter in parts.values())
        loss.backward()
        assert visible(model) == before
        assert_same({name: p.detach() for name, p in by_name(model).items()}, parts, bitwise=True)


@pytest.mark.spec("ORIG-08")
@ranks(2)
def test_gradients_exist_and_can_be_cleared_after_a_full_shard_forward() -> None:
    model = wrapped(use_orig_params=True)
    iterate(model)
    first = whole(model)[1]
    loss = loss_of(model(batch(1)))
    assert_same(whole(model)[1], first, bitwise=True)
    model.zero_grad()
    loss.backward()
    assert_same(whole(model)[1], mean_gradients(seeded(), [1]), bitwise=True)


@pytest.mark.spec("ORIG-09")
@pytest.mark.parametrize("strategy", [SHARD_GRAD_OP, HYBRID_SHARD_ZERO2])
@ranks(4)
def test_after_the_forward_of_shard_grad_op_the_unsharded_parameters_are_visible_without_gradients(
    strategy: ShardingStrategy,
) -> None:
    plain = named(seeded())
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    before = visible(model)
    for step in range(2):
        loss = loss_of(model(batch(step)))
        assert visible(model) == {name: tensor.shape for name, tensor in plain.items()}
        for name, parameter in by_name(model).items():
            assert torch.equal(parameter, plain[name]), "the whole value, and a current one"
            assert parameter.grad is None, "the gradient of a slice has no place at the whole"
        loss.backward()
        assert visible(model) == before
        assert any(parameter.grad is not None for parameter in model.parameters())
    group = model.process_group if strategy in HYBRID_STRATEGIES else None
    gradients = whole(model, group=group)[1]
    assert_same(gradients, mean_gradients(seeded(), [0, 1]), bitwise=False)


@pytest.mark.spec("ORIG-09")
@ranks(2)
def test_shard_grad_op_shows_new_values_after_a_step() -> None:
    plain = seeded()
    model = wrapped(sharding_strategy=SHARD_GRAD_OP, use_orig_params=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
    train_plain(plain, optimizers[0], 1)
    train(model, optimizers[1], 1, iterate)
    model(batch(1))
    assert_same({name: p.detach() for name, p in by_name(model).items()}, named(plain), bitwise=True)


@pytest.mark.spec("ORIG-09")
@pytest.mark.parametrize("who", ["model", "optimizer"])
@ranks(2)
def test_zero_grad_between_forward_and_backward_clears_gradients_that_are_not_shown(who: str) -> None:
    model = wrapped(sharding_strategy=SHARD_GRAD_OP, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    iterate(model)
    loss = loss_of(model(batch(1)))
    (model if who == "model" else optimizer).zero_grad()
    loss.backward()
    assert_same(whole(model)[1], mean_gradients(seeded(), [1]), bitwise=True)


@pytest.mark.spec("ORIG-10")
@flat_strategies
@ranks(2)
def test_gradients_are_inspected_in_their_original_shapes_by_summoning(strategy: ShardingStrategy) -> None:
    ours = wrapped(sharding_strategy=strategy, use_orig_params=True)
    theirs = as_torch(seeded(), sharding_strategy=torch_strategy(strategy), use_orig_params=True)
    found = []
    for model in (ours, theirs):
        iterate(model)
        with type(model).summon_full_params(model, with_grads=True):
            found.append({name: parameter.grad.clone() for name, parameter in by_name(model).items()})
    assert_same(found[0], mean_gradients(seeded()), bitwise=True)
    assert_same(found[0], found[1], bitwise=True)


# --- flat parameters: no stale tensors ---

READS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda weight: weight + 1,
    "reduction": lambda weight: weight.sum(),
    "function": lambda weight: torch.nn.functional.linear(torch.ones(1, 6), weight),
    "indexing": lambda weight: weight[0],
    "view": lambda weight: weight.reshape(-1),
    "copy": lambda weight: weight.clone(),
    "to list": lambda weight: weight.tolist(),
    "to numpy": lambda weight: weight.detach().numpy(),
    "to a dtype": lambda weight: weight.double(),
    "compare": lambda weight: torch.equal(weight, torch.zeros(6, 6)),
    "read into": lambda weight: torch.zeros(6, 6).copy_(weight),
    "write": lambda weight: weight.fill_(1.0),
    "write under no_grad": lambda weight: torch.no_grad()(weight.mul_)(2.0),
    "data": lambda weight: weight.data.sum(),
    "storage": lambda weight: weight.untyped_storage()[0],
    "pickle": lambda weight: torch.save(weight, "/dev/null"),
    "another library": lambda weight: weight.__dlpack__(),
    "another process": lambda weight: weight.share_memory_(),
}
# PyTorch raises its own error for these.
REFUSED_BEFORE_US = ("to list", "storage")


@pytest.mark.spec("ORIG-11")
@sharding
@ranks(2)
def test_between_forward_and_backward_original_parameters_cannot_be_touched(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy)
    layers = {"enter.weight": model.module.enter, "linear.weight": model.module.blocks[1].module.linear}
    moments: list[Callable[[], Any]] = [lambda: None, lambda: loss_of(model(batch())), lambda: loss.backward()]
    for moment in moments:
        loss = moment()
        for read, attempt in READS.items():
            for name, layer in layers.items():
                with pytest.raises(RuntimeError) as raised:
                    pytest.fail(f"read by {read}: {attempt(layer.weight)}")
                if read not in REFUSED_BEFORE_US:
                    assert name in str(raised.value), read
                    assert f"rank {dist.get_rank()}" in str(raised.value), read
                    assert "summon_full_params" in str(raised.value), "and what to do instead"
    assert_same(whole(model)[1], mean_gradients(seeded()), bitwise=True)


@pytest.mark.spec("ORIG-11")
@ranks(2)
def test_placeholder_param_has_shape_and_repr() -> None:
    model = wrapped()
    model(batch())
    weight = model.module.blocks[1].module.linear.weight
    assert (tuple(weight.shape), weight.dtype, weight.device.type) == ((6, 6), torch.float32, device().type)
    assert "linear.weight" in repr(weight)
    assert "Linear(in_features=6, out_features=6" in repr(model)


@pytest.mark.spec("ORIG-11")
@ranks(2)
def test_with_no_shard_original_parameters_are_readable_all_the_time_and_never_stale() -> None:
    model = wrapped(sharding_strategy=NO_SHARD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        model(batch(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model.module.enter.weight, full_values(model)["enter.weight"])
    assert not torch.equal(model.module.enter.weight, seeded().enter.weight)


# --- frozen parameters ---


def frozen_biases(names: tuple[str, ...] = ("linear.bias", "enter.weight")) -> Stack:
    model = seeded()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(names))
    return model


@pytest.mark.spec("ORIG-12")
@pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
@ranks(2)
def test_a_flat_unit_with_frozen_and_trained_parameters_is_refused_with_both_lists_of_names(
    strategy: ShardingStrategy,
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)).to(device())
    for parameter in (model[0].bias, model[1].weight):
        parameter.requires_grad_(False)
    with trace.record() as recorder, Wire() as wire, pytest.raises(ValueError) as raised:
        FullyShardedDataParallel(model, sharding_strategy=strategy)
    message = str(raised.value)
    trained, frozen = re.search(r"=True \((.*?)\).*=False \((.*?)\)", message).groups()
    assert eval(trained) == ["0.weight", "1.bias", "2.weight", "2.bias"]
    assert eval(frozen) == ["0.bias", "1.weight"]
    assert f"rank {dist.get_rank()}" in message
    assert "use_orig_params=True" in message, "the remedy"
    assert recorder.events == []
    assert wire.sent == [], "nobody waits for a rank that has stopped"


@pytest.mark.spec("ORIG-12")
@ranks(2)
def test_a_refused_model_is_left_as_it_was() -> None:
    model = frozen_biases()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="requires_grad"):
        FullyShardedDataParallel(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    model(batch()).sum().backward()


@pytest.mark.spec("ORIG-12")
@ranks(2)
def test_flat_unit_is_frozen_while_other_units_train() -> None:
    model = seeded()
    model.blocks[1].requires_grad_(False)
    sharded = wrapped(model)
    assert [parameter.requires_grad for parameter in sharded.parameters()] == [True, True, False, True, True]


def sharded_quietly(model: nn.Module, **options: Any) -> FullyShardedDataParallel:
    """Wraps without the warning about frozen parameters, which has its own test."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*frozen parameters")
        return wrapped(model, use_orig_params=True, **options)


@pytest.mark.spec("ORIG-13")
@flat_strategies
@ranks(2)
def test_frozen_and_trained_original_parameters_may_share_a_unit(strategy: ShardingStrategy) -> None:
    plain, frozen = frozen_biases(), {n for n, p in frozen_biases().named_parameters() if not p.requires_grad}
    model = sharded_quietly(frozen_biases(), sharding_strategy=strategy)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5) for each in (plain, model)]
    for step in range(3):
        expected = mean_gradients(plain, [step])
        assert not frozen & set(expected)
        optimizers[1].zero_grad()
        iterate(model, step)
        assert all(by_name(model)[name].grad is None for name in frozen)
        assert_same(whole(model, group=group_of(strategy))[1], expected, bitwise=True)
        for name, gradient in expected.items():
            dict(plain.named_parameters())[name].grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    values = whole(model, group=group_of(strategy))[0]
    assert_same(values, named(plain), bitwise=False)
    for name, start in named(seeded()).items():
        assert torch.equal(values[name], start) is (name in frozen), "what is frozen does not move, the rest does"


@pytest.mark.spec("ORIG-13", "NOSYNC-05")
@flat_strategies
@ranks(2)
def test_frozen_parameters_get_no_unreduced_gradient_either(strategy: ShardingStrategy) -> None:
    model = sharded_quietly(frozen_biases(), sharding_strategy=strategy)
    shapes = {name: parameter.shape for name, parameter in frozen_biases().named_parameters()}
    with model.no_sync():
        iterate(model)
    for name, parameter in by_name(model).items():
        assert (parameter.grad is not None) is parameter.requires_grad
        assert parameter.grad is None or parameter.grad.numel() == shapes[name].numel()
    iterate(model, 1)
    assert_same(whole(model, group=group_of(strategy))[1], mean_gradients(frozen_biases(), [0, 1]))


@pytest.mark.spec("ORIG-13")
@pytest.mark.not_simulated("torch's wrapper, the oracle, zeroes on a stream that its accumulation does not wait for")
@ranks(2)
def test_frozen_and_trained_original_parameters_have_the_gradients_of_torch() -> None:
    ours = sharded_quietly(frozen_biases())
    theirs = as_torch(frozen_biases(), use_orig_params=True)
    for step in range(2):
        iterate(ours, step)
        iterate(theirs, step)
        assert_same(whole(ours)[1], whole(theirs)[1], bitwise=True)


@pytest.mark.spec("ORIG-13")
@sharding
@ranks(2)
def test_reduction_of_a_mixed_unit_includes_the_frozen_parameters(strategy: ShardingStrategy) -> None:
    model = sharded_quietly(frozen_biases(), sharding_strategy=strategy)
    with trace.record() as recorder, Wire() as wire:
        iterate(model)
    sizes = {"": 56, **dict.fromkeys(UNITS[1:], 42)}
    assert {e.unit: e.num_bytes for e in recorder.events if e.kind == "RS"} == {u: 4 * n for u, n in sizes.items()}
    assert sorted(numel for kind, numel in wire.sent if kind == "RS") == sorted(sizes.values())


@pytest.mark.spec("ORIG-13")
@ranks(2)
def test_mixed_unit_warns_that_gradient_covers_frozen_params() -> None:
    with pytest.warns(UserWarning, match=r"frozen parameters.*linear\.bias") as caught:
        FullyShardedDataParallel(frozen_biases().blocks[0], use_orig_params=True)
    message = str(caught[0].message)
    assert len(caught) == 1
    assert "memory" in message
    assert f"rank {dist.get_rank()}" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for requires_grad in (True, False):
            FullyShardedDataParallel(Block().to(device()).requires_grad_(requires_grad), use_orig_params=True)


@pytest.mark.spec("ORIG-14")
@pytest.mark.parametrize("use_orig_params", [True, False])
@flat_strategies
@ranks(2)
def test_a_frozen_unit_is_not_reduced(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    def build() -> Stack:
        model = seeded()
        # Freeze a first unit, which needs no backward, and a middle unit, whose input needs a gradient.
        model.enter.requires_grad_(False)
        model.leave.requires_grad_(True)
        for index in (0, 2):
            model.blocks[index].requires_grad_(False)
        return model

    plain = build()
    plain.enter.requires_grad_(True)
    start = build()
    start.enter.requires_grad_(True)
    model = wrapped(start, sharding_strategy=strategy, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(2):
        with trace.record() as recorder, Wire() as wire:
            iterate(model, step)
        reduced = {event.unit for event in recorder.events if event.kind in ("RS", "AR")}
        assert reduced == {"", "blocks.1", "blocks.3"}
        assert len([kind for kind in wire.kinds() if kind != "AG"]) == 3
        if step == 0:
            gradients = whole(model, group=group_of(strategy))[1]
            assert_same(gradients, mean_gradients(plain), bitwise=True)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in full_values(model).items():
        assert torch.equal(value, seeded().get_parameter(name)) is name.startswith(("blocks.0", "blocks.2"))


# --- shared parameters ---


@pytest.mark.spec("ORIG-15")
@pytest.mark.parametrize("use_orig_params", [True, False])
@flat_strategies
@ranks(2)
def test_a_parameter_shared_inside_a_unit_is_trained_like_one(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    plain = seeded(Tied)
    options = {"use_orig_params": use_orig_params}
    model = wrapped(seeded(Tied), sharding_strategy=strategy, **options)
    theirs = as_torch(seeded(Tied), sharding_strategy=torch_strategy(strategy), **options)
    assert sum(p.numel() for p in model.parameters()) * (1 if strategy is NO_SHARD else 2) in range(90, 94)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (plain, model, theirs)]
    group = group_of(strategy)
    for step in range(3):
        for name, gradient in mean_gradients(plain, [step]).items():
            plain.get_parameter(name).grad = gradient
        for each in (model, theirs):
            each.zero_grad()
            iterate(each, step)
        gradients = whole(model, Tied, group=group)[1]
        assert_same(gradients, {n: p.grad for n, p in plain.named_parameters()}, bitwise=True)
        assert_same(gradients, whole(theirs, Tied, group=group)[1], bitwise=True)
        for optimizer in optimizers:
            optimizer.step()
    values = whole(model, Tied, group=group)[0]
    assert_same(values, named(plain), bitwise=False)
    assert_same(values, whole(theirs, Tied, group=group)[0], bitwise=True)


@pytest.mark.spec("ORIG-15")
@pytest.mark.parametrize("use_orig_params", [True, False])
@flat_strategies
@ranks(2)
def test_a_shared_parameter_has_one_memory_under_both_names(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    plain = seeded(Tied)
    seen: list[Tensor] = []
    for layer in (plain.first, plain.last):
        layer.register_forward_hook(lambda layer, i, o: seen.append(layer.weight))
    model = wrapped(plain, sharding_strategy=strategy, use_orig_params=use_orig_params)
    for step in range(2):
        iterate(model, step)
        assert model.module.first.weight is model.module.last.weight
    assert len(seen) == 4
    for one, other in (seen[:2], seen[2:]):
        assert (memory_of(one), one.storage_offset()) == (memory_of(other), other.storage_offset())
    with FullyShardedDataParallel.summon_full_params(model):
        assert model.module.first.weight is model.module.last.weight
        assert model.module.first.weight.shape == (6, 6)
        assert list(dict(model.named_parameters())) == list(named(seeded(Tied)))


class TiedBlocks(nn.Module):
    """Two layers at the two ends of a model share one weight, each under its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.decoder = nn.Sequential(OrderedDict(out=nn.Linear(6, 6)))
        self.decoder.out.weight = self.encoder[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def by_policy(model: TiedBlocks, **options: Any) -> None:
    policy = ModuleWrapPolicy({nn.Linear})
    FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)


def one_after_the_other(model: TiedBlocks, **options: Any) -> None:
    model.encoder = FullyShardedDataParallel(model.encoder, **options)
    model.decoder = FullyShardedDataParallel(model.decoder, **options)


def one_inside_the_other(model: TiedBlocks, **options: Any) -> None:
    model.encoder = FullyShardedDataParallel(model.encoder, **options)
    FullyShardedDataParallel(model, **options)


TIES = {
    by_policy: ("encoder.0.weight", "decoder.out.weight"),
    # Without a policy, a unit only has names relative to the module that it wraps.
    one_after_the_other: ("0.weight", "out.weight"),
    one_inside_the_other: ("0.weight", "decoder.out.weight"),
}


@pytest.mark.spec("ORIG-16")
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("wrap", TIES)
@ranks(2)
def test_a_parameter_shared_between_units_is_refused_with_both_names(
    wrap: Callable[..., None], use_orig_params: bool
) -> None:
    with Wire() as wire, pytest.raises(ValueError) as raised:
        wrap(seeded(TiedBlocks), use_orig_params=use_orig_params)
    message = str(raised.value)
    for name in TIES[wrap]:
        assert repr(name) in message, message
    assert f"rank {dist.get_rank()}" in message
    assert wire.sent == []


@pytest.mark.spec("ORIG-16")
@pytest.mark.parametrize("use_orig_params", [True, False])
@ranks(2)
def test_units_of_deleted_models_do_not_count_as_ties(
    use_orig_params: bool,
) -> None:
    for _ in range(3):
        model = wrapped(use_orig_params=use_orig_params)
        iterate(model)
        del model


# --- implementation details ---


class CutElsewhere(FlatSharding):
    """Adds three elements of padding to each shard, so that each rank stores other parts of the parameters."""

    def __init__(self, numels: tuple[int, ...], num_shards: int) -> None:
        super().__init__(numels, num_shards)
        self.shard_numel += 3
        self.padded_numel = self.shard_numel * num_shards
        self.split_sizes, self.is_single = [*numels, self.padded_numel - self.numel], False


def everything_promised(strategy: ShardingStrategy) -> tuple[Any, Any]:
    """Trains with original parameters. Returns the guaranteed results and the sizes of this rank's parameters."""
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    groups = [[p for n, p in model.named_parameters() if n.endswith(end)] for end in ("weight", "bias")]
    optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-2)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(iterate(model, step))
        optimizer.step()
    iterate(model)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        gradients = {name: parameter.grad.tolist() for name, parameter in model.named_parameters()}
    state = {name: value.tolist() for name, value in model.state_dict().items()}
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        rows = {name: local_rows(value) for name, value in model.state_dict().items()}
    assert any(rows.values()), "every rank has rows of something"
    seen = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return (losses, gradients, state, rows), seen


def local_rows(value: Any) -> list[Any]:
    return [shard.tensor.tolist() for shard in value.local_shards()] if hasattr(value, "local_shards") else []


@pytest.mark.spec("ORIG-06")
@sharding
@ranks(2)
def test_shard_boundaries_do_not_affect_documented_results(strategy: ShardingStrategy) -> None:
    promised, seen = everything_promised(strategy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "FlatSharding", CutElsewhere)
        promised_elsewhere, seen_elsewhere = everything_promised(strategy)
    assert seen != seen_elsewhere, "the ranks do see other parts"
    assert promised == promised_elsewhere
