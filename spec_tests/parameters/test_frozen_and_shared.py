"""Frozen parameters, and parameters that several modules share, with flat and original parameters."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from spec_tests.checkpoint.refusals import refused
from spec_tests.harness import device, ranks
from spec_tests.models.modules import Block, Stack, Tied, seeded
from spec_tests.models.running import Wire, batch, iterate, loss_of
from spec_tests.models.sharding import FLAT_STRATEGIES, wrapped
from spec_tests.models.values import assert_same, full_values, mean_gradients, named
from spec_tests.models.whole import by_name, group_of, memory_of, set_mean_gradients, whole
from spec_tests.subject import FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, trace

flat_strategies = pytest.mark.parametrize("strategy", FLAT_STRATEGIES)


# --- frozen parameters ---


def frozen_biases(names: tuple[str, ...] = ("linear.bias", "enter.weight")) -> Stack:
    model = seeded()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(names))
    return model


@pytest.mark.spec("ORIG-12")
@flat_strategies
@ranks(2)
def test_a_flat_unit_with_frozen_and_trained_parameters_is_refused_with_both_lists_of_names(
    strategy: ShardingStrategy,
) -> None:
    model = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 2)).to(device())
    model[0].bias.requires_grad_(False)
    before = list(model.parameters())
    lists = "=True (['0.weight', '1.weight', '1.bias'])", "=False (['0.bias'])"
    with refused(ValueError, "use_orig_params=True", *lists):
        FullyShardedDataParallel(model, sharding_strategy=strategy)
    # The model can be used as before.
    assert all(after is parameter for after, parameter in zip(model.parameters(), before, strict=True))
    model(batch()).sum().backward()


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
        with Wire() as wire:
            iterate(model, step)
        # The reduction includes the frozen parameters.
        assert sorted(numel for kind, numel in wire.values if kind != "AG") == [42, 42, 42, 42, 56]
        assert all(by_name(model)[name].grad is None for name in frozen)
        assert_same(whole(model, group=group_of(strategy))[1], expected, bitwise=True)
        for name, gradient in expected.items():
            dict(plain.named_parameters())[name].grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    values = whole(model, group=group_of(strategy))[0]
    assert_same(values, named(plain), bitwise=False)
    for name, start in named(seeded()).items():
        assert torch.equal(values[name], start) is (name in frozen), "only the trainable parameters change"


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
    plain, model = seeded(), seeded()
    for each in (plain, model):
        for index in (0, 2):
            each.blocks[index].requires_grad_(False)
    model = wrapped(model, sharding_strategy=strategy, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(2):
        expected = mean_gradients(plain, [step])
        with trace.record() as recorder, Wire() as wire:
            iterate(model, step)
        reduced = {event.unit for event in recorder.events if event.kind in ("RS", "AR")}
        assert reduced == {"", "blocks.1", "blocks.3"}
        assert len([kind for kind in wire.kinds() if kind != "AG"]) == 3
        if step == 0:
            assert_same(whole(model, group=group_of(strategy))[1], expected, bitwise=True)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in full_values(model).items():
        assert torch.equal(value, seeded().get_parameter(name)) is name.startswith(("blocks.0", "blocks.2"))


# --- shared parameters ---


@pytest.mark.spec("ORIG-15")
@pytest.mark.parametrize("use_orig_params", [True, False])
@flat_strategies
@ranks(2)
def test_a_parameter_shared_inside_a_unit_is_trained_like_one_with_one_memory(
    strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    plain, model = seeded(Tied), seeded(Tied)
    seen: list[Tensor] = []
    for layer in (model.first, model.last):
        layer.register_forward_hook(lambda layer, i, o: seen.append(layer.weight))
    model = wrapped(model, sharding_strategy=strategy, use_orig_params=use_orig_params)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (plain, model)]
    for step in range(3):
        set_mean_gradients(plain, step)
        model.zero_grad()
        iterate(model, step)
        assert model.module.first.weight is model.module.last.weight
        first, last = seen[-2:]
        assert (memory_of(first), first.storage_offset()) == (memory_of(last), last.storage_offset())
        gradients = whole(model, Tied, group=group_of(strategy))[1]
        assert_same(gradients, {n: p.grad for n, p in plain.named_parameters()}, bitwise=True)
        for optimizer in optimizers:
            optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        assert model.module.first.weight is model.module.last.weight
        assert_same(named(model), named(plain), bitwise=False)


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


@pytest.mark.spec("ORIG-16")
@flat_strategies
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (by_policy, ("'encoder.0.weight'", "'decoder.out.weight'")),
        # Without a policy, a unit only has names relative to the module that it wraps.
        (one_after_the_other, ("'0.weight'", "'out.weight'")),
    ],
)
@ranks(2)
def test_a_parameter_shared_between_units_is_refused_with_both_names(
    wrap: Callable[..., None], names: tuple[str, str], use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    with refused(ValueError, *names):
        wrap(seeded(TiedBlocks), use_orig_params=use_orig_params, sharding_strategy=strategy)


@pytest.mark.spec("ORIG-16", "CTOR-12")
@pytest.mark.parametrize("moment", ["before forward", "before backward"])
@pytest.mark.parametrize("use_orig_params", [True, False])
@ranks(2)
def test_units_cannot_be_tied_after_wrapping(use_orig_params: bool, moment: str) -> None:
    model = wrapped(use_orig_params=use_orig_params)
    first, second = (model.blocks[index].module.linear for index in (1, 2))
    if moment == "before backward":
        loss = loss_of(model(batch()))
    second.weight = first.weight
    with pytest.raises(RuntimeError, match=r"'blocks.2.linear.weight' .* removed or replaced"):
        iterate(model) if moment == "before forward" else loss.backward()


@pytest.mark.spec("ORIG-16", "CTOR-05")
@ranks(2)
def test_a_tie_between_a_unit_and_a_module_in_no_unit_is_noticed_at_the_first_step() -> None:
    plain = seeded()
    plain.blocks[2].linear.weight = plain.blocks[1].linear.weight
    plain.blocks[1] = FullyShardedDataParallel(plain.blocks[1])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loss_of(plain(batch())).backward()
    with pytest.warns(UserWarning, match="1 of 11 parameters of this SGD were replaced"):
        optimizer.step()


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


# --- frozen parameters with tensor parallelism ---


@pytest.mark.spec("NEW-01", "ORIG-13")
@pytest.mark.filterwarnings("ignore:.*frozen")
@ranks(4)
def test_frozen_tensor_parallel_parameters_are_not_trained() -> None:
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("shard", "tensor"))
    layers = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)))
    parallelize_module(layers, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    layers[0].requires_grad_(False)
    model = FullyShardedDataParallel(layers, device_mesh=mesh["shard"], use_orig_params=True)
    before = {name: parameter.detach().clone() for name, parameter in by_name(model).items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model(batch(step, rank=dist.get_rank() // 2))).backward()
        for name in ("0.weight", "0.bias"):
            assert (by_name(model)[name].requires_grad, by_name(model)[name].grad) == (False, None)
        optimizer.step()
        optimizer.zero_grad()
    changed = {name for name, value in by_name(model).items() if not torch.equal(value, before[name])}
    assert changed == {name for name, value in before.items() if name.startswith("1.") and value.numel()}
