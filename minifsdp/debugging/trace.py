"""The event recorder: an ordered list of all-gathers, forwards, reductions and other events of one rank.

An FSDP implementation that computes correct numbers can still be slow or use too much memory, because it all-gathers or
reshards too late. The results do not show this, but an ordered list of events does. While a recorder is installed, each
rank keeps such a list. The pictures and the timeline tests use the list. The spec and the tests use these names:

=========  =============================================  ===========================================
kind       event                                          span, if it has one
=========  =============================================  ===========================================
``AG``     all-gather of a unit's parameters              from its issue until it was waited for
``F``      forward of a unit                              from entering the module until leaving it
``B``      backward of a unit                             from the arrival of the gradient of its output
                                                          until its own parameter gradient is complete, or
                                                          until the unit is freed
``RS``     reduce-scatter of a unit's gradient            from its issue until it was waited for
``AR``     all-reduce (replicas, or ``NO_SHARD``)         from its issue until it was waited for
``FREE``   the unsharded storage was released             a moment
``WAIT``   the CPU waited for the rate limiter            the time of the wait
``H2D``    a shard was copied to the compute device       a moment (the copy is asynchronous)
``D2H``    a gradient shard was copied to the CPU         a moment
``BCAST``  rank 0 broadcast initial values                a moment
=========  =============================================  ===========================================

Worked example, one unit ``"0"`` with 8 float32 parameters on two ranks, forward only::

    AG 0  bytes=32 ranks=(0, 1)      32 = 8 * 4: the size of the *unsharded* tensor, on either rank
    F 0
    FREE 0  bytes=32

The recorder is off by default. Then its only cost is the check ``if events.recorder is not None``. There is no
decorator, context manager or formatted string.

The times are those of the CPU thread (``time.perf_counter``, seconds). So on CUDA they are the times when work was
*issued*. A profiler shows when it ran.

*In torch:* every step opens 11 to 12 ``torch.profiler.record_function`` ranges for each unit, with or without a
profiler. minifsdp omits these ranges because of their cost, a measured 100 microseconds for each unit.

Spec: the paragraph "The tracer" at the head of the spec; used by the requirements SHARD, PREF, LIM, NOSYNC and HYB.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from minifsdp.engine.events import events


@dataclass(slots=True)
class Event:
    """One event on this rank.

    Attributes:
        kind: one of the kinds in the table above.
        unit: full name of the unit's module inside the root, ``""`` for the root itself.
        start: seconds, ``time.perf_counter``.
        end: seconds; equals ``start`` for a moment and for a span that is still open.
        num_bytes: size of the unsharded tensor that was all-gathered, reduced or released; 0 for other events.
        ranks: global ranks of the group that communicated; empty for events without communication.
        dtype: dtype of the data that was sent, or ``None``.
        stream: the stream of the work: ``"compute"``, ``"gather"``, ``"reduce"`` or ``"all_reduce"``.
        arrived: seconds; the time when a collective's data arrived, if this was measured.
    """

    kind: str
    unit: str
    start: float
    end: float
    num_bytes: int = 0
    ranks: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    stream: str = "compute"
    arrived: float | None = None


@dataclass(slots=True)
class Recorder:
    """An ordered list of events, in the order of their issue."""

    events: list[Event] = field(default_factory=list)
    _latest: dict[tuple[str, str], Event] = field(default_factory=dict, repr=False)

    def begin(self, kind: str, unit: str, **facts: Any) -> Event:
        """Appends an event that starts now. `finish` sets its end. Without `finish`, the event is a moment.

        Args:
            kind, unit: see `Event`.
            facts: other attributes of the `Event`.
        """
        now = time.perf_counter()
        event = Event(kind, unit, now, now, **facts)
        self.events.append(event)
        self._latest[kind, unit] = event
        return event

    def finish(self, event: Event | None) -> None:
        """Ends a span now. ``None`` stands for a span that began before the recorder was installed."""
        if event is not None:
            event.end = time.perf_counter()

    def end(self, kind: str, unit: str) -> None:
        """Ends the latest span of a unit, if it began while the recorder was installed."""
        self.finish(self._latest.pop((kind, unit), None))

    def freed(self, unit: Any) -> None:
        """Records that the unsharded parameters of a unit are freed, which ends its backward.

        A frozen unit has no gradient of its own that would end its backward earlier.
        """
        self.end("B", unit.name)
        self.begin("FREE", unit.name, num_bytes=unit.layout.num_bytes)

    def all_gather_begins(self, unit: Any) -> None:
        """Appends the events of an all-gather of ``unit``."""
        layout = unit.layout
        num_bytes = layout.num_bytes
        if layout.offloads:
            self.begin(
                "H2D", unit.name, num_bytes=num_bytes // unit.plans[0].mesh.num_shards
            )
        if layout.group is not None:
            self.begin(
                "AG",
                unit.name,
                num_bytes=num_bytes,
                ranks=layout.group.ranks,
                dtype=layout.dtype,
                stream="gather",
            )

    def reduction_begins(
        self, kind: str, reduction: Any, group: Any, stream: str
    ) -> Event:
        """Appends the event of a collective of a reduction."""
        sent = reduction.whole if kind == "RS" else reduction.local_shard
        return self.begin(
            kind,
            reduction.layout.name,
            num_bytes=sent.nbytes,
            ranks=group.ranks,
            dtype=sent.dtype,
            stream=stream,
        )

    def order(self, *kinds: str) -> list[str]:
        """The events as strings such as ``"AG 0"``, all of them or only the given kinds, in order of issue."""
        return [
            f"{event.kind} {event.unit}".rstrip()
            for event in self.events
            if not kinds or event.kind in kinds
        ]

    def count(self, kind: str) -> int:
        """The number of events of one kind."""
        return sum(event.kind == kind for event in self.events)


@contextmanager
def record() -> Iterator[Recorder]:
    """Records this rank's events inside the ``with`` block. Does not communicate, so any rank may call it alone.

    At the end of the block, the recorder that was installed before is installed again. So recordings can be nested, and
    only the innermost recorder gets the events.

    Yields:
        The recorder. Its ``events`` can be read inside the block and after it.
    """
    before = events.recorder
    events.recorder = recorder = Recorder()
    try:
        yield recorder
    finally:
        events.recorder = before
