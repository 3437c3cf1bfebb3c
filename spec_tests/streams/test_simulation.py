"""Tests of the simulated device: small programs with known races.

Nearly every program runs twice, with and without the one wait that it needs. A checker that always reports a race, or
never does, fails half of them.
"""

from __future__ import annotations

import copy
import io
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.harness import device, rank_among_fake_ranks, ranks, simulated
from spec_tests.models.torch_names import all_gather_single, reduce_scatter_single

WORLD = simulated.WORLD
with_and_without_the_wait = pytest.mark.parametrize("waits", [True, False], ids=["waits", "does not wait"])


def kinds() -> list[str]:
    """The kinds of the races so far. Clears the races, so that they do not fail the test."""
    found = [race.kind for race in WORLD.races.values()]
    WORLD.races.clear()
    return found


def module() -> Any:
    return torch.get_device_module(device())


def waiting_stream() -> Any:
    """A new stream that has waited for the current one."""
    side = module().Stream()
    side.wait_stream(module().current_stream())
    return side


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, device=device(), dtype=dtype)


# ---- streams, events and the report ----


@pytest.mark.spec("SIM-01", "SIM-03")
@with_and_without_the_wait
@rank_among_fake_ranks(2)
def test_read_on_other_stream_needs_event(waits: bool) -> None:
    x = zeros(8)
    side = waiting_stream()
    with module().stream(side):
        x.add_(1)
    if waits:
        module().current_stream().wait_event(side.record_event())
    x.sum()
    assert kinds() == ([] if waits else ["race"])


@pytest.mark.spec("SIM-03")
@rank_among_fake_ranks(2)
def test_streams_may_touch_different_bytes_of_one_allocation() -> None:
    x = zeros(8)
    side = waiting_stream()
    with module().stream(side):
        x[:4].add_(1)
    x[4:].sum()
    assert kinds() == []
    x[3:].sum()
    assert kinds() == ["race"]


@pytest.mark.spec("SIM-01")
@rank_among_fake_ranks(2)
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


# ---- memory ----


@pytest.mark.spec("SIM-02")
@pytest.mark.parametrize("way", ["not at all", "record_stream", "waits", "keeps it"])
@rank_among_fake_ranks(2)
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
@pytest.mark.parametrize("recorded", [True, False], ids=["record_stream", "waits"])
@rank_among_fake_ranks(2)
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


@pytest.mark.spec("SIM-13")
@pytest.mark.parametrize("is_part", [False, True], ids=["view of a storage", "part of a storage"])
@rank_among_fake_ranks(2)
def test_record_stream_has_no_effect_on_a_part_of_a_storage(is_part: bool) -> None:
    side = module().Stream()
    with module().stream(side):
        whole = zeros(1024)
        part = whole[512:]
        if is_part:
            part = torch.empty(0, device=device()).set_(whole.untyped_storage()[2048:4096])
    module().current_stream().wait_stream(side)
    part.sum()
    part.record_stream(module().current_stream())
    del whole, part
    with module().stream(side):
        zeros(1024)
    assert kinds() == (["reuse"] if is_part else [])


# ---- the host ----


@pytest.mark.spec("SIM-02")
@with_and_without_the_wait
@rank_among_fake_ranks(2)
def test_cpu_must_not_read_pinned_memory_before_its_copy_ends(waits: bool) -> None:
    here = torch.zeros(8).pin_memory()
    here.copy_(zeros(8), non_blocking=True)
    if waits:
        module().synchronize()
    here.sum()
    assert kinds() == ([] if waits else ["race"])


@pytest.mark.spec("SIM-02")
@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "pageable"])
@rank_among_fake_ranks(2)
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
@rank_among_fake_ranks(2)
def test_stops_of_the_cpu_are_counted() -> None:
    for name, (call, num_stops) in STOPS.items():
        WORLD.stops.clear()
        call(zeros(8))
        assert sum(WORLD.stops.values()) == num_stops, name


# ---- operations that the device refuses ----


@pytest.mark.spec("SIM-08")
@rank_among_fake_ranks(2)
def test_the_device_does_not_compute_with_memory_of_the_cpu() -> None:
    with pytest.raises(RuntimeError, match="sim:0 and cpu"):
        zeros(3) + torch.zeros(3)
    with pytest.raises(RuntimeError, match="sim:0 and cpu"):
        torch.zeros(3).add_(zeros(3))
    assert torch.equal((zeros(3) + torch.tensor(1.0)).cpu(), torch.ones(3)), "a single number needs no memory"
    zeros(3).copy_(torch.ones(3))


@pytest.mark.spec("SIM-08")
@rank_among_fake_ranks(2)
def test_tensors_of_two_devices_do_not_mix_and_a_third_device_does_not_exist() -> None:
    with pytest.raises(RuntimeError, match="sim:0 and sim:1"):
        zeros(3) + torch.zeros(3, device="sim:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.zeros(3, device="sim:2")
    with pytest.raises(RuntimeError, match="invalid device ordinal 7"):
        module().set_device(7)


@pytest.mark.spec("SIM-08")
@rank_among_fake_ranks(2)
def test_a_strict_device_raises_where_the_cpu_reads_too_early() -> None:
    here = torch.zeros(8).pin_memory()
    with WORLD.strict():
        here.copy_(zeros(8), non_blocking=True)
        with pytest.raises(simulated.SimulatedRaceError, match="the CPU never waited"):
            here.sum()
    assert kinds() == ["race"]


# ---- collectives ----


@pytest.mark.spec("SIM-04")
@rank_among_fake_ranks(2)
def test_a_synchronous_collective_runs_on_the_current_stream_and_returns_nothing() -> None:
    local_shard, whole = zeros(4), zeros(8)
    assert all_gather_single(whole, local_shard) is None
    whole.sum()
    assert kinds() == []
    with module().stream(waiting_stream()):
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


@pytest.mark.spec("SIM-12")
@rank_among_fake_ranks(2)
def test_order_of_communicator_hides_no_missing_wait() -> None:
    one, two, output = zeros(8), zeros(8), zeros(4)
    side = waiting_stream()
    dist.all_reduce(one)
    with module().stream(side):
        reduce_scatter_single(output, two)
        # NCCL runs it after the all-reduce of the other stream, but the program does not wait for that.
        dist.all_reduce(one)
    assert set(kinds()) == {"race"}


@pytest.mark.spec("SIM-12")
@pytest.mark.parametrize("is_same_group", [True, False], ids=["one group", "two groups"])
@rank_among_fake_ranks(2)
def test_collectives_of_one_communicator_do_not_overlap(is_same_group: bool) -> None:
    other_group = dist.group.WORLD if is_same_group else dist.new_group([0, 1])
    x, one, two, output = zeros(8), zeros(8), zeros(8), zeros(4)
    side = waiting_stream()
    with simulated.Log() as log:
        x.add_(1)
        dist.all_reduce(one)
        with module().stream(side):
            reduce_scatter_single(output, two, group=other_group)
            two.mul_(2)
    add, first, second, multiply = log.operations
    order = simulated.IssueOrder(log.operations)
    assert [operation.name for operation in (add, multiply)] == ["add_", "mul_"]
    for earlier, later in ((first, second), (first, multiply), (add, second), (add, multiply)):
        assert earlier.may_overlap(later), "the streams have no order"
        assert order.may_overlap(earlier, later) is not is_same_group
        assert order.is_before(earlier, later) is is_same_group
        assert not order.is_before(later, earlier)
    assert order.is_before(second, multiply)


# ---- collectives that cannot complete ----


@pytest.mark.spec("SIM-14")
@rank_among_fake_ranks(2)
def test_abort_from_another_thread_ends_the_wait_and_leaves_garbage() -> None:
    group: Any = dist.new_group([0, 1])
    x = zeros(8)
    group.lose_peers()
    dist.all_reduce(x, group=group)
    event = module().current_stream().record_event()
    aborts: list[float] = []

    def abort() -> None:
        assert not event.query()
        time.sleep(0.3)
        aborts.append(time.monotonic())
        group.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    event.synchronize()
    assert aborts
    assert aborts[0] <= time.monotonic()
    thread.join()
    assert event.query()
    assert kinds() == [], "nothing has read the output"
    assert x.isnan().all()
    found = [str(race) for race in WORLD.races.values()]
    assert kinds() == ["garbage"]
    assert "isnan" in found[0] or "ne" in found[0]
    assert "has the output of allreduce" in found[0]
    with pytest.raises(dist.DistBackendError, match="aborted"):
        dist.all_reduce(x, group=group)


@pytest.mark.spec("SIM-14")
@rank_among_fake_ranks(2)
def test_time_out_ends_the_wait_for_a_collective_with_an_error() -> None:
    group: Any = dist.new_group([0, 1])
    group.set_timeout(timedelta(seconds=0.3))
    group.lose_peers()
    x, other = zeros(8), zeros(8)
    side = module().Stream()
    dist.all_reduce(x, group=group, async_op=True)
    side.synchronize()
    other.sum().item()
    with pytest.raises(RuntimeError, match=r"within the time-out of 0.3 s"):
        module().synchronize()
    with pytest.raises(dist.DistBackendError, match="aborted"):
        dist.all_reduce(other, group=group)


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


# ---- captures and threads ----


def in_thread(function: Callable[[], Any]) -> Any:
    """Runs a function in a thread of its own, and returns its result or raises its exception."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result(timeout=30)


def capture(call: Callable[[], Any], mode: str = "global") -> None:
    """Captures a graph while another thread makes a call."""
    with module().graph(module().CUDAGraph(), capture_error_mode=mode):
        zeros(4).add_(1)
        in_thread(call)


@pytest.mark.spec("SIM-15")
@pytest.mark.parametrize(
    ("mode", "thread"), [("global", "global"), ("global", "relaxed"), ("thread_local", "global"), ("relaxed", "global")]
)
@rank_among_fake_ranks(2)
def test_query_of_another_thread_invalidates_a_capture_in_mode_global(mode: str, thread: str) -> None:
    event = module().current_stream().record_event()
    errors: list[str] = []

    def query() -> None:
        assert module().exchange_capture_mode(thread) == "global"
        try:
            event.query()
        except RuntimeError as error:
            errors.append(str(error))

    if mode == thread == "global":
        with pytest.raises(RuntimeError, match=r"previous error during capture: event\.query"):
            capture(query, mode)
        assert errors == ["operation not permitted when stream is capturing: event.query"]
    else:
        capture(query, mode)
        assert errors == []


CALLS: dict[str, Callable[[], Any]] = {
    "event.query": lambda: module().current_stream().record_event().query(),
    "event.synchronize": lambda: module().current_stream().record_event().synchronize(),
    "stream.query": lambda: module().current_stream().query(),
    "stream.synchronize": lambda: module().current_stream().synchronize(),
    "device.synchronize": lambda: module().synchronize(),
    "item": lambda: zeros(1).item(),
}


@pytest.mark.spec("SIM-15")
@rank_among_fake_ranks(2)
def test_capturing_thread_must_not_ask_for_the_state_of_the_device() -> None:
    for call in CALLS.values():
        with pytest.raises(RuntimeError, match="previous error during capture"):  # noqa: SIM117
            with module().graph(module().CUDAGraph()):
                with pytest.raises(RuntimeError, match="not permitted"):
                    call()
        call()


@pytest.mark.spec("SIM-16")
@with_and_without_the_wait
@rank_among_fake_ranks(2)
def test_each_thread_has_its_own_current_stream(waits: bool) -> None:
    x = zeros(8)
    main, side = module().current_stream(), waiting_stream()

    def work() -> Any:
        assert module().current_stream() == module().default_stream()
        module().set_stream(side)
        x.add_(1)
        return side.record_event()

    event = in_thread(work)
    assert module().current_stream() == main
    if waits:
        main.wait_event(event)
    x.sum()
    assert kinds() == ([] if waits else ["race"])


@pytest.mark.spec("SIM-16")
@rank_among_fake_ranks(2)
def test_threads_lose_no_operation_and_free_all_memory() -> None:
    before, interval, stream = module().memory_allocated(), sys.getswitchinterval(), module().default_stream()
    num_before = stream.clock.get(stream.number, 0)

    def work() -> None:
        other = module().Stream()
        for _ in range(100):
            x = torch.empty(16, device=device())
            x.fill_(1)
            x.record_stream(other)
            other.wait_stream(stream)
            stream.record_event().query()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as executor:
            for future in [executor.submit(work) for _ in range(4)]:
                future.result(timeout=60)
    finally:
        sys.setswitchinterval(interval)
    assert stream.clock[stream.number] - num_before == 400
    assert module().memory_allocated() == before
    assert kinds() == []


# ---- streams of a backward ----


def streams_of_backward(*tensors: torch.Tensor) -> list[Any]:
    """The streams that are current while hooks of the tensors run, in the order of the hooks."""
    seen: list[Any] = []
    for tensor in tensors:
        tensor.register_hook(lambda _: seen.append(module().current_stream()))
    return seen


@pytest.mark.spec("SIM-17")
@rank_among_fake_ranks(2)
def test_each_node_runs_on_the_stream_of_its_forward() -> None:
    main, side = module().current_stream(), module().Stream()
    x = zeros(4).requires_grad_()
    a = x * 2
    side.wait_stream(main)
    with module().stream(side):
        b = a * 3
        c = b * 4
    main.wait_stream(side)
    d = c * 5
    seen = streams_of_backward(x, a, b, c, d)
    x.register_post_accumulate_grad_hook(lambda _: seen.append(module().current_stream()))
    d.sum().backward()
    assert seen == [main, side, side, main, main, main]
    assert torch.equal(x.grad.cpu(), torch.full((4,), 120.0))
    assert kinds() == []


@pytest.mark.spec("SIM-17")
@pytest.mark.parametrize("reads_on", ["main", "side"])
@rank_among_fake_ranks(2)
def test_parameter_accumulates_on_the_stream_of_its_first_use(reads_on: str) -> None:
    main, side = module().current_stream(), module().Stream()
    weight, x = zeros(4).requires_grad_(), zeros(4)
    events: list[Any] = []
    weight.register_post_accumulate_grad_hook(lambda _: events.append(module().current_stream()))
    side.wait_stream(main)
    with module().stream(side):
        y = x * weight
    main.wait_stream(side)
    y.sum().backward()
    assert events == [side]
    if reads_on == "main":
        # The engine has made the stream of the caller wait.
        weight.grad.sum()
        assert kinds() == []
    else:
        with module().stream(module().Stream()):
            weight.grad.sum()
        assert kinds() == ["race"]


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
    with pytest.raises(RuntimeError, match="device"):
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
