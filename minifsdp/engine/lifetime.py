"""When memory that crossed lanes may be reused, and the rate limiter.

The memory of a gathered unit is written on the gather lane and read on the compute stream. PyTorch's CUDA allocator
gives a block back to the lane that asked for it, *as soon as Python frees it*, without asking whether the compute
stream is done reading. So two things are done:

* the allocator is told (``record_stream``): the block is held until the compute stream has passed this point. The CPU
  never stops, but it runs ahead: it can issue the gathers of ten units before the GPU has finished the first, and all
  ten are then allocated at once.
* so the CPU is stopped after all, before it runs too far ahead. That is the rate limiter::

      CPU    AG0 F0 FREE0   AG1 F1 FREE1   WAIT(FREE0) AG2 ...
      GPU        AG0 F0.......FREE0  AG1 F1.......FREE1

  Each free leaves an event behind. Before a gather, if two events are waiting, the CPU waits for the older one. Hence
  at most two units are in flight, and the memory of the third is that of the first.

Why two? With one, the gather could not overlap the compute before it; with three, nothing is gained on a network that
keeps up, and a unit of memory is lost.

On the CPU every free is complete when it returns, so the events are complete from the start and nothing ever waits. The
queue is kept all the same: tests put slow events in it and watch the limiter work.

*In torch:* ``_limiter_utils.py``, 32 lines, the same idea. FSDP2 has no limiter; it holds references until an event.

Spec: LIM-01 to LIM-06.
"""

from collections import deque
from typing import Any, Protocol

import torch

from minifsdp import trace
from minifsdp.engine.lanes import current_stream


class ReleaseEvent(Protocol):
    """Says when the compute stream is done with a freed unit."""

    def query(self) -> bool:
        """Whether that has happened."""
        ...

    def synchronize(self) -> Any:
        """Stops the CPU until it has."""
        ...


class _Done:
    """The event of a release that was complete at once, as all are on the CPU."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


DONE = _Done()


def release(storage_owner: torch.Tensor) -> ReleaseEvent:
    """Gives back the memory of ``storage_owner``, which came from the gather lane and was read on the compute stream.

    The tensor and all its views stay; their common storage has 0 bytes afterwards. Returns the event that says when
    the compute stream will be done with it.
    """
    event: ReleaseEvent = DONE
    if storage_owner.device.type != "cpu":
        compute_stream = current_stream(storage_owner.device)
        # The allocator must not hand the block out again before the compute stream has passed this point.
        storage_owner.record_stream(compute_stream)
        event = compute_stream.record_event()
    storage_owner.untyped_storage().resize_(0)
    return event


class RateLimiter:
    """Keeps the CPU from gathering too far ahead of the GPU.

    Args:
        enabled: ``limit_all_gathers``; when off, nothing is queued and nothing waits.
        num_in_flight: units that may be gathered or still in use at once.
    """

    __slots__ = ("_events", "enabled", "num_in_flight")

    def __init__(self, enabled: bool, num_in_flight: int = 2) -> None:
        self.enabled = enabled
        self.num_in_flight = num_in_flight
        # Later events of one stream imply earlier ones, so the oldest of too many can be forgotten.
        self._events: deque[ReleaseEvent] = deque(maxlen=num_in_flight)

    def __len__(self) -> int:
        """Releases that were not waited for yet."""
        return len(self._events)

    def admit(self, unit_name: str) -> None:
        """Called before a gather; stops the CPU while that gather would be one too many in flight."""
        if len(self._events) < self.num_in_flight:
            return
        oldest = self._events.popleft()
        if oldest.query():
            return
        waiting = trace.recorder.begin("WAIT", unit_name) if trace.recorder is not None else None
        oldest.synchronize()
        if trace.recorder is not None:
            trace.recorder.finish(waiting)

    def released(self, event: ReleaseEvent) -> None:
        """Called after a free, with its event."""
        if self.enabled:
            self._events.append(event)

    def clear(self) -> None:
        """Forgets all events: at the end of an iteration, and after an error."""
        self._events.clear()
