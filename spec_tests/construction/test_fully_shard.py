"""The effects of ``fully_shard`` on a module: its class, its parameters, and when it is unsharded.

Most tests use two ranks and a `Stack`. Complete event orders are tested in ``prefetch/test_timelines.py``, numerical
results in ``parity/test_parity.py``.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing import assert_close

from spec_tests.harness import device, ranks
from spec_tests.models import sharding
from spec_tests.models.gradients import assert_trains_like
from spec_tests.models.modules import seeded
from spec_tests.models.running import batch
from spec_tests.subject import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method, trace

# --- the function and the class ---


@pytest.mark.spec("FS2-01", "FS2-02", "FS2-03")
@ranks(2)
def test_fully_shard_works_in_place_and_changes_only_the_class() -> None:
    plain, model = seeded(), seeded()
    stack, before = type(plain), dict(model.named_modules())
    for module in (*model.blocks, model):
        assert fully_shard(module) is module
    assert dict(model.named_modules()) == before
    assert isinstance(model, stack)
    assert isinstance(model, FSDPModule)
    assert not isinstance(model.enter, FSDPModule)
    assert type(plain) is stack, "the class itself does not change"
    assert str(model) == str(plain).replace("Stack(", "FSDPStack(").replace("Block(", "FSDPBlock(")
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


@pytest.mark.spec("FS2-02", "FS2-03")
@ranks(2)
def test_a_slice_of_a_sharded_container_is_a_plain_container() -> None:
    model = fully_shard(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to(device()))
    part = model[:2]
    assert type(part) is nn.Sequential
    assert list(part) == [model[0], model[1]]


# --- the parameters ---


@pytest.mark.spec("FS2-04", "FS2-07", "FS2-13", "FS2-16")
@ranks(2)
def test_parameters_and_gradients_are_dtensors_over_all_ranks_with_their_global_shapes() -> None:
    plain, model, mesh = seeded(), sharding.sharded(), sharding.line_mesh()
    model(batch()).sum().backward()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert (parameter.requires_grad, parameter.is_leaf) == (True, True)
        for tensor in (parameter, parameter.grad):
            assert isinstance(tensor, DTensor)
            assert (tensor.placements, tensor.device_mesh) == ((Shard(0),), mesh)
            assert tensor.shape == plain.get_parameter(name).shape
        assert not isinstance(parameter.full_tensor(), (DTensor, nn.Parameter))
        assert torch.equal(parameter.full_tensor(), plain.get_parameter(name))
    model.zero_grad()
    assert_trains_like(model)


@pytest.mark.spec("FS2-05", "FS2-06")
@pytest.mark.parametrize("rows", [1, 3, 5, 9])
@ranks(4)
def test_row_shards_equal_chunk_and_last_may_be_empty(rows: int) -> None:
    layer = nn.Linear(3, rows).to(device())
    whole = layer.weight.detach().clone()
    fully_shard(layer)
    chunks = [*whole.chunk(4), *4 * [whole[:0]]]
    assert layer.weight.shape == (rows, 3)
    assert torch.equal(layer.weight.to_local(), chunks[dist.get_rank()])


@pytest.mark.spec("FS2-08", "NEW-16")
@ranks(2)
def test_a_placement_function_chooses_another_dim_for_some_parameters() -> None:
    def columns(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 else None

    plain, model = seeded(), sharding.sharded(shard_placement_fn=columns)
    model(batch()).sum().backward()
    for name, parameter in model.named_parameters():
        dim = parameter.ndim - 1
        assert parameter.placements == parameter.grad.placements == (Shard(dim),)
        assert torch.equal(parameter.to_local(), plain.get_parameter(name).chunk(2, dim)[dist.get_rank()])
    model.zero_grad()
    assert_trains_like(model, plain, range(2))


@pytest.mark.spec("FS2-08", "NEW-16")
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@ranks(2)
def test_conv_weight_is_sharded_along_any_dim(dim: int) -> None:
    conv = seeded(lambda: nn.Conv1d(4, 2, 2))
    whole = conv.weight.detach().clone()
    fully_shard(conv, shard_placement_fn=lambda parameter: Shard(dim if parameter.ndim == 3 else 0))
    assert torch.equal(conv.weight.to_local(), whole.chunk(2, dim=dim)[dist.get_rank()])
    assert torch.equal(conv.weight.full_tensor(), whole)
    conv.unshard()
    assert torch.equal(conv.weight, whole)
    assert conv.weight.is_contiguous()


@pytest.mark.spec("FS2-15")
@ranks(2)
def test_parameters_and_buffers_move_to_the_device_of_the_mesh() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model[0].register_buffer("shared", model[1].running_mean)
    fully_shard(model, mesh=sharding.line_mesh())
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


@pytest.mark.spec("FS2-17", "FS2-21")
@pytest.mark.parametrize(
    ("option", "reshards_root", "reshards_blocks"), [(True, True, True), (False, False, False), (None, False, True)]
)
@ranks(2)
def test_after_forward_only_resharded_units_have_dtensors_and_after_backward_all(
    option: bool | None, reshards_root: bool, reshards_blocks: bool
) -> None:
    model = sharding.sharded(reshard_after_forward=option)
    loss = model(batch()).sum()
    assert isinstance(model.enter.weight, DTensor) is reshards_root
    assert all(isinstance(block.linear.weight, DTensor) is reshards_blocks for block in model.blocks)
    loss.backward()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.spec("FS2-18")
@ranks(4)
def test_mesh_with_two_dimensions_replicates_over_the_first_and_shards_over_the_second() -> None:
    model, plain = sharding.sharded(mesh=sharding.grid_mesh()), seeded()
    for name, parameter in model.named_parameters():
        assert parameter.placements == (Replicate(), Shard(0))
        assert torch.equal(parameter.to_local(), plain.get_parameter(name).chunk(2)[dist.get_rank() % 2])
        assert torch.equal(parameter.full_tensor(), plain.get_parameter(name))
    with trace.record() as recorder:
        model(batch()).sum().backward()
    assert {parameter.grad.placements for parameter in model.parameters()} == {(Replicate(), Shard(0))}
    shards, replicas = ((0, 1), (2, 3))[dist.get_rank() // 2], ((0, 2), (1, 3))[dist.get_rank() % 2]
    found = {(event.kind, event.ranks) for event in recorder.events if event.ranks}
    assert found == {("AG", shards), ("RS", shards), ("AR", replicas)}
    model.zero_grad()
    assert_trains_like(model)


@pytest.mark.spec("FS2-22")
@ranks(2)
def test_frozen_and_trained_parameters_share_a_group_and_only_the_trained_are_reduced() -> None:
    model, plain = seeded(), seeded()
    for each in (model, plain):
        for block in each.blocks:
            block.linear.weight.requires_grad_(False)
    sharding.sharded(model)
    with trace.record() as recorder:
        model(batch()).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad is (parameter.grad is not None) is plain.get_parameter(name).requires_grad
    # Each of the four blocks has a bias of 6 elements, and the root has 56 parameters.
    assert [event.num_bytes // 4 for event in recorder.events if event.kind == "RS"] == [6, 6, 6, 6, 56]
    model.zero_grad()
    assert_trains_like(model, plain)


@pytest.mark.spec("FS2-22")
@pytest.mark.parametrize("moment", ["after an iteration", "after a forward", "after an evaluation"])
@ranks(2)
def test_freezing_and_unfreezing_take_effect(moment: str) -> None:
    model, plain = sharding.sharded(), seeded()
    for trains in (True, False, True):
        # The root stays unsharded after a forward that autograd records.
        with torch.set_grad_enabled(moment != "after an evaluation"):
            output = model(batch())
        if moment == "after an iteration":
            output.sum().backward()
            model.zero_grad()
        for each in (model, plain):
            each.enter.requires_grad_(trains)
            each.blocks[1].linear.weight.requires_grad_(trains)
        assert_trains_like(model, plain)
        assert model.enter.weight.requires_grad is trains


@pytest.mark.spec("FS2-23", "MIG-17")
@ranks(2)
def test_ignored_parameters_do_not_change_and_are_not_reduced() -> None:
    model, plain = seeded(), seeded()
    ignored = {"blocks.1.linear.weight": model.blocks[1].linear.weight, "leave.bias": model.leave.bias}
    sharding.sharded(model, ignored_params=set(ignored.values()))
    assert {name: p for name, p in model.named_parameters() if not isinstance(p, DTensor)} == ignored
    for each in (model, plain):
        each(batch()).square().mean().backward()
    for name, parameter in ignored.items():
        assert torch.equal(parameter.grad, plain.get_parameter(name).grad), "the gradient of this rank's own batch"


@pytest.mark.spec("FS2-24")
@ranks(2)
def test_parameter_tied_inside_one_group_stays_one_object() -> None:
    model, plain = (seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))) for _ in range(2))
    for each in (model, plain):
        each[2].weight = each[0].weight
    fully_shard(model)
    assert len(list(model.parameters())) == 3
    output = model(batch())
    assert model[0].weight is model[2].weight, "the unsharded parameter"
    output.sum().backward()
    assert model[0].weight is model[2].weight
    model.zero_grad()
    assert_trains_like(model, plain, range(2))


@pytest.mark.spec("FS2-26", "MIG-14")
@pytest.mark.accelerator
@ranks(2)
def test_two_equal_runs_reach_the_same_peak_of_memory() -> None:
    model = nn.Sequential(*(fully_shard(nn.Linear(256, 256, device=device())) for _ in range(4)))
    memory, peaks = torch.get_device_module(device()), []
    fully_shard(model)
    for _ in range(6):
        memory.reset_peak_memory_stats()
        model(torch.ones(3, 256, device=device())).sum().backward()
        memory.synchronize()
        peaks.append(memory.max_memory_allocated())
        model.zero_grad()
    assert len(set(peaks[2:])) == 1, peaks


# --- other methods that run a forward ---


class Encoder(nn.Module):
    """Has two methods that run a forward. One of them records the dtypes of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(x))

    def encode(self, x: Tensor, *, scale: Tensor) -> Tensor:
        self.seen = (x.dtype, scale.dtype)
        return self.enter(x) * scale


@pytest.mark.spec("NEW-13")
@ranks(2)
def test_registered_method_all_gathers_and_reshards() -> None:
    model, plain = fully_shard(seeded(Encoder), reshard_after_forward=True), seeded(Encoder)
    register_fsdp_forward_method(model, "encode")
    scale = torch.full((6,), 0.5, device=device())
    with trace.record() as recorder:
        output = model.encode(batch(), scale=scale)
    assert recorder.order("AG", "F", "FREE") == ["AG", "F", "FREE"]
    assert torch.equal(output, plain.encode(batch(), scale=scale))
    assert_trains_like(model, plain, range(2), loss=lambda each, x: each.encode(x, scale=scale).square().mean())
    assert_close(model(batch()), plain(batch()))


@pytest.mark.spec("NEW-13", "FS2-MP-04", "FS2-MP-06")
@ranks(2)
def test_a_registered_method_is_given_cast_inputs_and_its_output_is_cast() -> None:
    """Defect: the return value of the pre-forward hook or of the post-forward hook is dropped."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = fully_shard(seeded(Encoder), mp_policy=policy)
    register_fsdp_forward_method(model, "encode")
    output = model.encode(batch(), scale=torch.ones(6, device=device()))
    assert model.seen == (torch.bfloat16, torch.bfloat16)
    assert output.dtype == torch.float64


@pytest.mark.spec("NEW-13")
@ranks(2)
def test_register_forward_method_ignores_other_modules_and_refuses_a_missing_method() -> None:
    plain = seeded(Encoder)
    register_fsdp_forward_method(plain, "encode")
    assert "encode" not in vars(plain)
    with pytest.raises(ValueError, match="decode"):
        register_fsdp_forward_method(fully_shard(plain), "decode")


# --- requires_grad that a program sets in forward ---


class Turns(nn.Module):
    """Trains one of its two layers in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.trains_b = False

    def forward(self, x: Tensor) -> Tensor:
        self.a.requires_grad_(not self.trains_b)
        self.b.requires_grad_(self.trains_b)
        self.trains_b = not self.trains_b
        return self.b(self.a(x))


def turns() -> Any:
    model = Turns().to(device())
    for module in (model.a, model.b, model):
        fully_shard(module)
    return model


@pytest.mark.spec("FS2-22")
@ranks(2)
def test_requires_grad_that_the_root_sets_in_its_forward_counts_in_this_forward() -> None:
    model = turns()
    for trained in ("a", "b", "a"):
        model(torch.ones(2, 4, device=device(), requires_grad=True)).sum().backward()
        assert {name.partition(".")[0] for name, p in model.named_parameters() if p.grad is not None} == {trained}
        model.zero_grad()


@pytest.mark.spec("FS2-22")
@ranks(2)
def test_requires_grad_is_that_of_the_unsharded_parameter_after_unshard() -> None:
    model = turns()
    model.a.weight.requires_grad_(False)
    model.a.unshard()
    assert not model.a.weight.requires_grad
    assert model.a.bias.requires_grad
