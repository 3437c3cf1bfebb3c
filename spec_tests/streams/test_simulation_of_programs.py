"""Tests of the simulated device: collectives, replays in other orders, and behavior like a device of torch."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.harness import device, rank_among_fake_ranks, ranks, simulated
from spec_tests.models.torch_names import all_gather_single, reduce_scatter_single
from spec_tests.streams.simulation import WORLD, kinds, module, with_and_without_the_wait, zeros

# ---- collectives ----


@pytest.mark.spec("SIM-04")
@rank_among_fake_ranks(2)
def test_a_synchronous_collective_runs_on_the_current_stream_and_returns_nothing() -> None:
    local_shard, whole, side = zeros(4), zeros(8), module().Stream()
    assert all_gather_single(whole, local_shard) is None
    whole.sum()
    assert kinds() == []
    side.wait_stream(module().current_stream())
    with module().stream(side):
        all_gather_single(whole, local_shard)
    whole.sum()
    assert kinds() == ["race"]
    assert not WORLD.stops


@pytest.mark.spec("SIM-04")
@with_and_without_the_wait
@rank_among_fake_ranks(2)
def test_an_asynchronous_collective_is_waited_for_by_the_stream_that_calls_wait(waits: bool) -> None:
    whole = zeros(8)
    work = dist.all_reduce(whole, async_op=True)
    assert not work.is_completed()
    if waits:
        work.wait()
    whole.sum()
    assert kinds() == ([] if waits else ["race"])
    assert not WORLD.stops, "the CPU continues"


@pytest.mark.spec("SIM-04")
@rank_among_fake_ranks(2)
def test_group_keeps_tensors_of_asynchronous_collectives() -> None:
    work = dist.all_reduce(zeros(1024), async_op=True)
    zeros(1024)
    assert kinds() == []
    work.wait()
    assert work not in dist.group.WORLD.kept


@pytest.mark.spec("SIM-04")
@rank_among_fake_ranks(4)
def test_a_collective_of_an_accelerators_group_refuses_memory_of_the_cpu() -> None:
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.zeros(3))


@pytest.mark.simulated
@pytest.mark.spec("SIM-04")
@pytest.mark.parametrize("async_op", [False, True])
@ranks(2)
def test_real_ranks_exchange_real_values(async_op: bool) -> None:
    rank = dist.get_rank()
    whole = zeros(4)
    work = all_gather_single(whole, torch.tensor([1.0, 2.0], device=device()) + rank, async_op=async_op)
    if work is not None:
        work.wait()
    assert whole.tolist() == [1, 2, 2, 3]
    mean = torch.tensor([2.0 * rank, 4.0, 6.0, 8.0], device=device())
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.tolist() == [1, 4, 6, 8]
    local_shard = zeros(2)
    reduce_scatter_single(local_shard, mean)
    assert local_shard.tolist() == ([2, 8] if rank == 0 else [12, 16])
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.barrier()


# ---- replay ----


@pytest.mark.spec("SIM-05")
@with_and_without_the_wait
@rank_among_fake_ranks(2)
def test_other_schedules_give_the_same_bits_only_without_a_race(waits: bool) -> None:
    x, side = torch.ones(8, device=device()), module().Stream()
    with simulated.Log() as log:
        side.wait_stream(module().current_stream())
        with module().stream(side):
            x.add_(1)
        if waits:
            module().current_stream().wait_stream(side)
        x.mul_(3)
    verdict = log.judge([x], num_schedules=8)
    assert bool(verdict.different) is not waits
    assert bool(kinds()) is not waits


@pytest.mark.spec("SIM-05")
@pytest.mark.parametrize("recorded", [True, False], ids=["record_stream", "not at all"])
@rank_among_fake_ranks(2)
def test_replay_reuses_memory_as_early_as_possible(recorded: bool) -> None:
    side, total = module().Stream(), zeros(1024)
    with simulated.Log() as log:
        for number in range(2):
            with module().stream(side):
                x = torch.full((1024,), float(number + 1), device=device())
            module().current_stream().wait_stream(side)
            total.add_(x)
            if recorded:
                x.record_stream(module().current_stream())
            del x
    verdict = log.judge([total], num_schedules=8)
    assert bool(verdict.different) is not recorded
    assert bool(kinds()) is not recorded


@pytest.mark.spec("SIM-05")
@rank_among_fake_ranks(4)
def test_replay_repeats_collectives_and_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(device())
    total = zeros(4)
    with simulated.Log() as log:
        for _ in range(3):
            y = model(torch.randn(2, 4, device=device())).sum(0)
            dist.all_reduce(y)
            total.add_(y.detach())
    assert log.judge([total], num_schedules=4).different == []
    assert total.abs().sum().item() > 0


@pytest.mark.spec("SIM-05")
@rank_among_fake_ranks(2)
def test_log_shows_possible_overlap_of_operations() -> None:
    side, x, y = module().Stream(), zeros(8), zeros(8)
    with simulated.Log() as log:
        side.wait_stream(module().current_stream())
        with module().stream(side):
            x.add_(1)
        y.mul_(2)
        module().current_stream().wait_stream(side)
        y.sub_(x)
    add, multiply, subtract = log.operations
    assert [o.name for o in log.operations] == ["add_", "mul_", "sub_"]
    assert add.may_overlap(multiply)
    assert add.is_before(subtract)
    assert not add.may_overlap(subtract)


# ---- like a device of torch ----


@pytest.mark.spec("SIM-01")
@rank_among_fake_ranks(2)
def test_a_model_moves_in_place_and_back_as_between_the_cpu_and_cuda() -> None:
    model = nn.Linear(2, 2)
    weight = model.weight
    model.to(device())
    assert model.weight is weight
    assert weight.device == device()
    assert isinstance(weight, nn.Parameter)
    weight.data = weight.data.cpu()
    assert type(weight) is nn.Parameter
    # A gradient on the other device can be kept there, as FSDP does with offloading.
    gradient = zeros(2, 2)
    data, weight.data = weight.data, gradient
    weight.grad = gradient
    weight.data = data
    assert weight.device.type == "cpu"
    assert weight.grad is gradient
    weight.grad = None
    assert weight.grad is None
    with pytest.raises(RuntimeError):
        weight.grad = gradient


@pytest.mark.spec("SIM-01")
@rank_among_fake_ranks(2)
def test_tensors_of_the_device_are_saved_loaded_and_copied() -> None:
    model = nn.Linear(2, 2).to(device())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for location in (None, "cpu"):
        file.seek(0)
        loaded = torch.load(file, map_location=location)
        assert loaded["weight"].device == (device() if location is None else torch.device("cpu"))
        assert torch.equal(loaded["weight"].cpu(), model.weight.detach().cpu())
    twin = copy.deepcopy(model)
    assert isinstance(twin.weight, nn.Parameter)
    assert twin.weight.device == device()
    assert twin.weight.data_ptr() != model.weight.data_ptr()


@pytest.mark.spec("SIM-01")
@rank_among_fake_ranks(2)
def test_in_place_reshape_changes_original_tensor() -> None:
    x = zeros(2, 3)
    assert x.t_().shape == (3, 2)
    assert x.resize_(4).shape == (4,)
    assert x.resize_(1000).untyped_storage().nbytes() == 4000
    x.fill_(1)
    assert kinds() == []
