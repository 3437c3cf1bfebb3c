"""Streams, events, and the happens-before relation between operations.

A stream executes its operations in order. Operations of two streams have no order until one stream waits for an event
of the other. This is tracked with *vector clocks*: a clock contains, for each stream, the number of its last operation
that is certainly complete. Two streams, ``a`` and ``b``::

    a   write x         a's clock {a: 1}
    a   record event    the event keeps {a: 1}
    b   read y          b's clock {b: 1}                 no entry for a: reading x here would be a race
    b   wait for event  b's clock {b: 1, a: 1}
    b   read x          {b: 2, a: 1}                     the write is operation 1 of a, and b's clock has a: 1: in order

So "does the write come before the read?" is one comparison of numbers, independent of the timing of a real machine. The
CPU is one more entry, `HOST`. An operation that it launches comes after everything in the CPU's clock. The device's
operations enter this clock only when the CPU stops (``synchronize``, ``item``, a blocking copy).

No operation counts as complete before the program waits for it: `Event.query` answers as on the slowest possible
device.

*In torch:* ``torch.cuda.Stream`` and ``torch.cuda.Event``, which have the same methods.

Spec: SIM-01.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["HOST", "LOCK", "Clock", "Event", "Stream", "join"]

Clock = dict[int, int]

HOST = 0
"""The CPU's row in each clock. It is shared by all threads."""

LOCK = threading.RLock()
"""Held by the thread that changes streams, clocks or memory: several threads may call the device."""


def join(clock: Clock, other: Clock) -> None:
    """Updates ``clock`` to the maximum of both clocks."""
    for stream, number in other.items():
        if number > clock.get(stream, 0):
            clock[stream] = number


_numbers = itertools.count(1)


class Stream:
    """A queue of operations of one device.

    Args:
        device: its device; ``None`` for the current one.
        priority: accepted, without effect: all orders that the streams allow are checked in any case.
        name: for reports; by default its number.

    Attributes:
        clock: the operations that are complete when the next operation of the stream begins.
        learned: for each other stream, the last operation of it that this one waits for, and the line of that wait.
    """

    # Set by `world.py`: the current device and stream, the clock of the CPU and its waits, and the line of the program.
    current_index: Callable[[], int]
    current: Callable[[int], Stream]
    host_clock: Clock
    host_stops: Callable[[str], None]
    host_waits: Callable[[Clock], None]
    refuse_in_captures: Callable[[str], None]
    is_in_capture: Callable[[], bool]
    where: Callable[[], str]

    def __init__(self, device: Any = None, priority: int = 0, *, name: str | None = None) -> None:
        self.number = next(_numbers)
        self.priority = priority
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        self.index = Stream.current_index() if index is None else index
        self.name = name or f"stream {self.number}"
        self.clock: Clock = {}
        self.learned: dict[int, tuple[int, str]] = {}

    @property
    def device(self) -> torch.device:
        """The device of the stream."""
        return torch.device("sim", self.index)

    @property
    def device_index(self) -> int:
        """The index of its device, under torch's name. torch 2.15 reads it."""
        return self.index

    @property
    def device_type(self) -> int:
        """The number of a kind of device that a library outside torch adds, under torch's name. torch 2.15 reads it."""
        return int(torch._C._autograd.DeviceType.PrivateUse1)

    @property
    def stream_id(self) -> int:
        """Its number, under torch's name."""
        return self.number

    def learn(self, clock: Clock) -> None:
        """Makes the next operations of the stream run after all operations in ``clock``."""
        with LOCK:
            for stream, number in clock.items():
                if stream not in (HOST, self.number) and number > self.clock.get(stream, 0):
                    self.learned[stream] = (number, Stream.where())
            join(self.clock, clock)

    def begin_operation(self) -> tuple[int, Clock]:
        """The number of the operation that is launched now, and the operations that are complete when it begins."""
        join(self.clock, Stream.host_clock)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number], dict(self.clock)

    def wait_event(self, event: Event) -> None:
        """Makes later operations of this stream run after the operations that the event has recorded."""
        self.learn(event.clock)

    def wait_stream(self, other: Stream) -> None:
        """Makes later operations of this stream run after all operations that ``other`` has received so far."""
        self.learn(other.record_event().clock)

    def record_event(self, event: Event | None = None) -> Event:
        """Records an event for all operations that the stream has received so far."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether the CPU's clock contains all operations of the stream."""
        Stream.refuse_in_captures("stream.query")
        return self.record_event().is_passed

    def is_capturing(self) -> bool:
        """Whether this thread captures. The streams of a capture are not distinguished."""
        return Stream.is_in_capture()

    def synchronize(self) -> None:
        """Stops the CPU until all operations of the stream are complete."""
        Stream.host_stops("stream.synchronize")
        Stream.host_waits(self.record_event().clock)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"<{self.name} of sim:{self.index}>"


class Event:
    """A point in a stream. Takes the arguments of torch's events, and measures no time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        """Records the point after the operations that the stream, by default the current one, has received so far."""
        stream = stream or Stream.current(Stream.current_index())
        with LOCK:
            self.clock = dict(stream.clock)
            join(self.clock, Stream.host_clock)

    def wait(self, stream: Stream | None = None) -> None:
        """Makes later operations of the stream, by default the current one, run after this point."""
        (stream or Stream.current(Stream.current_index())).wait_event(self)

    def query(self) -> bool:
        """Whether the CPU's clock shows that the point has been passed. False if this depends on the timing."""
        Stream.refuse_in_captures("event.query")
        return self.is_passed

    @property
    def is_passed(self) -> bool:
        """Same as `query`, for the simulation itself."""
        known = Stream.host_clock
        return all(known.get(stream, 0) >= number for stream, number in self.clock.items() if stream != HOST)

    def synchronize(self) -> None:
        """Stops the CPU until the point has been passed."""
        if self.is_passed:
            Stream.refuse_in_captures("event.synchronize")
        else:
            Stream.host_stops("event.synchronize")
        Stream.host_waits(self.clock)
