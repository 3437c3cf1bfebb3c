"""``reshard_after_forward=N``: after forward, a unit is resharded over N neighbouring ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from spec_tests.harness import device, ranks
from spec_tests.models import apis, gradients, modules, running, sharding, values
from spec_tests.subject import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, trace

ALL_RANKS = (0, 1, 2, 3)


def neighbours() -> tuple[int, int]:
    return ((0, 1), (2, 3))[dist.get_rank() // 2]


@pytest.mark.spec("NEW-05")
@ranks(4)
def test_backward_all_gathers_among_local_peers() -> None:
    model = apis.FULLY_SHARD.shard(reshard_after_forward=2)
    shapes = [parameter.to_local().shape for parameter in model.parameters()]
    for step in range(3):
        with trace.record() as forward:
            loss = model(running.batch(step)).square().mean()
        with trace.record() as backward:
            loss.backward()
        assert [event.ranks for event in forward.events if event.kind == "AG"] == [ALL_RANKS] * 5
        assert [event.ranks for event in backward.events if event.kind == "AG"] == [neighbours()] * 5
        assert {event.ranks for event in backward.events if event.kind == "RS"} == {ALL_RANKS}
        # After backward, each rank has its own shards again.
        assert [parameter.to_local().shape for parameter in model.parameters()] == shapes
        assert [parameter.grad.to_local().shape for parameter in model.parameters()] == shapes


@pytest.mark.spec("NEW-05")
@ranks(4)
def test_reshard_to_a_smaller_mesh_changes_no_result() -> None:
    model = apis.FULLY_SHARD.shard(modules.wide(), reshard_after_forward=2)
    gradients.assert_trains_like(model, modules.wide(), range(2))


@pytest.mark.spec("NEW-05", "WIRE-10")
@ranks(4)
def test_a_parameter_that_only_the_smaller_mesh_sends_on_its_own_is_all_gathered_by_both() -> None:
    """Between CPUs, the size of a shard decides how it is sent, and half of this parameter is more than a quarter."""
    plain = modules.seeded(lambda: nn.Sequential(nn.Linear(6, 2**15, bias=False), nn.Linear(2**15, 2)))
    model: Any = copy.deepcopy(plain)
    for module in (*model, model):
        fully_shard(module, reshard_after_forward=2)
    gradients.assert_mean_gradients(model, plain)


@pytest.mark.spec("NEW-05")
@pytest.mark.parametrize("moment", ["in a forward hook", "between forward and backward"])
@ranks(4)
def test_after_a_manual_reshard_backward_reads_the_shards_of_all_ranks(moment: str) -> None:
    model = apis.FULLY_SHARD.shard(reshard_after_forward=2)
    if moment == "in a forward hook":
        model.blocks[2].register_forward_hook(lambda module, *_: module.reshard())
    loss = model(running.batch()).square().mean()
    if moment == "between forward and backward":
        model.blocks[2].reshard()
    with trace.record() as recorder:
        loss.backward()
    members = {event.unit: event.ranks for event in recorder.events if event.kind == "AG"}
    assert members == {**dict.fromkeys(("", "blocks.0", "blocks.1", "blocks.3"), neighbours()), "blocks.2": ALL_RANKS}


# --- the parameters after forward ---


@pytest.mark.spec("NEW-05")
@pytest.mark.parametrize(("rows", "dim"), [(6, 0), (1, 0), (6, 1)])
@ranks(4)
def test_modules_show_local_peer_shards_after_forward(rows: int, dim: int) -> None:
    model = modules.seeded(lambda: nn.Linear(8, rows, bias=False))
    whole = model.weight.detach().clone()
    fully_shard(model, reshard_after_forward=2, shard_placement_fn=lambda _: Shard(dim))
    owned = model.weight
    loss = model(running.batch(width=8)).square().mean()
    shown = model.weight
    assert isinstance(shown, nn.Parameter)
    assert (shown.placements, shown.shape) == ((Replicate(), Shard(dim)), whole.shape)
    assert shown.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    chunks, index = whole.chunk(2, dim), dist.get_rank() % 2
    assert torch.equal(shown.to_local(), chunks[index] if index < len(chunks) else whole[:0])
    assert torch.equal(shown.full_tensor(), whole)
    assert torch.equal(model.state_dict()["weight"].to_local(), owned.to_local())
    assert model.weight is owned, "saving shows the shards of all ranks"
    loss.backward()
    assert model.weight is owned
    assert owned.grad.to_local().shape == owned.to_local().shape


@pytest.mark.spec("NEW-05")
@ranks(4)
def test_a_frozen_parameter_stays_frozen_on_the_smaller_mesh() -> None:
    model = nn.Linear(6, 6)
    model.bias.requires_grad_(False)
    fully_shard(model, reshard_after_forward=2)
    model(running.batch())
    assert model.bias.placements == (Replicate(), Shard(0))
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False]


@pytest.mark.spec("NEW-05")
@pytest.mark.parametrize("records", [False, True])
@ranks(4)
def test_smaller_mesh_unit_computes_correctly_after_a_change_of_values(records: bool) -> None:
    model, plain = apis.FULLY_SHARD.shard(reshard_after_forward=2), modules.seeded()
    owned = list(model.parameters())
    for factor in (1.0, 2.0):
        with torch.set_grad_enabled(records):
            model(running.batch())
        with torch.no_grad():
            for parameter in (*owned, *plain.parameters()):
                parameter.mul_(factor)
        with torch.set_grad_enabled(records):
            torch.testing.assert_close(model(running.batch()), plain(running.batch()))
        model(running.batch()).square().mean().backward()
        values.assert_same(apis.FULLY_SHARD.gradients(model), values.mean_gradients(plain))
        model.zero_grad()


@pytest.mark.spec("NEW-05", "FS2-28")
@ranks(4)
def test_a_forward_after_parameters_were_replaced_on_a_smaller_mesh_reads_the_new_values() -> None:
    layer = fully_shard(nn.Linear(4, 4, bias=False, device=device()), reshard_after_forward=2)
    model: Any = fully_shard(nn.Sequential(layer))
    model(torch.ones(1, 4, device=device()))
    (optimized,) = fully_shard.state(layer).unit.layout.local_parameters
    optimized.to_local().data.fill_(1.0)
    layer.weight = nn.Parameter(optimized.data)
    assert model(torch.ones(1, 4, device=device())).tolist() == [[4.0] * 4]


# --- other settings ---


@pytest.mark.spec("NEW-05", "NEW-06")
# The root and four blocks: once in forward and, if they are resharded after it, once in backward.
@pytest.mark.parametrize(("choice", "gathers"), [(True, 10), (False, 5)])
@ranks(4)
def test_switched_reshard_after_forward_selects_all_gather_ranks_and_keeps_results(choice: bool, gathers: int) -> None:
    model = apis.FULLY_SHARD.shard(reshard_after_forward=2)
    loss = model(running.batch()).square().mean()
    # Between forward and backward, while units are resharded over fewer ranks.
    model.set_reshard_after_forward(choice)
    loss.backward()
    values.assert_same(apis.FULLY_SHARD.gradients(model), values.mean_gradients(modules.seeded()))
    model.zero_grad()
    with trace.record() as recorder:
        gradients.assert_trains_like(model)
    assert [event.ranks for event in recorder.events if event.kind == "AG"] == [ALL_RANKS] * gathers


@pytest.mark.spec("NEW-05", "NEW-06")
@pytest.mark.parametrize("in_between", ["reshard", "switch"])
@ranks(4)
def test_pending_unshard_on_smaller_mesh_is_correct_after_a_change_of_settings(in_between: str) -> None:
    model = apis.FULLY_SHARD.shard(reshard_after_forward=2)
    loss = model(running.batch()).square().mean()
    for block in model.blocks:
        handle = block.unshard(async_op=True)
        if in_between == "reshard":
            block.reshard()
        else:
            block.set_reshard_after_forward(True)
            handle.wait()
    loss.backward()
    values.assert_same(apis.FULLY_SHARD.gradients(model), values.mean_gradients(modules.seeded()))


@pytest.mark.spec("NEW-05")
@pytest.mark.parametrize(("mesh", "num_shards"), [("line_mesh", 4), ("column_mesh", 1)])
@ranks(4)
def test_a_number_that_does_not_divide_the_ranks_is_refused_and_changes_nothing(mesh: str, num_shards: int) -> None:
    model, given = modules.seeded(), getattr(sharding, mesh)()
    before = values.named(model)
    for number in (0, 3, -2, 8):
        with pytest.raises(ValueError, match=rf"reshard_after_forward={number} is not a factor of {num_shards}\b"):
            fully_shard(model, mesh=given, reshard_after_forward=number)
    assert type(model) is modules.Stack
    values.assert_same(values.named(model), before, bitwise=True)
    running.iterate(fully_shard(model, mesh=given, reshard_after_forward=1))


@pytest.mark.spec("NEW-05")
@pytest.mark.parametrize(("number", "choice"), [(1, False), (2, True)])
@ranks(2)
def test_reshard_to_one_keeps_and_to_all_reshards(number: int, choice: bool) -> None:
    ours, expected = (apis.FULLY_SHARD.shard(reshard_after_forward=value) for value in (number, choice))
    assert running.recorded_iteration(ours) == running.recorded_iteration(expected)


# The options of `fully_shard` that are combined with eight ranks in two replicas.
WITH_REPLICAS: dict[str, dict[str, Any]] = {
    "bfloat16, columns": {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % 4 == 0 else None,
    },
    "accumulation on the CPU": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@pytest.mark.spec("NEW-05", "FS2-18")
@pytest.mark.parametrize("option", WITH_REPLICAS)
@ranks(8)
def test_with_replicas_a_number_reshards_each_replica_among_neighbours(option: str) -> None:
    mesh = init_device_mesh(device().type, (2, 4), mesh_dim_names=("replicate", "shard"))
    options = {"mesh": mesh, **WITH_REPLICAS[option]}
    model, usual = (
        apis.FULLY_SHARD.shard(modules.seeded(lambda: modules.Stack(8)), reshard_after_forward=n, **options)
        for n in (2, True)
    )
    first = dist.get_rank() // 2 * 2
    for step in range(2):
        for each in (model, usual):
            each.set_requires_gradient_sync("accumulation" not in option or step == 1)
        loss, expected = (each(running.batch(step, width=8)).square().mean() for each in (model, usual))
        assert model.blocks[1].linear.weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        with trace.record() as backward:
            loss.backward()
        expected.backward()
        assert {event.ranks for event in backward.events if event.kind == "AG"} == {(first, first + 1)}
    values.assert_same(apis.FULLY_SHARD.gradients(model), apis.FULLY_SHARD.gradients(usual), bitwise=True)
    assert apis.FULLY_SHARD.gradients(model).keys() == values.named(model).keys()
