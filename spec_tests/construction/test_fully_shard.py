"""The effects of ``fully_shard`` on a module: its class, its parameters, and when it is unsharded.

Most tests use two ranks and a `Stack`. Complete event orders are tested in ``test_counts.py``, numerical results in
``parity/test_parity.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from minifsdp.engine import lifetime
from spec_tests.harness import device, plain_tensor, ranks
from spec_tests.models.gradients import assert_mean_gradients, step_with
from spec_tests.models.modules import UNITS, WIDTH, Stack, Tied, seeded, wide
from spec_tests.models.running import Wire, batch, iterate, loss_of, of_unit
from spec_tests.models.sharding import grid_mesh, line_mesh, sharded
from spec_tests.models.values import assert_same, full_gradients, full_values, mean_gradients, named
from spec_tests.subject import FSDPModule, fully_shard, trace


def linear(rows: int, columns: int, bias: bool = False) -> nn.Linear:
    return seeded(lambda: nn.Linear(columns, rows, bias=bias))


def own_types(module: nn.Module) -> set[type]:
    """The types of the parameters that belong to the unit of ``module``, in a `Stack` or in one of its blocks."""
    if isinstance(module, Stack):
        return {type(p.data) for part in (module.enter, module.leave) for p in part.parameters()}
    return {type(p.data) for p in module.parameters()}


SHARDED = {DTensor}


# --- the function and the class ---


@pytest.mark.spec("FS2-01", "FS2-02", "FS2-03")
@ranks(2)
def test_fully_shard_works_in_place_and_changes_only_the_class() -> None:
    plain, model = seeded(), seeded()
    before = dict(model.named_modules())
    for module in (*model.blocks, model):
        assert fully_shard(module) is module
    assert dict(model.named_modules()) == before
    assert isinstance(model, Stack)
    assert isinstance(model, FSDPModule)
    assert not isinstance(model.enter, FSDPModule)
    assert type(model.blocks[0]) is type(model.blocks[1])
    assert type(plain) is Stack, "the class itself does not change"
    assert str(model) == str(plain).replace("Stack(", "FSDPStack(").replace("Block(", "FSDPBlock(")
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.spec("FS2-02", "FS2-03")
@ranks(2)
def test_a_slice_of_a_sharded_container_is_a_plain_container() -> None:
    model = fully_shard(nn.Sequential(*(linear(4, 4) for _ in range(3))))
    part = model[:2]
    assert type(part) is nn.Sequential
    assert list(part) == [model[0], model[1]]


# --- the parameters ---


@pytest.mark.spec("FS2-04", "FS2-07", "FS2-16")
@ranks(2)
def test_parameters_become_dtensors_over_all_ranks_with_their_global_shapes() -> None:
    plain, model = named(seeded()), sharded()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)
        assert parameter.shape == plain[name].shape
        assert parameter.device_mesh == line_mesh()
        assert parameter.requires_grad
        assert parameter.is_leaf
        whole = parameter.full_tensor()
        assert type(whole) is plain_tensor()
        assert torch.equal(whole, plain[name])


@pytest.mark.spec("FS2-05", "FS2-06")
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 9])
@ranks(4)
def test_row_shards_equal_chunk_and_last_may_be_empty(rows: int) -> None:
    layer = linear(rows, 3)
    weight = layer.weight.detach().clone()
    fully_shard(layer)
    chunks = weight.chunk(4)
    mine = chunks[dist.get_rank()] if dist.get_rank() < len(chunks) else weight[:0]
    assert layer.weight.shape == (rows, 3)
    assert layer.weight.to_local().shape == mine.shape
    assert torch.equal(layer.weight.to_local(), mine)


@pytest.mark.spec("FS2-06", "FS2-07", "FS2-13")
@pytest.mark.parametrize("rows", [1, 3])
@ranks(2)
def test_uneven_layer_trains_like_unsharded_one(rows: int) -> None:
    layer, plain = fully_shard(linear(rows, WIDTH, bias=True)), linear(rows, WIDTH, bias=True)
    optimizer, oracle = (torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (layer, plain))
    for step in range(3):
        expected = mean_gradients(plain, [step])
        iterate(layer, step)
        assert_same(full_gradients(layer), expected)
        optimizer.step()
        optimizer.zero_grad()
        step_with(expected, plain, oracle)
    assert_same(full_values(layer), named(plain))


@pytest.mark.spec("FS2-08", "NEW-16")
@ranks(2)
def test_a_placement_function_chooses_another_dim_for_some_parameters() -> None:
    def columns(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 else None

    plain, model = named(seeded()), sharded(shard_placement_fn=columns)
    for name, parameter in model.named_parameters():
        dim = 1 if parameter.ndim == 2 else 0
        assert parameter.placements == (Shard(dim),)
        assert torch.equal(parameter.to_local(), plain[name].chunk(2, dim=dim)[dist.get_rank()])
    usual = sharded()
    for step in range(2):
        assert iterate(model, step) == iterate(usual, step)
        assert {p.grad.placements for p in model.parameters() if p.ndim == 2} == {(Shard(1),)}
        assert_same(full_gradients(model), full_gradients(usual))


@pytest.mark.spec("FS2-08", "NEW-16")
@ranks(2)
def test_conv_weight_is_sharded_along_any_dim() -> None:
    for dim in (0, 1, 2, -1):
        conv = seeded(lambda: nn.Conv1d(4, 2, 2))
        whole = conv.weight.detach().clone()

        def placement(parameter: nn.Parameter, dim: int = dim) -> Shard:
            return Shard(dim) if parameter.ndim == 3 else Shard(0)

        fully_shard(conv, shard_placement_fn=placement)
        assert torch.equal(conv.weight.to_local(), whole.chunk(2, dim=dim)[dist.get_rank()])
        assert torch.equal(conv.weight.full_tensor(), whole)
        conv.unshard()
        assert torch.equal(conv.weight, whole)
        assert conv.weight.is_contiguous()


@pytest.mark.spec("FS2-09")
@ranks(2)
def test_each_fully_shard_call_manages_parameters_without_inner_call() -> None:
    model = sharded(wide(), blocks=[0, 2])
    iterate(model)
    with Wire() as wire:
        iterate(model)
    sizes = {f"blocks.{i}": sum(p.numel() for p in model.blocks[i].parameters()) for i in range(4)}
    root = sum(p.numel() for p in model.parameters()) - sizes["blocks.0"] - sizes["blocks.2"]
    expected = [root, sizes["blocks.0"], sizes["blocks.2"]]
    gathers = [size for kind, size in wire.values if kind == "AG"]
    assert gathers == [*expected, sizes["blocks.2"], sizes["blocks.0"]]
    assert sorted(size for kind, size in wire.values if kind == "RS") == sorted(expected)


@pytest.mark.spec("FS2-09")
@ranks(2)
def test_root_without_own_parameters_is_not_all_gathered() -> None:
    model = nn.Sequential(linear(WIDTH, WIDTH), linear(WIDTH, WIDTH))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with trace.record() as recorder:
        iterate(model)
    assert sorted(recorder.order("AG", "RS")) == ["AG 0", "AG 0", "AG 1", "AG 1", "RS 0", "RS 1"]


@pytest.mark.spec("FS2-15")
@ranks(2)
def test_parameters_and_buffers_move_to_the_device_of_the_mesh() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].register_buffer("shared", model[1].running_mean)
    fully_shard(model, mesh=line_mesh())
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {device().type}
    model(torch.ones(3, 3, device=device()))
    assert model[0].shared is model[1].running_mean, "modules still share a buffer"


@pytest.mark.cpu
@pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without an accelerator")
@ranks(2)
def test_gpu_build_of_torch_shards_on_the_cpu_if_there_is_no_gpu() -> None:
    # A build for GPUs returns its device type, unless the caller asks for an available device.
    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    with mock.patch.object(torch.accelerator, "current_accelerator", current_accelerator):
        model = fully_shard(nn.Linear(4, 4))
    assert model.weight.device_mesh.device_type == "cpu"


# --- during an iteration ---


@pytest.mark.spec("FS2-13")
@ranks(2)
def test_gradients_are_dtensors_placed_like_the_parameter_and_the_mean_over_ranks() -> None:
    model = sharded()
    expected = mean_gradients(seeded())
    iterate(model)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements
        assert parameter.grad.device_mesh == parameter.device_mesh
        assert parameter.grad.shape == parameter.shape, name
    assert_same(full_gradients(model), expected)


@pytest.mark.spec("FS2-17", "FS2-21")
@ranks(2)
def test_true_reshards_after_forward_false_keeps_units_and_none_keeps_only_the_root() -> None:
    x = batch()
    gathered = {plain_tensor()}
    for option, root, block in ((True, SHARDED, SHARDED), (False, gathered, gathered), (None, gathered, SHARDED)):
        model = sharded(reshard_after_forward=option)
        with trace.record() as recorder:
            output = model(x)
        assert own_types(model) == root, option
        assert own_types(model.blocks[1]) == block, option
        assert of_unit(recorder, "blocks.1") == ["AG", "F", "FREE"][: 3 if block == SHARDED else 2]
        with trace.record() as recorder:
            loss_of(output).backward()
        assert recorder.count("AG") == 4 * (block == SHARDED) + (root == SHARDED)
        assert own_types(model) == own_types(model.blocks[1]) == SHARDED


@pytest.mark.spec("FS2-18")
@ranks(4)
def test_mesh_with_two_dimensions_replicates_over_the_first_and_shards_over_the_second() -> None:
    model, plain = sharded(mesh=grid_mesh()), named(seeded())
    for name, parameter in model.named_parameters():
        assert parameter.placements == (Replicate(), Shard(0))
        assert torch.equal(parameter.to_local(), plain[name].chunk(2)[dist.get_rank() % 2])
        assert torch.equal(parameter.full_tensor(), plain[name])
    with trace.record() as recorder:
        iterate(model)
    assert {p.grad.placements for p in model.parameters()} == {(Replicate(), Shard(0))}
    assert_same(full_gradients(model), mean_gradients(seeded(), num_ranks=4))
    rank = dist.get_rank()
    row, column = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
    for kind, members in (("AG", row), ("RS", row), ("AR", column)):
        events = [event for event in recorder.events if event.kind == kind]
        assert {event.ranks for event in events} == {members}
        assert {event.unit for event in events} == {*UNITS}
    for unit in ("", "blocks.1"):
        assert of_unit(recorder, unit, "RS", "AR") == ["RS", "AR"]


@pytest.mark.spec("FS2-22")
@ranks(2)
def test_frozen_and_trained_parameters_share_a_group_and_only_the_trained_are_reduced() -> None:
    model, plain = wide(), wide()
    for block in (*model.blocks, *plain.blocks):
        block.up.requires_grad_(False)
    frozen = {name for name, parameter in plain.named_parameters() if not parameter.requires_grad}
    sharded(model)
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == frozen
    iterate(model)
    assert {name for name, parameter in model.named_parameters() if parameter.grad is None} == frozen
    assert_same(full_gradients(model), mean_gradients(plain))
    with Wire() as wire:
        iterate(model)
    reduced = [size for kind, size in wire.values if kind == "RS"]
    trained = [sum(p.numel() for p in block.parameters() if p.requires_grad) for block in model.blocks]
    root = sum(p.numel() for part in (model.enter, model.leave) for p in part.parameters())
    assert reduced == [*reversed(trained), root]


@pytest.mark.spec("FS2-22")
@ranks(2)
def test_freezing_and_unfreezing_after_the_first_iteration_take_effect() -> None:
    model, plain = sharded(), seeded()
    for trains in (True, False, True):
        for each in (model, plain):
            each.blocks[1].linear.weight.requires_grad_(trains)
        assert_mean_gradients(model, plain, [0])


@pytest.mark.spec("FS2-22")
@pytest.mark.parametrize("evaluates", [True, False])
@ranks(2)
def test_requires_grad_set_while_unsharded_persists(evaluates: bool) -> None:
    model, plain = sharded(), seeded()
    for trains in (False, True):
        # The root stays unsharded after a forward that autograd records.
        with torch.set_grad_enabled(not evaluates):
            model(batch())
        assert isinstance(model.enter.weight, DTensor) is evaluates
        for each in (model, plain):
            each.enter.requires_grad_(trains)
        assert_mean_gradients(model, plain)
        assert model.enter.weight.requires_grad is trains


@pytest.mark.spec("FS2-23", "MIG-17")
@ranks(2)
def test_ignored_parameters_do_not_change_and_are_not_reduced() -> None:
    model = seeded()
    ignored = {model.blocks[1].linear.weight, model.leave.bias}
    sharded(model, ignored_params=ignored)
    mine = {name: parameter for name, parameter in model.named_parameters() if parameter in ignored}
    assert list(mine) == ["blocks.1.linear.weight", "leave.bias"]
    assert not any(isinstance(parameter, DTensor) for parameter in mine.values())
    assert all(isinstance(p, DTensor) for p in model.parameters() if p not in ignored)
    plain = seeded()
    iterate(plain)
    local = {name: plain.get_parameter(name).grad.clone() for name in mine}
    expected = {name: g for name, g in mean_gradients(plain).items() if name not in mine}
    iterate(model)
    assert_same({name: parameter.grad for name, parameter in mine.items()}, local)
    assert_same({name: g for name, g in full_gradients(model).items() if name not in mine}, expected)


@pytest.mark.spec("FS2-24")
@ranks(2)
def test_parameter_tied_inside_one_group_stays_one_object() -> None:
    model = seeded(Tied)
    fully_shard(model.middle)
    fully_shard(model)
    for _ in range(2):
        assert model.first.weight is model.last.weight
        output = model(batch())
        assert model.first.weight is model.last.weight, "gathered, too"
        loss_of(output).backward()
    assert len(list(model.parameters())) == 5
    expected = mean_gradients(seeded(Tied))
    assert_same({name: gradient / 2 for name, gradient in full_gradients(model).items()}, expected)


class Slow:
    """A resharding event that the device never completes; waiting for it would block the CPU."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        """Returns immediately. A real event would block."""


@pytest.mark.spec("FS2-26", "MIG-14")
@ranks(2)
def test_fully_shard_never_stops_the_cpu_on_a_slow_device() -> None:
    """On a CPU all events are complete immediately, so this test replaces them by events that never complete."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifetime, "DONE", Slow())
        model = sharded()
        for step in range(3):
            with trace.record() as recorder:
                iterate(model, step)
            assert recorder.count("AG") == 9
            assert recorder.count("WAIT") == 0


@pytest.mark.spec("FS2-26", "MIG-14")
@pytest.mark.accelerator
@ranks(2)
def test_two_equal_runs_reach_the_same_peak_of_memory() -> None:
    model = sharded(seeded(lambda: Stack(width=256)))
    memory, peaks = torch.get_device_module(device()), []
    for step in range(6):
        memory.reset_peak_memory_stats()
        loss_of(model(batch(step, width=256))).backward()
        memory.synchronize()
        peaks.append(memory.max_memory_allocated())
        model.zero_grad()
    assert len(set(peaks[2:])) == 1, peaks


# --- user operations between iterations ---


@pytest.mark.spec("FS2-03")
@ranks(2)
def test_training_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = sharded()
        iterate(model)


@pytest.mark.spec("FS2-13")
@ranks(2)
def test_forward_without_backward_does_not_affect_training() -> None:
    model, plain = sharded(), seeded()
    optimizer, oracle = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    for step in range(3):
        model(batch(step + 100))
        expected = mean_gradients(plain, steps=(step,))
        iterate(model, step)
        assert_same(full_gradients(model), expected)
        optimizer.step()
        optimizer.zero_grad()
        step_with(expected, plain, oracle)


@pytest.mark.spec("FS2-09")
@ranks(2)
def test_submodule_of_two_models_trains_in_both_models() -> None:
    """Defect: a root whose child became part of another tree continues to use its own, invalid tree."""

    def pair(shard: Callable[..., Any]) -> list[Any]:
        first, second = seeded(), seeded()
        second.blocks = first.blocks
        for block in first.blocks:
            shard(block)
        return [shard(first), shard(second)]

    ours, plain = pair(fully_shard), pair(lambda module: module)
    for step, which in enumerate((0, 1, 0, 1, 1, 0)):
        with trace.record() as recorder:
            assert_mean_gradients(ours[which], plain[which], [step])
        assert recorder.count("RS") == 5
