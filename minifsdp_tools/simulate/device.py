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

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self
from unittest import mock

import torch

from minifsdp_tools.simulate.tape import COMPUTE, HostWait, RecordEvent, Tape, WaitEvent

META = torch.device("meta")


class Stream(torch.Stream):
    """A stream that writes on a tape. It derives from torch's class, because ``record_stream`` checks the type.

    Args:
        tape: the tape.
        number: the number of the stream.
    """

    def __new__(cls, tape: Tape, number: int) -> Self:
        """Creates the stream for torch, which parses the arguments of this method."""
        return super().__new__(cls, device=META)

    def __init__(self, tape: Tape, number: int) -> None:
        self.tape = tape
        self.number = number

    def record_event(self) -> Event:  # type: ignore[override]
        """Records an event after the work that was issued so far."""
        event = Event(self.tape, next(self.tape.events))
        self.tape.items.append(RecordEvent(self.number, event.number))
        return event

    def wait_event(self, event: Event) -> None:  # type: ignore[override]
        """Later work waits for the event."""
        self.tape.items.append(WaitEvent(self.number, event.number))

    def wait_stream(self, other: Stream) -> None:  # type: ignore[override]
        """Later work waits for the work that ``other`` has received so far."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """The CPU waits for all work."""
        self.record_event().synchronize()


@dataclass
class Event:
    """An event of a recorded stream."""

    tape: Tape
    number: int

    def query(self) -> bool:
        """Whether the event is complete, which the recorder does not know."""
        return False

    def synchronize(self) -> None:
        """The CPU waits for the event."""
        self.tape.items.append(HostWait(self.number))


class DeviceModule:
    """The functions of ``torch.cuda`` that the engine uses, for one recording.

    Args:
        tape: the tape to write on.
        ranks_per_machine: the number of devices.
    """

    def __init__(self, tape: Tape, ranks_per_machine: int) -> None:
        self._tape = tape
        self._count = ranks_per_machine
        # The position of a stream is its number.
        self._streams = [Stream(tape, COMPUTE)]
        # The name of torch.cuda's class.
        self.Stream = self._new_stream

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
        self._streams.append(Stream(self._tape, len(self._streams)))
        return self._streams[-1]

    def current_stream(self, device: Any = None) -> Stream:
        """The stream on which operators run now."""
        return self._streams[self._tape.stream]

    def stream(self, stream: Stream | None) -> Any:
        """Operators in the ``with`` block run on ``stream``."""
        return (
            nullcontext()
            if stream is None
            else mock.patch.object(self._tape, "stream", stream.number)
        )


@contextmanager
def registered(module: DeviceModule) -> Iterator[None]:
    """Registers the module of the meta device for a ``with`` block."""
    with mock.patch.object(torch, "meta", module, create=True):
        # The result of the look-up is cached by device.
        torch.get_device_module.cache_clear()
        try:
            yield
        finally:
            torch.get_device_module.cache_clear()
