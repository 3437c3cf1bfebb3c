"""A device that records: the streams and events of the ``meta`` device.

The engine looks up streams and events with ``torch.get_device_module(device)``. PyTorch has no such module for the
``meta`` device. During a recording, a `device_module` is registered as this module. Its streams and events only write
on the tape. So the tape contains each wait that the engine issues, and a wait that is added to the engine or removed
from it changes the tape.

``query()`` of an event returns ``False``: the recorder does not know times. Code that then waits for the event appends
a wait, which takes no time in the replay if the event is complete by then.

*In torch:* ``torch.cuda`` has the same functions.

Spec: SIMULATE-01, SIMULATE-02.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
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


def device_module(tape: Tape, ranks_per_machine: int) -> Any:
    """The functions of ``torch.cuda`` that the engine uses, for one recording.

    Args:
        tape: the tape to write on.
        ranks_per_machine: the number of devices.
    """
    # The position of a stream is its number.
    streams = [Stream(tape, COMPUTE)]

    def new_stream(device: Any = None, priority: int = 0) -> Stream:
        # In the replay, the priority has no effect.
        streams.append(Stream(tape, len(streams)))
        return streams[-1]

    def on_stream(stream: Stream | None) -> Any:
        # Operators in the ``with`` block run on ``stream``.
        return (
            nullcontext()
            if stream is None
            else mock.patch.object(tape, "stream", stream.number)
        )

    return SimpleNamespace(
        device_count=lambda: ranks_per_machine,
        current_device=lambda: 0,
        device=nullcontext,
        Stream=new_stream,
        current_stream=lambda device=None: streams[tape.stream],
        stream=on_stream,
    )


@contextmanager
def registered(module: Any) -> Iterator[None]:
    """Registers the module of the meta device for a ``with`` block."""
    with mock.patch.object(torch, "meta", module, create=True):
        # The result of the look-up is cached by device.
        torch.get_device_module.cache_clear()
        try:
            yield
        finally:
            torch.get_device_module.cache_clear()
