"""Tests of the simulated device: small programs with known races.

Nearly every program runs twice, with and without the one wait that it needs. A checker that always reports a race, or
never does, fails half of them.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.harness import device, rank_among_invented, ranks, simulated

WORLD = simulated.WORLD


def kinds() -> list[str]:
    """The kinds of the races so far. Clears the races, so that they do not fail the test."""
    found = [race.kind for race in WORLD.races.values()]
    WORLD.races.clear()
    return found


def module() -> Any:
    return torch.get_device_module(device())


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, device=device(), dtype=dtype)


with_and_without_the_wait = pytest.mark.parametrize("waits", [True, False], ids=["waits", "does not wait"])

# ---- streams and events ----


@pytest.mark.spec("SIM-01", "SIM-03")
@with_and_without_the_wait
@rank_among_invented(2)
def test_read_on_other_stream_needs_event(waits: bool) -> None:
    x, side = zeros(8), module().Stream()
    side.wait_stream(module().current_stream())
    with module().stream(side):
        x.add_(1)
    if waits:
        module().current_stream().wait_event(side.record_event())
    x.sum()
    assert kinds() == ([] if waits else ["race"])


@pytest.mark.spec("SIM-01")
@rank_among_invented(2)
def test_early_event_does_not_cover_later_work() -> None:
    x, side = zeros(8), module().Stream()
    side.wait_stream(module().current_stream())
    event = side.record_event()
    with module().stream(side):
        x.add_(1)
    event.wait()
    x.sum()
    assert kinds() == ["race"]


@pytest.mark.spec("SIM-01")
@rank_among_invented(2)
def test_synchronize_orders_stream_before_cpu() -> None:
    x, side = zeros(8), module().Stream()
    side.wait_stream(module().current_stream())
    with module().stream(side):
        x.add_(1)
    side.synchronize()
    x.sum()
    assert kinds() == []
    assert [reason for reason, _ in WORLD.stops] == ["stream.synchronize"]


@pytest.mark.spec("SIM-03")
@rank_among_invented(2)
def test_streams_may_touch_different_bytes_of_one_allocation() -> None:
    x, side = zeros(8), module().Stream()
    side.wait_stream(module().current_stream())
    with module().stream(side):
        x[:4].add_(1)
    x[4:].sum()
    assert kinds() == []
    x[3:].sum()
    assert kinds() == ["race"]


@pytest.mark.spec("SIM-03")
@rank_among_invented(2)
def test_two_readers_do_not_collide() -> None:
    x, side = zeros(8), module().Stream()
    side.wait_stream(module().current_stream())
    with module().stream(side):
        x.sum()
    x.sum()
    assert kinds() == []


@pytest.mark.spec("SIM-03")
@rank_among_invented(2)
def test_a_report_names_both_operators_both_streams_and_the_wait_that_is_missing() -> None:
    x, side = zeros(8), module().Stream()
    side.name = "gather stream"
    side.wait_stream(module().current_stream())
    with module().stream(side):
        x.add_(1)
    x.mul_(2)
    (race,) = WORLD.races.values()
    WORLD.races.clear()
    first, second, third = str(race).splitlines()
    assert first == "RACE: write of bytes 0 to 32 on the compute stream by mul_ [the user's program]"
    assert second == "  is not ordered after write of bytes 0 to 32 on the gather stream by add_ [the user's program]"
    assert third == "  missing: the compute stream has never waited for the gather stream"


@pytest.mark.spec("SIM-01")
@rank_among_invented(2)
def test_backward_runs_on_a_thread_of_its_own_and_on_the_default_stream() -> None:
    x = zeros(4).requires_grad_()
    seen = []
    x.register_hook(lambda gradient: seen.append(module().current_stream()))
    (x * 2).sum().backward()
    assert seen == [module().default_stream()]
    assert torch.equal(x.grad.cpu(), torch.full((4,), 2.0))
    assert kinds() == []


# ---- memory ----


@pytest.mark.spec("SIM-02")
@pytest.mark.parametrize("way", ["not at all", "record_stream", "waits", "keeps it"])
@rank_among_invented(2)
def test_memory_returns_to_its_stream_unless_recorded(way: str) -> None:
    side = module().Stream()
    with module().stream(side):
        x = zeros(1024)
    module().current_stream().wait_stream(side)
    x.sum()
    if way == "record_stream":
        x.record_stream(module().current_stream())
    kept = [x] if way == "keeps it" else []
    del x
    if way == "waits":
        side.wait_stream(module().current_stream())
    with module().stream(side):
        zeros(1024)
    assert kinds() == (["reuse"] if way == "not at all" else [])
    del kept


@pytest.mark.spec("SIM-02")
@rank_among_invented(2)
def test_access_to_resized_storage_is_reported() -> None:
    x = zeros(8)
    x.untyped_storage().resize_(0)
    assert module().memory_allocated() == 0
    x.untyped_storage().resize_(32)
    x.fill_(1)
    assert kinds() == []
    assert module().memory_allocated() == 32
    x.untyped_storage().resize_(0)
    WORLD.memory.access(x._home, simulated.Access(1, 1, 0, 4, False, "read", ""), {})
    assert kinds() == ["freed"]


@pytest.mark.spec("SIM-02")
@pytest.mark.parametrize("recorded", [True, False], ids=["record_stream", "waits"])
@rank_among_invented(2)
def test_record_stream_delays_memory_reuse(recorded: bool) -> None:
    side = module().Stream()
    module().reset_peak_memory_stats()
    for _ in range(3):
        with module().stream(side):
            x = zeros(1024)
        module().current_stream().wait_stream(side)
        x.sum()
        if recorded:
            x.record_stream(module().current_stream())
        del x
        side.wait_stream(module().current_stream())
    assert module().max_memory_allocated() == 4096 * (3 if recorded else 1) + 4
    assert kinds() == []


@pytest.mark.spec("SIM-02")
@rank_among_invented(2)
def test_tensor_memory_counts_until_last_view_ends() -> None:
    x = zeros(1024)
    view = x[:10].view(2, 5)
    del x
    assert module().memory_allocated() == 4096
    del view
    assert module().memory_allocated() == 0


# ---- the host ----


@pytest.mark.spec("SIM-02")
@with_and_without_the_wait
@rank_among_invented(2)
def test_cpu_must_not_read_pinned_memory_before_its_copy_ends(waits: bool) -> None:
    here = torch.zeros(8).pin_memory()
    here.copy_(zeros(8), non_blocking=True)
    if waits:
        module().synchronize()
    here.sum()
    assert kinds() == ([] if waits else ["race"])


@pytest.mark.spec("SIM-02")
@rank_among_invented(2)
def test_non_blocking_copy_to_the_cpu_has_pinned_memory() -> None:
    here = zeros(8).to("cpu", non_blocking=True)
    assert here.is_pinned()
    assert not WORLD.stops
    here.sum()
    assert kinds() == ["race"]


@pytest.mark.spec("SIM-02")
@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "pageable"])
@rank_among_invented(2)
def test_a_batch_in_pinned_memory_must_not_be_overwritten_while_it_is_copied(is_pinned: bool) -> None:
    batch = torch.ones(8).pin_memory() if is_pinned else torch.ones(8)
    batch.to(device(), non_blocking=True)
    batch.zero_()
    assert kinds() == (["race"] if is_pinned else [])


STOPS: dict[str, tuple[Callable[[torch.Tensor], Any], int]] = {
    "item": (lambda x: x.sum().item(), 1),
    "tolist": (lambda x: x.tolist(), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "equal": (lambda x: torch.equal(x, x), 1),
    "to the device": (lambda x: torch.ones(8).to(x.device), 1),
    "to the device, non-blocking": (lambda x: torch.ones(8).to(x.device, non_blocking=True), 0),
    "add": (lambda x: x + 1, 0),
}


@pytest.mark.spec("SIM-02")
@pytest.mark.parametrize("what", STOPS)
@rank_among_invented(2)
def test_stops_of_the_cpu_are_counted(what: str) -> None:
    does, num_stops = STOPS[what]
    does(zeros(8))
    assert sum(WORLD.stops.values()) == num_stops


# ---- operations that the device refuses ----


@pytest.mark.spec("SIM-08")
@rank_among_invented(2)
def test_the_device_does_not_compute_with_memory_of_the_cpu() -> None:
    with pytest.raises(RuntimeError, match="sim:0 and cpu"):
        zeros(3) + torch.zeros(3)
    with pytest.raises(RuntimeError, match="sim:0 and cpu"):
        torch.zeros(3).add_(zeros(3))
    assert torch.equal((zeros(3) + torch.tensor(1.0)).cpu(), torch.ones(3)), "a single number is no memory"
    zeros(3).copy_(torch.ones(3))


@pytest.mark.spec("SIM-08")
@rank_among_invented(2)
def test_tensors_of_two_devices_do_not_mix_and_a_third_device_does_not_exist() -> None:
    with pytest.raises(RuntimeError, match="sim:0 and sim:1"):
        zeros(3) + torch.zeros(3, device="sim:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.zeros(3, device="sim:2")
    with pytest.raises(RuntimeError, match="invalid device ordinal 7"):
        module().set_device(7)


@pytest.mark.spec("SIM-08")
@rank_among_invented(2)
def test_a_strict_device_raises_where_the_cpu_reads_too_early() -> None:
    here = torch.zeros(8).pin_memory()
    with WORLD.strict():
        here.copy_(zeros(8), non_blocking=True)
        with pytest.raises(simulated.SimulatedRaceError, match="the CPU never waited"):
            here.sum()
    assert kinds() == ["race"]


@pytest.mark.spec("SIM-08")
@rank_among_invented(2)
def test_a_strict_device_has_one_queue() -> None:
    x = zeros(8)
    with WORLD.strict():
        side = module().Stream()
        with module().stream(side):
            x.add_(1)
        x.sum()
    assert kinds() == []


@pytest.mark.spec("SIM-01")
@rank_among_invented(2)
def test_the_current_stream_is_one_of_the_current_device_unless_a_device_is_named() -> None:
    module().set_device(1)
    assert module().current_stream().device == torch.device("sim", 1)
    assert module().current_stream(device()).device == device()
    x, side = zeros(8), module().Stream(device=device())
    with module().stream(side):
        x.add_(1)
    # A wait on the wrong stream: the current stream of another device.
    module().current_stream().wait_event(side.record_event())
    x.sum()
    assert "race" in kinds()


# ---- collectives ----


@pytest.mark.spec("SIM-04")
@rank_among_invented(2)
def test_a_synchronous_collective_runs_on_the_current_stream_and_returns_nothing() -> None:
    local_shard, whole, side = zeros(4), zeros(8), module().Stream()
    assert dist.all_gather_single(whole, local_shard) is None
    whole.sum()
    assert kinds() == []
    side.wait_stream(module().current_stream())
    with module().stream(side):
        dist.all_gather_single(whole, local_shard)
    whole.sum()
    assert kinds() == ["race"]
    assert not WORLD.stops


@pytest.mark.spec("SIM-04")
@with_and_without_the_wait
@rank_among_invented(2)
def test_an_asynchronous_collective_is_waited_for_by_the_stream_that_calls_wait(waits: bool) -> None:
    whole = zeros(8)
    work = dist.all_reduce(whole, async_op=True)
    assert not work.is_completed()
    if waits:
        work.wait()
    whole.sum()
    assert kinds() == ([] if waits else ["race"])
    assert not WORLD.stops, "the CPU goes on"


@pytest.mark.spec("SIM-04")
@rank_among_invented(2)
def test_group_keeps_tensors_of_asynchronous_collectives() -> None:
    work = dist.all_reduce(zeros(1024), async_op=True)
    zeros(1024)
    assert kinds() == []
    work.wait()
    assert work not in dist.group.WORLD.kept


@pytest.mark.spec("SIM-04")
@rank_among_invented(4)
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
    work = dist.all_gather_single(whole, torch.tensor([1.0, 2.0], device=device()) + rank, async_op=async_op)
    if work is not None:
        work.wait()
    assert whole.tolist() == [1, 2, 2, 3]
    mean = torch.tensor([2.0 * rank, 4.0, 6.0, 8.0], device=device())
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.tolist() == [1, 4, 6, 8]
    local_shard = zeros(2)
    dist.reduce_scatter_single(local_shard, mean)
    assert local_shard.tolist() == ([2, 8] if rank == 0 else [12, 16])
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.barrier()


# ---- replay ----


@pytest.mark.spec("SIM-05")
@with_and_without_the_wait
@rank_among_invented(2)
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
@rank_among_invented(2)
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
@rank_among_invented(4)
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
@rank_among_invented(2)
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
@rank_among_invented(2)
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
@rank_among_invented(2)
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
@rank_among_invented(2)
def test_in_place_reshape_changes_original_tensor() -> None:
    x = zeros(2, 3)
    assert x.t_().shape == (3, 2)
    assert x.resize_(4).shape == (4,)
    assert x.resize_(1000).untyped_storage().nbytes() == 4000
    x.fill_(1)
    assert kinds() == []
