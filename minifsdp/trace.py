"""What happened when: the recorder behind every picture and every timeline test.

An FSDP that computes the right numbers can still be a bad one, because it gathers too late or frees too late. Results
do not show that; an ordered list of events does. With a recorder installed, each rank keeps such a list, in the
letters that the spec and the tests use:

=========  =============================================  ===========================================
kind       what it is                                     its span, if it has one
=========  =============================================  ===========================================
``AG``     all-gather of a unit's parameters              from its issue until it was waited for
``F``      forward of a unit                              from entering the module until leaving it
``B``      backward of a unit                             from the arrival of the gradient of its output
                                                          until its own parameter gradient is complete
``RS``     reduce-scatter of a unit's gradient            from its issue until it was waited for
``AR``     all-reduce (replicas, or ``NO_SHARD``)         the same
``FREE``   the unsharded storage was released             a moment
``WAIT``   the CPU was held back by the rate limiter      while it was held back
``H2D``    a shard was copied to the compute device       a moment (the copy is asynchronous)
``D2H``    a gradient shard was copied to the CPU         a moment
``BCAST``  initial values sent by rank 0                  a moment
=========  =============================================  ===========================================

Worked example, one unit ``"0"`` with 8 float32 parameters on two ranks, forward only::

    AG 0  bytes=32 ranks=(0, 1)      32 = 8 * 4: the size of the *gathered* tensor, on either rank
    F 0
    FREE 0  bytes=32

Off by default and then free: the engine asks ``if trace.recorder is not None`` and goes on. There is no decorator, no
context manager and no formatted string on that path.

The times are those of the CPU thread (``time.perf_counter``, seconds). On CUDA they therefore say when a thing was
*issued*; when it ran is the profiler's to tell.

*In torch:* ``torch.profiler.record_function`` ranges are opened in every step whether a profiler runs or not, at 11 to
12 for each unit. Left out here for that price; PERFORMANCE of the design measured about 100 microseconds a unit.

Spec: the paragraph "The tracer" at the head of the spec; used by the rows of SHARD, PREF, LIM, NOSYNC and HYB.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Event", "Recorder", "record"]


@dataclass(slots=True)
class Event:
    """One thing that happened on this rank.

    Attributes:
        kind: one of the kinds in the table above.
        unit: full name of the unit's module inside the root, ``""`` for the root itself.
        start: seconds, ``time.perf_counter``.
        end: seconds; equals ``start`` for a moment and for a span that is still open.
        num_bytes: bytes of the unsharded tensor that was gathered, reduced or freed; 0 where it means nothing.
        ranks: global ranks of the group that communicated; empty where nothing was sent.
        dtype: what travelled, or ``None``.
        lane: the lane it ran on: ``"compute"``, ``"gather"``, ``"reduce"`` or ``"all_reduce"``.
        arrived: seconds; when a collective's data was there, if whoever recorded has looked for that.
    """

    kind: str
    unit: str
    start: float
    end: float
    num_bytes: int = 0
    ranks: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    lane: str = "compute"
    arrived: float | None = None


@dataclass(slots=True)
class Recorder:
    """An ordered list of events, in the order of their issue."""

    events: list[Event] = field(default_factory=list)

    def begin(self, kind: str, unit: str, **facts: Any) -> Event:
        """Appends an event that starts now. `finish` gives it an end; without that it is a moment.

        Args:
            kind, unit: as in `Event`.
            facts: the other attributes of an `Event`, as far as there is something to say.
        """
        now = time.perf_counter()
        event = Event(kind, unit, now, now, **facts)
        self.events.append(event)
        return event

    def finish(self, event: Event | None) -> None:
        """The span ends now. ``None`` is allowed, for a span that began before the recorder was installed."""
        if event is not None:
            event.end = time.perf_counter()

    def order(self, *kinds: str) -> list[str]:
        """The events as words such as ``"AG 0"``, all of them or only the given kinds, in order of issue."""
        return [f"{event.kind} {event.unit}".rstrip() for event in self.events if not kinds or event.kind in kinds]

    def count(self, kind: str) -> int:
        """How many events of one kind there are."""
        return sum(event.kind == kind for event in self.events)


# The one switch. A module attribute and not a class, so that the question costs the engine a single global look-up.
recorder: Recorder | None = None


@contextmanager
def record() -> Iterator[Recorder]:
    """Records this rank's events inside the ``with`` block; any rank may call it alone, nothing is communicated.

    A recorder that was installed before is put back on leaving, so recordings may be nested (the inner one takes the
    events).

    Yields:
        The recorder, whose ``events`` may be read inside the block and after it.
    """
    global recorder
    before, recorder = recorder, Recorder()
    try:
        yield recorder
    finally:
        recorder = before
