"""Flat and original parameters: the optimizer's objects, when modules have them, and parameters that share a unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close

from minifsdp.engine import flat
from minifsdp.engine.flat_tensor import FlatSharding
from spec_tests.harness import device, ranks
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch
from spec_tests.models.sharding import wrapped
from spec_tests.oracles.gathering import clean_name
from spec_tests.subject import FullyShardedDataParallel, ShardingStrategy, StateDictType

FSDP = FullyShardedDataParallel
FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, *HYBRID = ShardingStrategy
flat_strategies = pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])
sharding = pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP])


def by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters, by their names before wrapping."""
    return {clean_name(name): parameter for name, parameter in model.named_parameters()}


# --- flat parameters ---


@pytest.mark.spec("ORIG-01", "ORIG-05")
@flat_strategies
@flat_or_original
@ranks(2)
def test_post_accumulate_hook_is_called_after_the_reduction(strategy: ShardingStrategy, keep: bool) -> None:
    @torch.no_grad()
    def step(parameter: nn.Parameter) -> None:
        parameter.sub_(parameter.grad)
        parameter.grad = None

    model, reference = (wrapped(sharding_strategy=strategy, use_orig_params=keep) for _ in range(2))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for each in (model, reference):
        each(batch()).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    assert_close(model.state_dict(), reference.state_dict(), rtol=0, atol=0)


@pytest.mark.spec("ORIG-01")
@ranks(2)
def test_by_default_there_is_one_flat_parameter_for_each_unit() -> None:
    model = wrapped()
    for _ in range(2):
        assert sorted(by_name(model)) == ["", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
        assert all(isinstance(one, nn.Parameter) and one.dim() == 1 for one in model.parameters())
        model(batch()).sum().backward()


# --- original parameters: the objects ---


@pytest.mark.spec("ORIG-02")
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@ranks(4)
def test_original_names_and_parameter_objects_do_not_change(strategy: ShardingStrategy) -> None:
    plain = seeded()
    before = dict(plain.named_parameters())
    model = wrapped(plain, sharding_strategy=strategy, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def check(moment: str) -> None:
        now = [(name, id(parameter)) for name, parameter in by_name(model).items()]
        assert now == [(name, id(parameter)) for name, parameter in before.items()], moment
        # The attribute that the model's own code uses.
        assert model.module.blocks[2].module.linear.bias is before["blocks.2.linear.bias"], moment

    check("after wrapping")
    loss = model(batch()).sum()
    # ORIG-09 describes the visible parameters of the others.
    if strategy not in (SHARD_GRAD_OP, HYBRID[1]):
        check("after forward")
    loss.backward()
    check("after backward")
    optimizer.step()
    check("after the step")
    with FSDP.summon_full_params(model):
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
    owned, plain = list(model.parameters()), seeded()
    # After this forward, some strategies keep units unsharded, with the current values.
    model(batch())
    for parameter in (*owned, *plain.parameters()):
        parameter.data = 3 * parameter.data
    if form is None:
        with FSDP.summon_full_params(model):
            assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), rtol=0, atol=0)
    else:
        for each in (model, loaded):
            FSDP.set_state_dict_type(each, form)
        loaded.load_state_dict(model.state_dict())
        assert_close(loaded(batch()), plain(batch()), rtol=0, atol=0)
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
@flat_or_original
@flat_strategies
@ranks(2)
def test_load_state_dict_fills_a_model_after_to_empty(
    strategy: ShardingStrategy, keep: bool, form: StateDictType
) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=keep)
    FSDP.set_state_dict_type(model, form)
    saved = model.state_dict()
    model(batch()).sum().backward()
    model.to_empty(device=device(), recurse=True)
    model.load_state_dict(saved)
    model.zero_grad()
    assert_trains_like(model)


# --- original parameters: the sharded form ---


@pytest.mark.spec("ORIG-03")
@pytest.mark.parametrize("strategy", [FULL_SHARD, SHARD_GRAD_OP, *HYBRID])
@ranks(4)
def test_shards_are_1d_parts_of_the_original_parameters_with_gradients_of_their_shape(
    strategy: ShardingStrategy,
) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    model(batch()).sum().backward()
    sizes = []
    for name, parameter in by_name(model).items():
        parts: list[Any] = [None] * model.process_group.size()
        dist.all_gather_object(parts, parameter.detach(), group=model.process_group)
        assert torch.equal(torch.cat(parts), seeded().get_parameter(name).flatten())
        sizes += [part.numel() for part in parts]
        # A part of size zero has no gradient.
        assert getattr(parameter.grad, "shape", None) == (parameter.shape if parameter.numel() else None)
    assert {0, 6} < {*sizes}, "none or all of a bias"
    assert max(sizes) < 36, "a part of a weight"


@pytest.mark.spec("ORIG-04")
@sharding
@ranks(2)
def test_sharded_parameters_are_contiguous_in_the_memory_of_the_unit_shard(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    block = model.blocks[1]
    weight, bias = block.parameters()
    memory = set()
    for _ in range(3):
        mine = [parameter for parameter in (weight, bias) if parameter.numel()]
        memory |= {parameter.untyped_storage().data_ptr() for parameter in mine}
        assert mine[0].untyped_storage().nbytes() == 4 * 42 // 2, "only the shard"
        # Rank 0 stores 21 elements of the weight, and rank 1 the other 15 and the bias.
        offsets = [parameter.storage_offset() for parameter in mine]
        assert offsets == ([0] if dist.get_rank() == 0 else [0, 15])
        model(batch()).sum().backward()
        torch.optim.AdamW(model.parameters()).step()
    assert len(memory) == 1, "the views are created only once"


# --- original parameters: optimizing ---


def adamw_with_groups(model: nn.Module) -> torch.optim.Optimizer:
    """The usual two groups: biases have no weight decay, and here also a higher learning rate."""
    parameters = by_name(model).items()
    weights, biases = ([p for name, p in parameters if name.endswith(kind)] for kind in ("weight", "bias"))
    groups = [{"params": weights, "weight_decay": 0.3}, {"params": biases, "weight_decay": 0.0, "lr": 0.2}]
    return torch.optim.AdamW(groups, lr=0.05)


@pytest.mark.spec("ORIG-05", "CTOR-04")
@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@ranks(4)
def test_groups_of_parameters_train_as_in_one_process(strategy: ShardingStrategy) -> None:
    plain, model = seeded(), wrapped(sharding_strategy=strategy, use_orig_params=True)
    optimizers = [adamw_with_groups(each) for each in (plain, model)]
    for step in range(3):
        model(batch(step)).square().mean().backward()
        for rank in range(4):
            (plain(batch(step, rank)).square().mean() / 4).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-4)
    for parameter in model.parameters():
        if parameter.numel():
            assert optimizers[1].state[parameter]["exp_avg"].shape == parameter.shape


# --- original parameters: visible tensors between forward and backward ---


def visible(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in by_name(model).items()}


@pytest.mark.spec("ORIG-08")
@pytest.mark.parametrize("strategy", [FULL_SHARD, HYBRID[0]])
@ranks(4)
def test_after_the_forward_of_full_shard_the_sharded_parameters_are_visible(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    before = {name: parameter.detach().clone() for name, parameter in by_name(model).items()}
    loss = model(batch()).sum()
    for moment in ("after forward", "after backward"):
        assert_close({name: p.detach() for name, p in by_name(model).items()}, before, rtol=0, atol=0, msg=moment)
        assert model.module.leave.weight.dim() == 1, "also those of the root, which is still unsharded after forward"
        if moment == "after forward":
            loss.backward()


@pytest.mark.spec("ORIG-09")
@pytest.mark.parametrize("strategy", [SHARD_GRAD_OP, HYBRID[1]])
@ranks(4)
def test_after_the_forward_of_shard_grad_op_the_unsharded_parameters_are_visible_without_gradients(
    strategy: ShardingStrategy,
) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = visible(model)
    for step in range(3):
        values = model.state_dict()
        loss = model(batch(step)).sum()
        # Also after an optimizer step, the values are the current ones.
        assert_close({name: p.detach() for name, p in by_name(model).items()}, dict(values), rtol=0, atol=0)
        assert all(parameter.grad is None for parameter in model.parameters()), "a shard's gradient has another shape"
        loss.backward()
        assert visible(model) == before
        assert any(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
    assert not torch.equal(values["enter.weight"], seeded().enter.weight)


# --- flat parameters: no stale tensors ---


@pytest.mark.spec("ORIG-11", "FWD-05", "PROG-06")
@sharding
@ranks(2)
def test_between_forward_and_backward_original_parameters_cannot_be_touched(strategy: ShardingStrategy) -> None:
    model = wrapped(sharding_strategy=strategy)
    layers = {"enter.weight": model.module.enter, "linear.weight": model.module.blocks[1].module.linear}

    def try_to_read() -> None:
        for name, layer in layers.items():
            weight = layer.weight
            # ``test_placeholder.py`` tries all operations.
            for read in (torch.sum, torch.ravel, Tensor.detach, lambda weight: torch.save(weight, "/dev/null")):
                message = rf"rank {dist.get_rank()}: parameter '.*{name}'.*is sharded.*summon_full_params"
                with pytest.raises(RuntimeError, match=message):
                    read(weight)
            # The shape and the description can be read.
            assert (weight.shape, weight.dtype, weight.device.type) == ((6, 6), torch.float32, device().type)
            assert name in repr(weight)
        assert "Linear(in_features=6, out_features=6" in repr(model)

    try_to_read()
    loss = model(batch()).sum()
    try_to_read()
    loss.backward()
    try_to_read()
    model.zero_grad()
    assert_trains_like(model)


@pytest.mark.spec("ORIG-11", "PROG-06")
@ranks(2)
def test_with_no_shard_original_parameters_are_readable_all_the_time_and_never_stale() -> None:
    model = wrapped(sharding_strategy=NO_SHARD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    layers = {"enter.weight": model.module.enter, "blocks.1.linear.weight": model.module.blocks[1].module.linear}
    for step in range(3):
        full = model.state_dict()
        for name, layer in layers.items():
            assert torch.equal(layer.weight, full[name])
            assert layer.weight.requires_grad
            assert torch.equal(layer.weight * 2, 2 * full[name])
        model(batch(step)).sum().backward()
        optimizer.step()
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
        optimizer, losses = adamw_with_groups(model), []
        for step in range(3):
            losses.append(model(batch(step)).square().mean())
            losses[-1].backward()
            optimizer.step()
        with FSDP.summon_full_params(model, with_grads=True):
            gradients = {name: parameter.grad.tolist() for name, parameter in model.named_parameters()}
        values = {name: value.tolist() for name, value in model.state_dict().items()}
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        rows = [[s.tensor.tolist() for s in value.local_shards()] for value in model.state_dict().values()]
        return ([*map(float, losses)], gradients, values, rows), [parameter.numel() for parameter in model.parameters()]

    promised, sizes = train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "FlatSharding", CutElsewhere)
        promised_elsewhere, sizes_elsewhere = train()
    assert sizes != sizes_elsewhere, "the ranks have different parts"
    assert promised == promised_elsewhere
