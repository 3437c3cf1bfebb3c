"""Frozen parameters, and parameters that several modules share, with flat and original parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch
from spec_tests.models.sharding import wrapped
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, trace

FSDP = FullyShardedDataParallel
flat_strategies = pytest.mark.parametrize("strategy", [*ShardingStrategy][:3])
flat_or_original = pytest.mark.parametrize("keep", [False, True], ids=["flat", "original"])


# --- frozen parameters ---


@pytest.mark.spec("ORIG-12")
@ranks(2)
def test_a_flat_unit_with_frozen_and_trained_parameters_is_refused_with_both_lists_of_names() -> None:
    model = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 2)).to(device())
    model[0].bias.requires_grad_(False)
    before = list(model.parameters())
    with refused(
        ValueError, "use_orig_params=True", "=True (['0.weight', '1.weight', '1.bias'])", "=False (['0.bias'])"
    ):
        FSDP(model)
    # The model can be used as before.
    assert all(after is parameter for after, parameter in zip(model.parameters(), before, strict=True))
    model(batch()).sum().backward()


@pytest.mark.spec("ORIG-01", "ORIG-13")
@flat_strategies
@flat_or_original
@ranks(2)
def test_params_frozen_before_backward_get_no_gradient(strategy: ShardingStrategy, keep: bool) -> None:
    model = wrapped(sharding_strategy=strategy, use_orig_params=keep)
    frozen = list(model.parameters())[-2:]
    loss = model(batch()).sum()
    for parameter in frozen:
        parameter.requires_grad_(False)
    loss.backward()
    assert [parameter.grad for parameter in frozen] == [None, None]
    assert any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.spec("ORIG-13", "NOSYNC-05")
@pytest.mark.filterwarnings("ignore:.*frozen parameters")
@flat_strategies
@ranks(2)
def test_frozen_and_trained_original_parameters_may_share_a_unit(strategy: ShardingStrategy) -> None:
    model, plain = seeded(), seeded()
    for each in (model, plain):
        for block in each.blocks:
            block.linear.bias.requires_grad_(False)
    model = wrapped(model, sharding_strategy=strategy, use_orig_params=True)
    with trace.record() as recorder:
        assert_trains_like(model, plain, range(2))
    # The reduction includes the frozen parameters.
    reduced = {event.unit: event.num_bytes for event in recorder.events if event.kind in ("RS", "AR")}
    assert reduced == {"": 4 * 56, **{f"blocks.{index}": 4 * 42 for index in range(4)}}
    with model.no_sync():
        model(batch()).sum().backward()
    for moment in ("an unreduced gradient", "a gradient"):
        for block in model.blocks:
            layer = block.module.linear
            assert layer.bias.grad is None, f"a frozen parameter has {moment}"
            assert moment == "a gradient" or layer.weight.grad.numel() == 36
        model(batch()).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    optimizer.step()
    state = model.state_dict()
    for name, start in seeded().state_dict().items():
        is_frozen = name.endswith("linear.bias")
        assert torch.equal(state[name], start) is is_frozen, "only the trainable parameters change"


@pytest.mark.spec("ORIG-13")
@ranks(2)
def test_mixed_unit_warns_that_gradient_covers_frozen_params() -> None:
    layer = nn.Linear(6, 6, device=device())
    layer.bias.requires_grad_(False)
    with pytest.warns(UserWarning, match=rf"rank {dist.get_rank()}(.|\n)*frozen parameters.*bias(.|\n)*memory"):
        FSDP(layer, use_orig_params=True)
    for requires_grad in (True, False):
        # A warning would be an error.
        FSDP(nn.Linear(6, 6, device=device()).requires_grad_(requires_grad), use_orig_params=True)


@pytest.mark.spec("ORIG-14")
@flat_or_original
@flat_strategies
@ranks(2)
def test_a_frozen_unit_is_not_reduced(strategy: ShardingStrategy, keep: bool) -> None:
    model, plain = seeded(), seeded()
    for each in (model, plain):
        each.blocks[0].requires_grad_(False)
        each.blocks[2].requires_grad_(False)
    model = wrapped(model, sharding_strategy=strategy, use_orig_params=keep)
    with trace.record() as recorder:
        assert_trains_like(model, plain, range(2))
    reduced = [event.unit for event in recorder.events if event.kind in ("RS", "AR")]
    assert reduced == ["blocks.3", "blocks.1", ""] * 2


# --- shared parameters ---


def tied() -> nn.Module:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))
    model[2].weight = model[0].weight
    return model


@pytest.mark.spec("ORIG-15")
@flat_or_original
@flat_strategies
@ranks(2)
def test_a_parameter_shared_inside_a_unit_is_trained_like_one_with_one_memory(
    strategy: ShardingStrategy, keep: bool
) -> None:
    model, plain, seen = tied(), tied(), list[Any]()
    for layer in (model[0], model[2]):
        layer.register_forward_hook(lambda layer, args, output: seen.append(layer.weight))
    model = FSDP(model, sharding_strategy=strategy, use_orig_params=keep)
    assert_trains_like(model, plain, range(2))
    assert model[0].weight is model[2].weight
    first, last = seen[-2:]
    assert first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    assert first.storage_offset() == last.storage_offset()
    with FSDP.summon_full_params(model):
        assert model[0].weight is model[2].weight


@pytest.mark.spec("ORIG-16")
@flat_or_original
@ranks(2)
def test_a_parameter_shared_between_units_is_refused_with_both_names(keep: bool) -> None:
    with refused(ValueError, "'0.weight'", "'2.weight'"):
        FSDP(tied(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=keep)
    model = tied()
    model[0] = FSDP(nn.Sequential(model[0]), use_orig_params=keep)
    # Without a policy, a unit only has names relative to the module that it wraps.
    with refused(ValueError, "'0.weight'", "'weight'"):
        FSDP(model[2], use_orig_params=keep)


@pytest.mark.spec("ORIG-16", "CTOR-12")
@pytest.mark.parametrize("moment", ["before forward", "before backward"])
@flat_or_original
@ranks(2)
def test_units_cannot_be_tied_after_wrapping(keep: bool, moment: str) -> None:
    model = wrapped(use_orig_params=keep)
    loss = model(batch()).sum() if moment == "before backward" else None
    model.blocks[2].module.linear.weight = model.blocks[1].module.linear.weight
    with pytest.raises(RuntimeError, match=r"'blocks.2.linear.weight' .* removed or replaced"):
        model(batch()) if loss is None else loss.backward()


@pytest.mark.spec("ORIG-16", "CTOR-05")
@ranks(2)
def test_a_tie_between_a_unit_and_a_module_in_no_unit_is_noticed_at_the_first_step() -> None:
    model = tied()
    model[0] = FSDP(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch()).sum().backward()
    with pytest.warns(UserWarning, match="1 of 3 parameters of this SGD were replaced"):
        optimizer.step()


@pytest.mark.spec("ORIG-16")
@flat_or_original
@ranks(2)
def test_units_of_deleted_models_do_not_count_as_ties(keep: bool) -> None:
    for _ in range(3):
        model = wrapped(use_orig_params=keep)
        model(batch()).sum().backward()
        del model


# --- frozen parameters with tensor parallelism ---


@pytest.mark.spec("NEW-01", "ORIG-13")
@pytest.mark.filterwarnings("ignore:.*frozen")
@ranks(4)
def test_frozen_tensor_parallel_parameters_are_not_trained() -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("shard", "tensor"))
    layers = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)))
    parallelize_module(layers, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    layers[0].requires_grad_(False)
    model = FSDP(layers, device_mesh=mesh["shard"], use_orig_params=True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(batch(step, rank=dist.get_rank() // 2)).square().mean().backward()
        assert (model[0].weight.requires_grad, model[0].weight.grad, model[0].bias.grad) == (False, None, None)
        optimizer.step()
        optimizer.zero_grad()
    for (name, value), start in zip(model.named_parameters(), before, strict=True):
        assert torch.equal(value, start) is (".0." in f".{name}" or not value.numel())
