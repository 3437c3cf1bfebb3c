"""Tests of the simulated machine: the order of a communicator, aborts, captures, threads, streams of a backward."""

from __future__ import annotations

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

from spec_tests.harness import device, rank_among_fake_ranks, simulated
from spec_tests.models.torch_names import reduce_scatter_single
from spec_tests.streams.simulation import WORLD, kinds, module, with_and_without_the_wait, zeros


def in_thread(function: Callable[[], Any]) -> Any:
    """Runs a function in a thread of its own, and returns its result or raises its exception."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result(timeout=30)


# ---- the order of a communicator ----


@pytest.mark.spec("SIM-12")
@rank_among_fake_ranks(2)
def test_order_of_communicator_hides_no_missing_wait() -> None:
    one, two, output = zeros(8), zeros(8), zeros(4)
    side = module().Stream()
    side.wait_stream(module().current_stream())
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
    side = module().Stream()
    side.wait_stream(module().current_stream())
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


@pytest.mark.spec("SIM-12")
@rank_among_fake_ranks(2)
def test_replay_of_collectives_does_not_use_the_order_of_their_communicator() -> None:
    x, output, side = zeros(8) + 1, zeros(4), module().Stream()
    side.wait_stream(module().current_stream())
    with simulated.Log() as log:
        dist.all_reduce(x)
        with module().stream(side):
            reduce_scatter_single(output, x)
    assert log.judge([output], 8).different
    assert kinds() == ["race"]


# ---- record_stream ----


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


@pytest.mark.spec("SIM-02")
@with_and_without_the_wait
@rank_among_fake_ranks(2)
def test_record_stream_covers_the_streams_that_the_recorded_one_waits_for(waits: bool) -> None:
    owner, reader = module().Stream(), module().Stream()
    with module().stream(owner):
        x = zeros(1024)
    reader.wait_stream(owner)
    with module().stream(reader):
        x.sum()
    if waits:
        module().current_stream().wait_stream(reader)
    x.record_stream(module().current_stream())
    del x
    with module().stream(owner):
        zeros(1024)
    assert kinds() == ([] if waits else ["reuse"])


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


@pytest.mark.spec("SIM-14")
@rank_among_fake_ranks(2)
def test_overwritten_output_of_a_lost_collective_is_valid() -> None:
    group: Any = dist.new_group([0, 1])
    x = zeros(8)
    group.lose_peers()
    dist.all_reduce(x, group=group)
    x.fill_(1)
    x.sum()
    assert kinds() == []


# ---- captures ----


def capture(call: Callable[[], Any], mode: str = "global") -> None:
    """Captures a graph while another thread makes a call."""
    with module().graph(module().CUDAGraph(), capture_error_mode=mode):
        zeros(4).add_(1)
        in_thread(call)


@pytest.mark.spec("SIM-15")
@pytest.mark.parametrize("thread", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
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
@pytest.mark.parametrize("call", CALLS)
@rank_among_fake_ranks(2)
def test_capturing_thread_must_not_ask_for_the_state_of_the_device(call: str) -> None:
    with pytest.raises(RuntimeError, match="previous error during capture"):  # noqa: SIM117
        with module().graph(module().CUDAGraph()):
            with pytest.raises(RuntimeError, match="not permitted"):
                CALLS[call]()
    CALLS[call]()


@pytest.mark.spec("SIM-15")
@rank_among_fake_ranks(2)
def test_capture_has_a_stream_of_its_own_and_records_its_operators() -> None:
    x, before = zeros(4), module().current_stream()
    with module().graph(module().CUDAGraph()):
        assert module().current_stream() != before
        x.add_(1)
    assert module().current_stream() == before
    x.sum()
    assert kinds() == ["race"]


# ---- threads ----


@pytest.mark.spec("SIM-16")
@with_and_without_the_wait
@rank_among_fake_ranks(2)
def test_each_thread_has_its_own_current_stream(waits: bool) -> None:
    x, side = zeros(8), module().Stream()
    side.wait_stream(module().current_stream())
    main = module().current_stream()

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
def test_each_thread_has_its_own_current_device() -> None:
    def work() -> int:
        before = module().current_device()
        module().set_device(1)
        return int(before)

    assert in_thread(work) == 0
    assert module().current_device() == 0


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


@pytest.mark.spec("SIM-17")
@with_and_without_the_wait
@rank_among_fake_ranks(2)
def test_backward_from_another_stream_orders_the_gradient_of_the_caller_only(waits: bool) -> None:
    main, side = module().current_stream(), module().Stream()
    weight = zeros(4).requires_grad_()
    y = (weight * 2).sum()
    side.wait_stream(main)
    with module().stream(side):
        y.backward()
        weight.grad.sum()
    assert kinds() == []
    if not waits:
        with module().stream(side):
            weight.grad.add_(1)
        weight.grad.sum()
        assert kinds() == ["race"]


@pytest.mark.spec("SIM-17")
@rank_among_fake_ranks(2)
def test_callback_of_the_engine_and_nested_backward_have_the_streams_of_their_callers() -> None:
    main, side = module().current_stream(), module().Stream()
    seen: list[Any] = []

    def nested(gradient: torch.Tensor) -> torch.Tensor:
        inner = zeros(2).requires_grad_()
        with torch.enable_grad():
            loss = (inner * 2).sum()
        inner.register_hook(lambda _: seen.append(("nested", module().current_stream())))
        other = module().Stream()
        with module().stream(other):
            loss.backward()
            seen.append(("kept", module().current_stream() == other))
        seen.append(("after", module().current_stream()))
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: seen.append(("callback", module().current_stream()))
        )
        return gradient

    x = zeros(4).requires_grad_()
    side.wait_stream(main)
    with module().stream(side):
        y = x * 2
        y.register_hook(nested)
        z = y * 3
    main.wait_stream(side)
    z.sum().backward()
    assert seen == [("nested", side), ("kept", True), ("after", side), ("callback", main)]
    assert module().current_stream() == main
    assert kinds() == []


@pytest.mark.spec("SIM-17")
@rank_among_fake_ranks(2)
def test_stream_without_a_node_is_not_kept() -> None:
    weight = zeros(4).requires_grad_()
    y = (weight * 2).sum()
    with module().stream(module().Stream()):
        pass
    y.backward()
    assert WORLD.backwards._changes() == ([], [])
