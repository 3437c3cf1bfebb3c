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
from minifsdp.engine.placeholder import PlaceholderParameter
from minifsdp.engine.precision import Precision
from minifsdp.fsdp1.full_params import all_gather_values
from spec_tests.engine.small import draw, shard_each, square_loss, train_once, units_of
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
    mine = row[8 * rank : 8 * rank + 8]
    assert torch.equal(shard[: mine.numel()], mine)
    assert shard[mine.numel() :].tolist() == [0.0] * (1 if rank == 3 else 0)


@pytest.mark.spec("SHARD-02")
@ranks(2)
def test_shard_does_not_keep_memory_of_full_bucket() -> None:
    layout = lay_out(a_block())
    assert layout.registered.shard.untyped_storage().size() == 16 * 4


@pytest.mark.spec("SHARD-03")
@ranks(2)
def test_padding_stays_zero_in_parameters_and_in_gradients_over_steps_of_an_optimizer() -> None:
    model = shard_each(chain(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        train_once(model)
        optimizer.step()
    for unit in units_of(model):
        (shard,) = unit.layout.local_parameters()
        if dist.get_rank() == 1:
            assert shard[-1].item() == 0
            assert shard.grad is not None
            assert shard.grad[-1].item() == 0


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


@pytest.mark.spec("ORIG-11")
@ranks(2)
def test_sharded_module_has_placeholder_parameters() -> None:
    block = a_block()
    layout = lay_out(block)
    for round_ in range(2):
        assert all(isinstance(tensor, PlaceholderParameter) for tensor in values_of(block)), round_
        assert [tensor.shape for tensor in values_of(block)] == [(4, 3), (4,), (3, 4), (3,)]
        all_gather(layout)
        layout.use_unsharded_params()
        layout.use_sharded_params()
        layout.free()


@pytest.mark.spec("ORIG-03", "ORIG-08")
@ranks(2)
def test_module_with_original_parameters_shows_the_local_shard_of_each_parameter() -> None:
    block = a_block()
    mine = list(block.parameters())
    layout = lay_out(block, use_orig_params=True)
    # 31 elements (12 + 4 + 12 + 3), 16 on each rank.
    expected = [[12, 4, 0, 0], [0, 0, 12, 3]][dist.get_rank()]
    for _ in range(2):
        assert [p.numel() for p in values_of(block)] == expected
        assert all(p.dim() == 1 for p in values_of(block))
        assert all(a is b for a, b in zip(values_of(block), mine, strict=True))
        all_gather(layout)
        layout.use_unsharded_params()
        layout.use_sharded_params()
        layout.free()


@ranks(2)
def test_all_gather_reuses_memory_unnoticed_by_autograd() -> None:
    block = a_block()
    layout = lay_out(block)
    all_gather(layout)
    layout.use_unsharded_params()
    x = draw(0)
    loss = block(x).square().sum()
    layout.use_sharded_params()
    layout.free()
    all_gather(layout)
    layout.use_unsharded_params_again()
    assert block.up.weight.untyped_storage().size() == layout.num_bytes
    loss.backward()
    taken = layout.take_gradient(with_unreduced=True)
    assert taken is not None
    (gradient,) = taken.parts
    plain = a_block()
    plain(x).square().sum().backward()
    expected = torch.cat([p.grad.reshape(-1) for p in plain.parameters() if p.grad is not None])
    torch.testing.assert_close(gradient[:-1], expected)
    assert gradient[-1].item() == 0, "the padding has no gradient"
    assert layout.take_gradient(with_unreduced=True) is None, "it has been taken"


@pytest.mark.spec("MP-02", "MP-03")
@both_kinds
@ranks(2)
def test_the_unsharded_parameters_have_the_compute_dtype_and_the_shard_keeps_its_own(original: bool) -> None:
    block = a_block()
    expected = [p.detach().bfloat16() for p in block.parameters()]
    layout = lay_out(block, compute=torch.bfloat16, use_orig_params=original)
    all_gather(layout)
    layout.use_unsharded_params()
    for tensor, value in zip(values_of(block), expected, strict=True):
        assert tensor.dtype is torch.bfloat16
        assert torch.equal(tensor, value)
    assert layout.num_bytes == 32 * 2
    assert layout.registered.shard.dtype is torch.float32


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


@ranks(1)
def test_one_rank_unit_follows_param_to_new_memory() -> None:
    block = a_block()
    layout = lay_out(block)
    layout.registered.shard.data = layout.registered.shard.data * 2
    layout.all_gather(CommStreams(device()))
    layout.use_unsharded_params()
    torch.testing.assert_close(block.up.weight, a_block().up.weight * 2)


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


# --- stale unsharded parameters ---


@both_kinds
@ranks(2)
def test_layout_detects_shard_change_since_all_gather(original: bool) -> None:
    layout = lay_out(a_block(), use_orig_params=original)
    parameters = layout.local_parameters()
    changes: list[Any] = [
        lambda p: p.mul_(2),
        lambda p: setattr(p, "data", p.data.clone()),
        lambda p: torch.optim.SGD([p], lr=0.1).step(),
    ]
    for change in changes:
        all_gather(layout)
        assert not layout.is_stale()
        layout.use_unsharded_params()
        layout.use_sharded_params()
        layout.free()
        assert not layout.is_stale()
        with torch.no_grad():
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
                change(parameter)
        assert layout.is_stale()


# --- unsharded values for the user ---


@both_kinds
@ranks(4)
def test_full_bucket_is_copy_of_params_in_stored_dtype(original: bool) -> None:
    layout = lay_out(a_block(), compute=torch.bfloat16, use_orig_params=original)
    row = all_gather_values(layout)
    expected = torch.cat([p.detach().reshape(-1) for p in a_block().parameters()])
    assert torch.equal(row[:31], expected)
    assert row.numel() == 32
    before = layout.registered.shard.detach().clone()
    row.zero_()
    assert torch.equal(layout.registered.shard.detach(), before)


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


@ranks(2)
def test_mixed_requires_grad_error_leaves_the_module_unchanged() -> None:
    block = a_block()
    block.up.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad"):
        lay_out(block)
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
