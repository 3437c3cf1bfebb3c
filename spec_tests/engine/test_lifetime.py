"""The rate limiter with a simulated slow GPU: a release completes only when the CPU waits for it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifsdp.engine import lifetime
from minifsdp.engine.lifetime import RateLimiter
from spec_tests.engine.small import draw, shard_each, units_of
from spec_tests.harness import ranks
from spec_tests.models.modules import chain
from spec_tests.subject import trace


class SlowGPU:
    """A simulated GPU that lags behind the CPU: a unit that the CPU frees stays in use until the CPU waits for it."""

    def __init__(self) -> None:
        self.in_use = 0
        self.peak = 0
        self.pending: deque[SlowEvent] = deque()

    def all_gather(self) -> None:
        self.in_use += 1
        self.peak = max(self.peak, self.in_use)

    def free(self) -> SlowEvent:
        self.pending.append(SlowEvent(self))
        return self.pending[-1]


class SlowEvent:
    def __init__(self, gpu: SlowGPU) -> None:
        self.gpu, self.is_done, self.num_waits = gpu, False, 0

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.num_waits += 1
        # Earlier releases complete too, because they are on the same stream.
        while not self.is_done:
            earlier = self.gpu.pending.popleft()
            earlier.is_done = True
            self.gpu.in_use -= 1


def run_units(limiter: RateLimiter, gpu: SlowGPU, num_units: int) -> list[int]:
    """All-gathers and frees units one by one, as in forward. Returns the limiter's queue length after each step."""
    lengths = []
    for index in range(num_units):
        limiter.throttle(str(index))
        lengths.append(len(limiter))
        gpu.all_gather()
        limiter.released(gpu.free())
        lengths.append(len(limiter))
    return lengths


@pytest.mark.pure
@pytest.mark.spec("LIM-02")
@given(st.integers(1, 30))
def test_at_most_two_units_are_in_flight_and_at_most_two_releases_are_queued(num_units: int) -> None:
    limiter, gpu = RateLimiter(True), SlowGPU()
    lengths = run_units(limiter, gpu, num_units)
    assert gpu.peak == min(num_units, 2)
    assert max(lengths) <= 2


@pytest.mark.pure
@pytest.mark.spec("LIM-02")
def test_cpu_waits_only_for_the_oldest_release() -> None:
    limiter, gpu = RateLimiter(True), SlowGPU()
    events = []
    for index in range(2):
        limiter.throttle(str(index))
        gpu.all_gather()
        events.append(gpu.free())
        limiter.released(events[-1])
    limiter.throttle("2")
    assert [event.num_waits for event in events] == [1, 0]
    assert [event.is_done for event in events] == [True, False]


@pytest.mark.pure
@pytest.mark.spec("LIM-02")
def test_a_wait_is_not_recorded_if_the_release_was_complete_already() -> None:
    limiter, gpu = RateLimiter(True), SlowGPU()
    with trace.record() as recorder:
        for index in range(5):
            limiter.throttle(str(index))
            gpu.all_gather()
            event = gpu.free()
            event.synchronize()
            limiter.released(event)
            assert event.num_waits == 1
    assert recorder.events == []


@pytest.mark.pure
@pytest.mark.spec("LIM-02")
def test_cleared_limiter_does_not_wait_for_earlier_releases() -> None:
    limiter, gpu = RateLimiter(True), SlowGPU()
    run_units(limiter, gpu, 2)
    limiter.clear()
    assert len(limiter) == 0
    with trace.record() as recorder:
        limiter.throttle("next")
    assert recorder.events == []


@contextlib.contextmanager
def slow_releases(model: Any, gpu: SlowGPU) -> Iterator[None]:
    """Makes the engine use the slow GPU. The engine really releases memory, but the release completes late."""
    really_release = lifetime.release

    def slow_release(storage_owner: torch.Tensor) -> Any:
        really_release(storage_owner)
        return gpu.free()

    for unit in units_of(model):
        really_gather = unit.layout.all_gather

        def all_gather(comm_streams: Any, really_gather: Any = really_gather) -> Any:
            gpu.all_gather()
            return really_gather(comm_streams)

        unit.layout.all_gather = all_gather  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lifetime, "release", slow_release)
        yield


@pytest.mark.spec("LIM-02", "LIM-03", "LIM-06")
@pytest.mark.parametrize("limit", [True, False])
@ranks(2)
def test_limiter_keeps_two_units_in_flight_and_without_limiter_the_cpu_runs_ahead(limit: bool) -> None:
    gpu = SlowGPU()
    model = shard_each(chain(6), limit_all_gathers=limit)
    with slow_releases(model, gpu), trace.record() as recorder, torch.no_grad():
        model(draw(0))
    assert model._root_state is not None
    assert gpu.peak == (2 if limit else 6)
    assert recorder.order("WAIT") == (["WAIT 2", "WAIT 3", "WAIT 4", "WAIT 5"] if limit else [])
    assert len(model._root_state.limiter) <= 2


@pytest.mark.spec("LIM-02")
@ranks(2)
def test_each_wait_comes_right_before_delayed_all_gather() -> None:
    gpu = SlowGPU()
    model = shard_each(chain(4))
    with slow_releases(model, gpu), trace.record() as recorder:
        model(draw(0)).sum().backward()
    order = recorder.order("WAIT", "AG")
    waits = [index for index, word in enumerate(order) if word.startswith("WAIT")]
    assert waits
    for index in waits:
        assert order[index + 1] == order[index].replace("WAIT", "AG")
