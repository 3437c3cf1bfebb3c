"""The flat layout: one flat tensor, split into shards, all-gathered without a copy and used through views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.layout import owned_parameters
from minifsdp.engine.mesh import Group, MeshGroups, default_group
from minifsdp.engine.precision import Precision
from spec_tests.engine.small import draw, shard_each, square_loss, train_once
from spec_tests.harness import device, plain_tensor, ranks
from spec_tests.models.modules import MLP, Scale, chain

both_kinds = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])


def a_block() -> MLP:
    (block,) = chain(1)
    return block


def lay_out(
    module: nn.Module, mesh: MeshGroups | None = None, *, compute: torch.dtype | None = None, **options: Any
) -> FlatLayout:
    parameters = owned_parameters(module.named_modules(), set())
    mesh = MeshGroups.sharded(Group.of(default_group())) if mesh is None else mesh
    return FlatLayout(module, parameters, mesh, device(), Precision(compute=compute), **options)


def all_gather(layout: FlatLayout) -> None:
    comm_streams = CommStreams(device())
    comm_streams.all_gather.wait_compute()  # a root does this once per iteration
    handle = layout.all_gather(comm_streams)
    if handle is not None:
        handle.wait()


def values_of(module: nn.Module) -> list[Tensor]:
    """The parameters that are registered on the modules, in the order of the layout."""
    layers = [m for m in module.modules() if isinstance(m, nn.Linear)]
    return [tensor for layer in layers for tensor in (layer.weight, layer.bias)]


# --- stored tensors ---


@pytest.mark.spec("SHARD-02", "SHARD-03")
@both_kinds
@ranks(4)
def test_each_rank_stores_an_equal_shard_and_only_the_last_one_has_padding(original: bool) -> None:
    layout = lay_out(a_block(), use_orig_params=original)
    row = torch.cat([p.detach().reshape(-1) for p in a_block().parameters()])
    rank = dist.get_rank()
    shard = layout.registered.shard.detach()
    assert shard.numel() == 8
    assert shard.untyped_storage().size() == 8 * 4, "the memory of the other shards is released"
    mine = row[8 * rank : 8 * rank + 8]
    assert torch.equal(shard[: mine.numel()], mine)
    assert shard[mine.numel() :].tolist() == [0.0] * (1 if rank == 3 else 0)


# --- all-gather and reshard ---


@pytest.mark.spec("SHARD-13", "FWD-04")
@both_kinds
@ranks(2)
def test_all_gather_shows_full_views_and_reshard_frees_them(original: bool) -> None:
    block = a_block()
    expected = [p.detach().clone() for p in block.parameters()]
    layout = lay_out(block, use_orig_params=original)
    seen: list[Tensor] = []
    for _ in range(2):
        all_gather(layout)
        layout.use_unsharded_params()
        shown = values_of(block)
        assert len({tensor.untyped_storage().data_ptr() for tensor in shown}) == 1, "one flat storage"
        for tensor, value in zip(shown, expected, strict=True):
            assert torch.equal(tensor, value)
            assert type(tensor) is plain_tensor()
            assert tensor.requires_grad
        layout.use_sharded_params()
        event = layout.free()
        assert event is not None
        assert all(tensor.untyped_storage().size() == 0 for tensor in shown)
        seen += shown
    assert seen[0] is not seen[4], "each forward creates new views"
    assert seen[0].untyped_storage().size() == 0


# --- a unit that is not shared between ranks ---


@pytest.mark.spec("CTOR-14")
@ranks(1)
def test_one_rank_unit_computes_in_stored_memory() -> None:
    block = a_block()
    layout = lay_out(block)
    with pytest.raises(RuntimeError, match="wrap"):
        # No callback is registered yet, so the layout would ignore the gradient.
        block(draw(0))
    layout.on_gradient(lambda: None)
    assert layout.all_gather(CommStreams(device())) is None
    layout.use_unsharded_params()
    assert block.up.weight.untyped_storage().data_ptr() == layout.registered.shard.untyped_storage().data_ptr()
    assert layout.free() is None
    layout.use_sharded_params()
    assert torch.equal(block(draw(0)), a_block()(draw(0))), "the full values may stay in sight"


@pytest.mark.spec("MP-02")
@ranks(1)
def test_one_rank_cast_unit_frees_its_copy() -> None:
    block = a_block()
    layout = lay_out(block, compute=torch.bfloat16)
    all_gather(layout)
    layout.use_unsharded_params()
    view = block.up.weight
    assert torch.equal(view, a_block().up.weight.bfloat16())
    layout.use_sharded_params()
    assert layout.free() is not None
    assert view.untyped_storage().size() == 0


# --- parameters that can share a unit ---


@pytest.mark.spec("ORIG-12")
@ranks(2)
def test_frozen_and_trained_parameters_in_one_flat_parameter_raise_with_both_lists_of_names() -> None:
    block = a_block()
    block.up.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad") as caught:
        lay_out(block)
    message = str(caught.value)
    assert "requires_grad=True (['up.weight', 'down.weight', 'down.bias'])" in message
    assert "requires_grad=False (['up.bias'])" in message
    assert "use_orig_params=True" in message
    assert f"rank {dist.get_rank()}" in message
    # The module is unchanged.
    assert torch.equal(block(draw(0)), a_block()(draw(0)))
    assert [name for name, _ in block.named_parameters()] == ["up.weight", "up.bias", "down.weight", "down.bias"]


@both_kinds
@ranks(2)
def test_parameters_of_several_dtypes_in_one_unit_raise_with_the_dtypes(original: bool) -> None:
    block = a_block()
    block.down.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"MLP has parameters of several dtypes \(torch.bfloat16, torch.float32\)"):
        lay_out(block, use_orig_params=original)


@pytest.mark.parametrize("original", [False, True])
@ranks(2)
def test_integer_only_unit_raises_with_names_and_remedy(original: bool) -> None:
    module = nn.Module()
    module.counts = nn.Parameter(torch.arange(4), requires_grad=False)
    with pytest.raises(ValueError, match=rf"rank {dist.get_rank()}: .*torch.int64: counts.*ignored_states"):
        lay_out(module, use_orig_params=original)


@ranks(2)
def test_unit_of_one_element_trains_with_only_padding_on_one_rank() -> None:
    for original in (False, True):
        model = shard_each(nn.Sequential(Scale().to(device())), use_orig_params=original)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        plain = Scale().to(device())
        expected = sum(torch.autograd.grad(square_loss(plain, rank), [plain.weight])[0] for rank in (0, 1)) / 2
        train_once(model)
        optimizer.step()
        with type(model).summon_full_params(model):
            (weight,) = model.parameters()
            assert weight.shape == ()
            torch.testing.assert_close(weight.detach(), 0.5 - expected)
