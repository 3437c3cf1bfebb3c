"""The tape of a recorded step: the work that the CPU thread issued, in order.

A recording (``recording.py``) appends an item for each kernel, collective, event, wait, allocation and release.
``replay.py`` reads the items and gives each of them a time. Streams, events and blocks of memory have numbers. Stream 0
is the compute stream. The engine's own events (``minifsdp.trace``) are not on the tape, but their times are positions
on it.

Worked example, an all-gather on stream 1 whose result a kernel on stream 0 uses::

    Allocate(block=7, num_bytes=64)
    Collective(stream=1, kind="AG", ranks=(0, 1), num_bytes=64)
    RecordEvent(stream=1, event=3)
    WaitEvent(stream=0, event=3)
    Kernel(stream=0, name="aten.mm", flops=1024, num_bytes=192)

*In torch:* the profiler records the same items with measured times.

Spec: SIMULATE-01.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

import torch

COMPUTE = 0


@dataclass(slots=True)
class Kernel:
    """An operator on a stream.

    Attributes:
        flops: the operations of its matrix product, 0 for other operators. Causal attention counts half.
        num_bytes: bytes that it reads and writes.
        dtype: of its first output.
        phase: ``forward``, ``backward`` or ``optimizer``.
        nominal_flops: the same as ``flops``, with causal attention counted in full, as in published figures.
    """

    stream: int
    name: str
    flops: float
    num_bytes: int
    dtype: torch.dtype | None
    phase: str
    nominal_flops: float


@dataclass(slots=True)
class Collective:
    """A collective on a stream. ``kind`` is AG, RS, AR or BCAST; ``num_bytes`` is the size of the unsharded tensor."""

    stream: int
    kind: str
    ranks: tuple[int, ...]
    num_bytes: int


@dataclass(slots=True)
class RecordEvent:
    """An event that is complete when the earlier work of a stream is complete."""

    stream: int
    event: int


@dataclass(slots=True)
class WaitEvent:
    """Later work of a stream waits for an event."""

    stream: int
    event: int


@dataclass(slots=True)
class HostWait:
    """The CPU thread waits for an event."""

    event: int


@dataclass(slots=True)
class Allocate:
    """Memory of the current stream is allocated."""

    block: int
    num_bytes: int


@dataclass(slots=True)
class Free:
    """Memory is returned to its stream."""

    block: int
    num_bytes: int


@dataclass(slots=True)
class UseOn:
    """``record_stream``: memory is also used on another stream."""

    block: int
    stream: int


Item: TypeAlias = (
    Kernel | Collective | RecordEvent | WaitEvent | HostWait | Allocate | Free | UseOn
)


@dataclass
class Tape:
    """The items of a recording, and the state of the recorder.

    Attributes:
        items: all items so far.
        stream: number of the current stream.
        phase: the phase of the step, set by the recorder.
        events: numbers for events; the recorder takes the next one.
    """

    items: list[Item] = field(default_factory=list)
    stream: int = COMPUTE
    phase: str = "setup"
    events: "count[int]" = field(default_factory=count)
