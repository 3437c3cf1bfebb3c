"""Streams, events, and what is known to have happened before what.

A stream executes its operations in order; two streams know nothing of each other until one waits for an event of the
other. Who knows what is kept in *vector clocks*: a clock has, for each stream, the number of its last operation that
is sure to be over. Two streams, ``a`` and ``b``::

    a   write x         a's clock {a: 1}
    a   record event    the event keeps {a: 1}
    b   read y          b's clock {b: 1}                 nothing is known of a: x must not be read here
    b   wait for event  b's clock {b: 1, a: 1}
    b   read x          {b: 2, a: 1}                     the write has number 1 on a, and b knows of a's first: in order

So "does the write come before the read?" is one comparison of numbers, whatever the real machine would have done with
its time. The CPU is one more row of the table, `HOST`: what it launches comes after what it knows, and it learns of the
device only when it stops (``synchronize``, ``item``, a blocking copy).

Nothing here is ever done before somebody has waited for it: `Event.query` answers as the slowest device would.

*In torch:* ``torch.cuda.Stream`` and ``torch.cuda.Event``, the same verbs.

Spec: SIM-01.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["HOST", "Clock", "Event", "Stream", "join"]

Clock = dict[int, int]

HOST = 0
"""The CPU's row in each clock."""


def join(clock: Clock, other: Clock) -> None:
    """From now on ``clock`` also knows what ``other`` knows."""
    for stream, number in other.items():
        if number > clock.get(stream, 0):
            clock[stream] = number


_numbers = itertools.count(1)


class Stream:
    """A queue of operations of one device.

    Args:
        device: whose; ``None`` for the current one.
        priority: accepted, without effect: all orders that the streams allow are looked at anyway.
        name: for reports; by default its number.

    Attributes:
        clock: what is over when the next operation of the stream begins.
        learned: for each other stream, up to which operation of it this one has waited, and where in the program.
    """

    # Set by `world.py`: the device a stream is on by default, and the clock of the CPU.
    current_index: Callable[[], int]
    current: Callable[[int], Stream]
    host_clock: Clock
    host_stops: Callable[[str], None]
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
    def stream_id(self) -> int:
        """Its number, as torch calls it."""
        return self.number

    def learn(self, clock: Clock) -> None:
        """What comes next on the stream runs after all that ``clock`` knows."""
        for stream, number in clock.items():
            if stream not in (HOST, self.number) and number > self.clock.get(stream, 0):
                self.learned[stream] = (number, Stream.where())
        join(self.clock, clock)

    def begin_operation(self) -> tuple[int, Clock]:
        """The number of the operation that is launched now, and what is over when it begins."""
        join(self.clock, Stream.host_clock)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number], dict(self.clock)

    def wait_event(self, event: Event) -> None:
        """What is launched here from now on runs after what the event has recorded."""
        self.learn(event.clock)

    def wait_stream(self, other: Stream) -> None:
        """What is launched here from now on runs after all that ``other`` has been given so far."""
        self.learn(other.record_event().clock)

    def record_event(self, event: Event | None = None) -> Event:
        """An event for all that the stream has been given so far."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether the CPU knows that all is over."""
        return self.record_event().query()

    def synchronize(self) -> None:
        """Stops the CPU until all is over."""
        Stream.host_stops("stream.synchronize")
        join(Stream.host_clock, self.record_event().clock)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        return f"<{self.name} of sim:{self.index}>"


class Event:
    """A point in a stream. Takes the arguments of torch's events, and times nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        """The point behind what the stream, or the current one, has been given so far."""
        stream = stream or Stream.current(Stream.current_index())
        self.clock = dict(stream.clock)
        join(self.clock, Stream.host_clock)

    def wait(self, stream: Stream | None = None) -> None:
        """What is launched on the stream, or the current one, from now on runs behind this point."""
        (stream or Stream.current(Stream.current_index())).wait_event(self)

    def query(self) -> bool:
        """Whether the CPU knows that the point has been passed; that it might have been is not enough."""
        known = Stream.host_clock
        return all(known.get(stream, 0) >= number for stream, number in self.clock.items() if stream != HOST)

    def synchronize(self) -> None:
        """Stops the CPU until the point has been passed."""
        if not self.query():
            Stream.host_stops("event.synchronize")
        join(Stream.host_clock, self.clock)
