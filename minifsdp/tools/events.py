"""What a picture and a trace have in common: lanes, rows, clocks, and how much memory is gathered.

Boxes of one lane may overlap in time (two gathers in flight). They then go to rows of their own, the first row that is
free; nothing is drawn over anything else.

**Clocks.** Each rank has a clock of its own, and the zeros of two ``perf_counter`` need have nothing to do with each
other. If the caller noted a time on each rank at a moment that all ranks shared, such as the end of a barrier, these
times go in as ``origins``. Without them each rank's first event becomes its zero.

Worked example: gathers of units 0 and 1, of 32 bytes each, at 0 and 2 ms, and a free of unit 0 at 5 ms make the steps
32, 64 and 32 bytes.

*In torch:* the profiler's memory view draws an allocator, which knows nothing of units.

Spec: the paragraph "The tracer" at the head of the spec.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

from minifsdp.engine.messages import message
from minifsdp.trace import Event

EventsPerRank = Sequence[Sequence[Event]]

LANES = ("compute", "gather", "reduce", "all_reduce")


def gathered_bytes(events: Iterable[Event]) -> list[tuple[float, int]]:
    """How much memory holds full parameters, as steps of a staircase.

    Returns:
        ``(seconds, bytes)`` for each gather and each free, in order: from that time on it is that many bytes. What had
        been gathered before the recording began is unknown here and counts as nothing.
    """
    held: dict[str, int] = {}
    stairs = []
    for event in events:
        if event.kind == "AG":
            held[event.unit] = event.num_bytes
        elif event.kind == "FREE":
            held.pop(event.unit, None)
        else:
            continue
        stairs.append((event.start, sum(held.values())))
    return stairs


def peak_gathered_bytes(events: Iterable[Event]) -> int:
    """The largest number of bytes of full parameters that lay in memory together; 0 if nothing was gathered."""
    return max((num_bytes for _, num_bytes in gathered_bytes(events)), default=0)


def from_zero(events_per_rank: EventsPerRank, origins: Sequence[float] | None) -> list[list[Event]]:
    """The events with times that are counted from the zero of their rank's clock."""
    if origins is None:
        origins = [min((event.start for event in events), default=0.0) for events in events_per_rank]
    if len(origins) != len(events_per_rank):
        raise ValueError(message("timeline-origins", ranks=len(events_per_rank), origins=len(origins)))
    return [[_earlier(event, zero) for event in events] for events, zero in zip(events_per_rank, origins, strict=True)]


def _earlier(event: Event, seconds: float) -> Event:
    arrived = None if event.arrived is None else event.arrived - seconds
    return replace(event, start=event.start - seconds, end=event.end - seconds, arrived=arrived)


def rows_of(events: Sequence[Event], tolerance: float) -> list[int]:
    """The row for each event: the lowest where it overlaps with none before it by more than ``tolerance`` seconds."""
    ends: dict[int, float] = {}
    rows = []
    for event in events:
        row = next(row for row in count() if ends.get(row, event.start) <= event.start + tolerance)
        ends[row] = event.end
        rows.append(row)
    return rows
