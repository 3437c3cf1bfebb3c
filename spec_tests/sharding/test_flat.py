"""Flat units: of one rank, of one element, with parameters that cannot be one tensor or that the user changes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.layout import owned_parameters
from minifsdp.engine.mesh import MeshGroups
from minifsdp.engine.precision import Precision
from spec_tests.harness import device, ranks
from spec_tests.models import modules, small, values
from spec_tests.subject import FullyShardedDataParallel as FSDP


def a_block() -> modules.MLP:
    (block,) = modules.chain(1)
    return block


def lay_out(module: nn.Module, compute: torch.dtype | None = None) -> FlatLayout:
    parameters = owned_parameters(module.named_modules(), set())
    return FlatLayout(module, parameters, MeshGroups(None, None), device(), Precision(compute=compute))


def all_gather(layout: FlatLayout) -> None:
    comm_streams = CommStreams(device())
    comm_streams.all_gather.wait_compute()  # a root does this once per iteration
    handle = layout.all_gather(comm_streams)
    if handle is not None:
        handle.wait()


# --- a unit that is not shared between ranks ---


@pytest.mark.spec("PROG-06")
@ranks(1)
def test_a_loss_of_a_weight_between_forwards_trains_in_every_step() -> None:
    plain, model = modules.chain(2), FSDP(modules.chain(2), device_id=device())
    plain = plain.to(device())
    for one, block in ((plain, plain[1]), (model, model.module[1])):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        with torch.inference_mode():
            one(small.draw(0))
        for step in range(3):
            optimizer.zero_grad()
            one(small.draw(0, step)).sum().backward()
            block.up.weight.square().sum().backward()
            optimizer.step()
    assert torch.equal(model.module[1].up.weight, plain[1].up.weight)


@pytest.mark.spec("MP-02")
@ranks(1)
def test_one_rank_cast_unit_frees_its_copy() -> None:
    block = a_block()
    layout = lay_out(block, torch.bfloat16)
    all_gather(layout)
    layout.use_unsharded_params()
    view = block.up.weight
    assert torch.equal(view, a_block().up.weight.bfloat16())
    layout.use_sharded_params()
    assert layout.free() is not None
    assert view.untyped_storage().size() == 0


@pytest.mark.spec("COST-03")
@ranks(1)
def test_the_gradient_before_is_freed_when_the_gradients_of_all_weights_are_computed() -> None:
    """Defect: the callback belongs to the first weight, whose view has more nodes if it is transposed."""
    for weight in (torch.ones(2, 3), torch.ones(3, 2).t()):
        module, calls = nn.Module(), list[str]()
        module.first, module.second = nn.Parameter(weight), nn.Parameter(torch.ones(2))
        layout = lay_out(module.to(device()))
        layout.on_gradient(lambda calls=calls: calls.append("complete"), lambda *_, calls=calls: calls.append("free"))
        all_gather(layout)
        layout.use_unsharded_params()
        for name in ("first", "second"):
            getattr(module, name).register_hook(lambda _, name=name, calls=calls: calls.append(name))
        (module.second * module.first.sum(1)).sum().backward()
        assert sorted(calls[:2]) == ["first", "second"]
        assert calls[2:] == ["free", "complete"]
        layout.use_unsharded_params()
        calls.clear()
        module.second.sum().backward()
        assert calls == ["free", "complete"]


# --- parameters that can share a unit ---


@pytest.mark.parametrize("original", [False, True])
@ranks(2)
def test_units_of_several_dtypes_or_of_integers_raise_with_the_dtypes(original: bool) -> None:
    block = a_block()
    block.down.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"MLP has parameters of several dtypes \(torch.bfloat16, torch.float32\)"):
        FSDP(block, use_orig_params=original, device_id=device())
    module = nn.Module()
    module.counts = nn.Parameter(torch.arange(4), requires_grad=False)
    with pytest.raises(ValueError, match=rf"rank {dist.get_rank()}: .*torch.int64: counts.*ignored_states"):
        FSDP(module, use_orig_params=original, device_id=device())


@pytest.mark.spec("FWD-08")
@ranks(2)
def test_zero_grad_of_one_parameter_drops_its_unreduced_gradient_and_zero_grad_of_all_drops_everything() -> None:
    model, plain = FSDP(a_block(), device_id=device(), use_orig_params=True), a_block()
    (sum(small.square_loss(plain, rank) for rank in range(2)) / 2).backward()
    once = {name: parameter.grad for name, parameter in plain.named_parameters()}
    with model.no_sync():
        small.train_once(model)
    model.module.up.bias.grad = None
    small.train_once(model)
    twice = {name: 2 * gradient for name, gradient in once.items()}
    with FSDP.summon_full_params(model, with_grads=True):
        values.assert_same(values.full_gradients(model), {**twice, "up.bias": once["up.bias"]}, bitwise=False)
    model.zero_grad()
    with model.no_sync():
        small.train_once(model)
    model.zero_grad()
    small.train_once(model)
    with FSDP.summon_full_params(model, with_grads=True):
        values.assert_same(values.full_gradients(model), once, bitwise=False)


@ranks(2)
def test_a_parameter_that_was_given_another_size_raises_with_its_name() -> None:
    model = FSDP(a_block(), device_id=device(), use_orig_params=True)
    bias = model.module.down.bias
    message = rf"'down.bias' was set to a tensor of 7 elements.*this rank has {bias.numel()}.*summon_full_params"
    assert bias.numel() == (3 if dist.get_rank() == 1 else 0)
    bias.data = torch.zeros(7, device=device())
    with pytest.raises(RuntimeError, match=message):
        model(small.draw(0))
