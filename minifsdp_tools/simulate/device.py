"""A device that records: the streams and events of the ``meta`` device.

The engine looks up streams and events with ``torch.get_device_module(device)``. PyTorch has no such module for the
``meta`` device. During a recording, `DeviceModule` is registered as this module. Its streams and events only write on
the tape. So the tape contains each wait that the engine issues, and a wait that is added to the engine or removed from
it changes the tape.

``query()`` of an event returns ``False``: the recorder does not know times. Code that then waits for the event appends
a wait, which takes no time in the replay if the event is complete by then.

*In torch:* ``torch.cuda`` has the same functions.

Spec: SIMULATE-01, SIMULATE-02.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from minifsdp_tools.simulate.tape import COMPUTE, HostWait, Tape, WaitEvent

META = torch.device("meta")


class Stream(torch.Stream):
    """A stream that writes on a tape. It derives from torch's class, because ``record_stream`` checks the type."""

    # Set after `__new__`, whose arguments torch parses.
    tape: Tape
    number: int

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        """Records an event after the work that was issued so far."""
        event = event or Event(self.tape)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:  # type: ignore[override]
        """Later work waits for the event."""
        if event.number is not None:
            self.tape.items.append(WaitEvent(self.number, event.number))

    def wait_stream(self, other: Stream) -> None:  # type: ignore[override]
        """Later work waits for the work that ``other`` has received so far."""
        self.wait_event(other.record_event())

    def query(self) -> bool:
        """Whether all work is complete, which the recorder does not know."""
        return False

    def synchronize(self) -> None:
        """The CPU waits for all work."""
        self.record_event().synchronize()


def new_stream(tape: Tape, number: int) -> Stream:
    """A stream with this number."""
    stream = Stream(device=META)
    stream.tape, stream.number = tape, number
    return stream


class Event:
    """An event of a recorded stream; without a number, it was never recorded."""

    def __init__(self, tape: Tape, enable_timing: bool = False) -> None:
        self._tape = tape
        self.number: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Records the event on a stream, by default the current one."""
        self.number = self._tape.record_event(self._tape.stream if stream is None else stream.number)

    def wait(self, stream: Stream) -> None:
        """Later work of ``stream`` waits for the event."""
        stream.wait_event(self)

    def query(self) -> bool:
        """Whether the event is complete, which the recorder does not know."""
        return self.number is None

    def synchronize(self) -> None:
        """The CPU waits for the event."""
        if self.number is not None:
            self._tape.items.append(HostWait(self.number))


class DeviceModule(ModuleType):
    """The functions of ``torch.cuda`` that the engine uses, for one recording.

    Args:
        tape: the tape to write on.
        ranks_per_machine: the number of devices.
    """

    def __init__(self, tape: Tape, ranks_per_machine: int) -> None:
        super().__init__("torch.meta")
        self._tape, self._count = tape, ranks_per_machine
        # The position of a stream is its number.
        self._streams = [new_stream(tape, COMPUTE)]
        # The names of torch.cuda's classes.
        self.Stream, self.Event = self._new_stream, partial(Event, tape)

    def device_count(self) -> int:
        """The number of devices of a machine."""
        return self._count

    def current_device(self) -> int:
        """The only device that this process uses."""
        return 0

    def device(self, device: Any) -> Any:
        """Has no effect."""
        return nullcontext()

    def _new_stream(self, device: Any = None, priority: int = 0) -> Stream:
        # In the replay, the priority has no effect.
        self._streams.append(new_stream(self._tape, len(self._streams)))
        return self._streams[-1]

    def current_stream(self, device: Any = None) -> Stream:
        """The stream on which operators run now."""
        return self._streams[self._tape.stream]

    def stream(self, stream: Stream | None) -> Any:
        """Operators in the ``with`` block run on ``stream``."""
        return nullcontext() if stream is None else mock.patch.object(self._tape, "stream", stream.number)

    def synchronize(self, device: Any = None) -> None:
        """The CPU waits for all streams."""
        for stream in self._streams:
            stream.synchronize()


@contextmanager
def registered(module: DeviceModule) -> Iterator[None]:
    """Registers the module of the meta device for a ``with`` block."""
    torch._register_device_module("meta", module)
    # The result of the look-up is cached by device.
    torch.get_device_module.cache_clear()
    try:
        yield
    finally:
        delattr(torch, "meta")
        del sys.modules["torch.meta"]
        torch.get_device_module.cache_clear()
