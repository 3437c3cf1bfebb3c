"""Flat and original parameters: the optimizer's objects, when modules have them, and parameters that share a unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.engine import flat
from minifsdp.engine.flat_tensor import FlatSharding
from spec_tests.harness import device, ranks
from spec_tests.models.modules import UNITS, seeded
from spec_tests.models.running import batch, iterate, loss_of
from spec_tests.models.sharding import (
    FLAT_STRATEGIES,
    FULL_SHARD,
    HYBRID_SHARD,
    HYBRID_SHARD_ZERO2,
    HYBRID_STRATEGIES,
    NO_SHARD,
    SHARD_GRAD_OP,
    wrapped,
)
from spec_tests.models.values import assert_same, full_values, mean_gradients, named, own_names
from spec_tests.models.whole import by_name, memory_of, set_mean_gradients, whole
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy, StateDictType

SHARDING = (FULL_SHARD, SHARD_GRAD_OP)
flat_strategies = pytest.mark.parametrize("strategy", FLAT_STRATEGIES)
sharding = pytest.mark.parametrize("strategy", SHARDING)


# --- flat parameters ---


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
@flat_strategies
@ranks(2)
def test_by_default_there_is_one_flat_parameter_for_each_unit(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy)
    for _ in range(2):
        found = dict(model.named_parameters())
        assert len(found) == len(UNITS) == len(FullyShardedDataParallel.fsdp_modules(model))
        assert all(isinstance(parameter, nn.Parameter) and parameter.dim() == 1 for parameter in found.values())
        assert sorted(by_name(model)) == sorted(UNITS), "each has the path of its unit"
        iterate(model)


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
        assert all(now[name] is before[name] for name in before), moment
        # The attribute that the model's own code uses.
        assert model.module.blocks[2].module.linear.bias is before["blocks.2.linear.bias"], moment

    check("after wrapping")
    loss = loss_of(model(batch()))
    # ORIG-09 describes the visible parameters of the others.
    if strategy not in (SHARD_GRAD_OP, HYBRID_SHARD_ZERO2):
        check("after forward")
    loss.backward()
    check("after backward")
    optimizer.step()
    check("after the step")
    with FullyShardedDataParallel.summon_full_params(model):
        check("while it is summoned")
    check("after summoning")
    with torch.no_grad():
        model(batch())
    check("after an evaluation")


# --- parameters with replaced storage ---


@pytest.mark.spec("ORIG-17")
@pytest.mark.parametrize("form", [None, *StateDictType])
@flat_strategies
@ranks(2)
def test_state_dicts_and_summoned_parameters_have_data_assigned_to_param(
    strategy: ShardingStrategy, form: StateDictType | None
) -> None:
    model, loaded = (wrapped(sharding_strategy=strategy, use_orig_params=True) for _ in range(2))
    slices = list(model.parameters())
    # After this forward, some strategies keep units unsharded, with the current values.
    model(batch())
    for parameter in slices:
        parameter.data = 3 * parameter.data
    plain = seeded()
    plain.load_state_dict({name: 3 * value for name, value in named(plain).items()})
    if form is None:
        assert_same(full_values(model), named(plain), bitwise=True)
    else:
        for each in (model, loaded):
            FullyShardedDataParallel.set_state_dict_type(each, form)
        loaded.load_state_dict(model.state_dict())
        assert_same(full_values(loaded), named(plain), bitwise=True)
    assert torch.equal(model(batch()), plain(batch()))


@pytest.mark.spec("ORIG-17")
@ranks(2)
def test_transposed_view_of_a_weight_that_is_not_sharded_is_used() -> None:
    model, plain = wrapped(sharding_strategy=NO_SHARD, use_orig_params=True), seeded()
    for inside in (model.module, plain):
        inside.enter.weight.data = inside.enter.weight.data.t()
    assert torch.allclose(model(batch()), plain(batch()))


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
    assert_same(full_values(model), named(seeded()), bitwise=True)
    plain = seeded()
    assert_same({"": model(batch())}, {"": plain(batch())}, bitwise=True)


# --- original parameters: the sharded form ---


@pytest.mark.spec("ORIG-03")
@pytest.mark.parametrize("strategy", [*SHARDING, *HYBRID_STRATEGIES])
@ranks(4)
def test_shards_are_1d_parts_of_the_original_parameters_with_gradients_of_their_shape(
    strategy: ShardingStrategy,
) -> None:
    shapes = {name: tensor.shape for name, tensor in named(seeded()).items()}
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    group = model.process_group if strategy in HYBRID_STRATEGIES else dist.group.WORLD
    seen = set()
    for step in range(2):
        for name, parameter in by_name(model).items():
            assert parameter.dim() == 1
            parts: list[Any] = [None] * group.size()
            dist.all_gather_object(parts, parameter.numel(), group=group)
            assert sum(parts) == shapes[name].numel()
            seen.update("none" if part == 0 else "all" if part == sum(parts) else "part" for part in parts)
        iterate(model, step)
        for parameter in model.parameters():
            if parameter.numel():
                assert parameter.grad.shape == parameter.shape
            else:
                assert parameter.grad is None, "a part of size zero has no gradient"
    assert seen == {"none", "part", "all"}
    assert_same(whole(model, group=group)[0], named(seeded()), bitwise=True)


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
            assert here[0].untyped_storage().nbytes() == 4 * -(-sizes[unit] // 2), "only the chunk"
            ends = [parameter.storage_offset() + parameter.numel() for parameter in here]
            assert [parameter.storage_offset() for parameter in here] == [0, *ends[:-1]]
            assert memory.setdefault(unit, memory_of(here[0])) == memory_of(here[0]), "the view is created only once"
        iterate(model, step, optimizer)
    assert len(set(memory.values())) == len(UNITS), "each unit has a separate one"


# --- original parameters: optimizing ---


def adamw_with_groups(model: nn.Module) -> torch.optim.Optimizer:
    """The usual two groups: biases have no weight decay, and here also a higher learning rate."""
    parameters = by_name(model).items()
    weights, biases = ([p for name, p in parameters if name.endswith(kind)] for kind in ("weight", "bias"))
    groups = [{"params": weights, "weight_decay": 0.3}, {"params": biases, "weight_decay": 0.0, "lr": 0.2}]
    return torch.optim.AdamW(groups, lr=0.05)


@pytest.mark.spec("ORIG-05", "CTOR-04")
@pytest.mark.parametrize("strategy", [*FLAT_STRATEGIES, *HYBRID_STRATEGIES])
@ranks(4)
def test_groups_of_parameters_train_as_in_one_process(strategy: ShardingStrategy) -> None:
    plain = seeded()
    reference = adamw_with_groups(plain)
    for step in range(3):
        set_mean_gradients(plain, step)
        reference.step()
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    optimizer = adamw_with_groups(model)
    for step in range(3):
        iterate(model, step, optimizer)
    torch.testing.assert_close(full_values(model), named(plain), rtol=1e-4, atol=1e-4)
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
        assert visible(model) == before, "also those of the root, which is still unsharded"
        assert model.module.leave.weight.dim() == 1
        parts = {name: parameter.detach().clone() for name, parameter in by_name(model).items()}
        assert all(parameter.isfinite().all() for parameter in parts.values())
        loss.backward()
        assert visible(model) == before
        assert_same({name: p.detach() for name, p in by_name(model).items()}, parts, bitwise=True)


@pytest.mark.spec("ORIG-09")
@pytest.mark.parametrize("strategy", [SHARD_GRAD_OP, HYBRID_SHARD_ZERO2])
@ranks(4)
def test_after_the_forward_of_shard_grad_op_the_unsharded_parameters_are_visible_without_gradients(
    strategy: ShardingStrategy,
) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    group = model.process_group if strategy in HYBRID_STRATEGIES else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = visible(model)
    for step in range(3):
        values = whole(model, group=group)[0]
        loss = loss_of(model(batch(step)))
        # Also after an optimizer step, the values are the current ones.
        assert_same({name: p.detach() for name, p in by_name(model).items()}, values, bitwise=True)
        assert all(parameter.grad is None for parameter in model.parameters()), "a shard's gradient has another shape"
        loss.backward()
        assert visible(model) == before
        assert any(parameter.grad is not None for parameter in model.parameters())
        if step == 1:
            assert_same(whole(model, group=group)[1], mean_gradients(seeded(), [0, 1]), bitwise=False)
            optimizer.step()
    assert not torch.equal(values["enter.weight"], seeded().enter.weight)


# --- flat parameters: no stale tensors ---

# ``test_placeholder.py`` tries all operations.
READS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda weight: weight + 1,
    "view": lambda weight: weight.reshape(-1),
    "write": lambda weight: weight.fill_(1.0),
    "data": lambda weight: weight.data.sum(),
    "pickle": lambda weight: torch.save(weight, "/dev/null"),
}


@pytest.mark.spec("ORIG-11", "FWD-05", "PROG-06")
@sharding
@ranks(2)
def test_between_forward_and_backward_original_parameters_cannot_be_touched(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy)
    layers = {"enter.weight": model.module.enter, "linear.weight": model.module.blocks[1].module.linear}
    moments: list[Callable[[], Any]] = [lambda: None, lambda: loss_of(model(batch())), lambda: loss.backward()]
    for moment in moments:
        loss = moment()
        for name, layer in layers.items():
            for read, attempt in READS.items():
                message = rf"rank {dist.get_rank()}: parameter '.*{name}'.*is sharded.*summon_full_params"
                with pytest.raises(RuntimeError, match=message):
                    pytest.fail(f"read by {read}: {attempt(layer.weight)}")
            # The shape and the description can be read.
            weight = layer.weight
            assert (weight.shape, weight.dtype, weight.device.type) == ((6, 6), torch.float32, device().type)
            assert name in repr(weight)
            assert "Linear(in_features=6, out_features=6" in repr(model)
    assert_same(whole(model)[1], mean_gradients(seeded()), bitwise=True)


@pytest.mark.spec("ORIG-11", "PROG-06")
@ranks(2)
def test_with_no_shard_original_parameters_are_readable_all_the_time_and_never_stale() -> None:
    model = wrapped(sharding_strategy=NO_SHARD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    layers = {"enter.weight": model.module.enter, "blocks.1.linear.weight": model.module.blocks[1].module.linear}
    for step in range(3):
        full = full_values(model)
        for name, layer in layers.items():
            assert torch.equal(layer.weight, full[name])
            assert layer.weight.requires_grad
            assert torch.equal(layer.weight * 2, 2 * full[name])
        iterate(model, step, optimizer)
    assert not torch.equal(model.module.enter.weight, seeded().enter.weight)


# --- implementation details ---


class CutElsewhere(FlatSharding):
    """Adds three elements of padding to each shard, so that each rank stores other parts of the parameters."""

    def __init__(self, numels: tuple[int, ...], num_shards: int, orders: dict[int, list[int]]) -> None:
        super().__init__(numels, num_shards, orders)
        self.shard_numel += 3
        self.padded_numel = self.shard_numel * num_shards
        self.split_sizes, self.is_single = [*numels, self.padded_numel - self.numel], False


@pytest.mark.spec("ORIG-06")
@sharding
@ranks(2)
def test_shard_boundaries_do_not_affect_documented_results(strategy: ShardingStrategy) -> None:
    def train() -> tuple[Any, list[int]]:
        """The results that the documentation promises, and the sizes of this rank's parameters."""
        model = wrapped(sharding_strategy=strategy, use_orig_params=True)
        optimizer = adamw_with_groups(model)
        losses = [iterate(model, step, optimizer) for step in range(3)]
        iterate(model)
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            gradients = {name: parameter.grad.tolist() for name, parameter in model.named_parameters()}
        values = {name: value.tolist() for name, value in model.state_dict().items()}
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        shards = {name: value.local_shards() for name, value in model.state_dict().items()}
        rows = {name: [shard.tensor.tolist() for shard in of_name] for name, of_name in shards.items()}
        return (losses, gradients, values, rows), [parameter.numel() for parameter in model.parameters()]

    promised, sizes = train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "FlatSharding", CutElsewhere)
        promised_elsewhere, sizes_elsewhere = train()
    assert sizes != sizes_elsewhere, "the ranks have different parts"
    assert promised == promised_elsewhere
