"""Rules for reusing memory that two streams use, and the rate limiter.

The memory of a flat unit is written on the all-gather stream and read on the compute stream. In the per-parameter
layout, this is true of the buffer of an all-gather. PyTorch's CUDA
allocator returns a block to the stream that allocated it *as soon as Python frees it*, even if the compute stream still
reads the block. Two mechanisms are needed:

* ``record_stream`` makes the allocator hold the block until the compute stream has passed this point. The CPU never
  waits, but it runs ahead: it can issue the all-gathers of ten units before the GPU has finished the first unit. Then
  the memory of all ten units is allocated at once.
* The *rate limiter* makes the CPU wait before it runs too far ahead::

      CPU    AG0 F0 FREE0   AG1 F1 FREE1   WAIT(FREE0) AG2 ...
      GPU        AG0 F0.......FREE0  AG1 F1.......FREE1

  Each reshard records an event. Before an all-gather, if two events are queued, the CPU waits for the older one. Hence
  at most two units are in flight, and the third reuses the memory of the first.

Why two? With one unit in flight, the all-gather could not overlap with the compute before it. With three units, one
more unit uses memory, and the step is no faster if the network is fast enough.

A tensor that is created in ``torch.inference_mode()`` never has a version counter, and autograd cannot save it. So
memory that stays for later calls is created `outside_inference_mode`, even if a program only evaluates at first.

On the CPU, memory is free when `release` returns, so the events are complete from the start and the limiter never
waits. The queue is still used, because tests put slow events in it to check the limiter.

*In torch:* ``_limiter_utils.py``, 32 lines. FSDP2 has no limiter; it holds references until an event.

Spec: LIM-01 to LIM-06.
"""

import functools
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from minifsdp.engine.comm_streams import current_stream
from minifsdp.engine.events import events

P = ParamSpec("P")
T = TypeVar("T")


def outside_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """A function that runs ``function`` without the inference mode of its caller. Grad mode stays off there."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call


# An event after the last use of some memory.
ReleaseEvent = torch.Event | torch.cpu.Event

DONE: ReleaseEvent = torch.cpu.Event()


def release(storage_owner: torch.Tensor) -> ReleaseEvent:
    """Frees the memory of ``storage_owner``, which the all-gather stream allocated and the compute stream read.

    The tensor and all its views remain; their common storage has 0 bytes afterwards. Returns the event that is complete
    when the compute stream no longer uses the memory.
    """
    event = DONE
    if storage_owner.device.type != "cpu":
        compute_stream = current_stream(storage_owner.device)
        # The allocator must not reuse the block before the compute stream has passed this point.
        storage_owner.record_stream(compute_stream)
        event = compute_stream.record_event()
    storage_owner.untyped_storage().resize_(0)
    return event


class RateLimiter:
    """Prevents the CPU from issuing all-gathers too far ahead of the GPU.

    Args:
        enabled: ``limit_all_gathers``; if ``False``, the limiter queues no events and never waits.
        num_in_flight: number of units that may be unsharded or still in use at once.
    """

    def __init__(self, enabled: bool, num_in_flight: int = 2) -> None:
        self.num_in_flight = num_in_flight
        # A complete event implies that earlier events of its stream are complete, so the oldest event can be dropped.
        # Without the limiter, the queue keeps no event.
        self._events: deque[ReleaseEvent] = deque(
            maxlen=num_in_flight if enabled else 0
        )

    def throttle(self, unit_name: str) -> None:
        """Called before an all-gather; blocks the CPU while too many units are in flight."""
        if len(self._events) < self.num_in_flight:
            return
        oldest = self._events.popleft()
        if oldest is DONE or oldest.query():
            return
        if events.recorder is not None:
            events.recorder.begin("WAIT", unit_name)
        oldest.synchronize()
        if events.recorder is not None:
            events.recorder.end("WAIT", unit_name)

    def released(self, event: ReleaseEvent) -> None:
        """Called after a reshard, with its event."""
        self._events.append(event)

    def clear(self) -> None:
        """Drops all events, after an error."""
        self._events.clear()
