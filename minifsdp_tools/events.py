"""Functions that pictures and traces share: tracks, rows, clocks, and the memory of unsharded parameters.

Boxes of one track may overlap in time (two all-gathers in flight). Each box is drawn in the first free row of the
track, so that no box covers another one.

**Clocks.** Each rank has its own clock, and the zeros of two ``perf_counter`` clocks are unrelated. If the caller
recorded a time on each rank at a shared moment, such as the end of a barrier, these times can be passed as ``origins``.
Without them each rank's first event becomes its zero.

Worked example: all-gathers of units 0 and 1, of 32 bytes each, at 0 and 2 ms, and a reshard of unit 0 at 5 ms make the
steps 32, 64 and 32 bytes.

*In torch:* the profiler's memory view shows the allocator, without units.

Spec: the paragraph "The tracer" at the head of the spec.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

from minifsdp.engine.messages import message
from minifsdp.trace import Event

EventsPerRank = Sequence[Sequence[Event]]

STREAMS = ("compute", "gather", "reduce", "all_reduce")


def gathered_bytes(events: Iterable[Event]) -> list[tuple[float, int]]:
    """The memory of unsharded parameters over time, as steps.

    Returns:
        ``(seconds, bytes)`` for each all-gather and each reshard, in order: the bytes from that time on. Parameters
        that were unsharded before the recording began are unknown here and not counted.
    """
    held: dict[str, int] = {}
    stairs = []
    for event in events:
        if event.kind in ("AG", "FREE"):
            held[event.unit] = event.num_bytes if event.kind == "AG" else 0
            stairs.append((event.start, sum(held.values())))
    return stairs


def peak_gathered_bytes(events: Iterable[Event]) -> int:
    """The largest number of bytes of unsharded parameters at one time; 0 without an all-gather."""
    return max((num_bytes for _, num_bytes in gathered_bytes(events)), default=0)


def from_zero(
    events_per_rank: EventsPerRank, origins: Sequence[float] | None
) -> list[list[Event]]:
    """The events with times relative to the zero of their rank's clock."""
    if origins is None:
        origins = [
            min((event.start for event in events), default=0.0)
            for events in events_per_rank
        ]
    if len(origins) != len(events_per_rank):
        raise ValueError(
            message(
                "timeline-origins", ranks=len(events_per_rank), origins=len(origins)
            )
        )
    return [
        [
            replace(
                event,
                start=event.start - zero,
                end=event.end - zero,
                arrived=None if event.arrived is None else event.arrived - zero,
            )
            for event in events
        ]
        for events, zero in zip(events_per_rank, origins, strict=True)
    ]


def rows_of(events: Sequence[Event], tolerance: float) -> list[int]:
    """The row of each event: the first in which it overlaps no earlier event by more than ``tolerance`` seconds."""
    ends: dict[int, float] = {}
    rows = []
    for event in events:
        row = next(
            row
            for row in count()
            if ends.get(row, event.start) <= event.start + tolerance
        )
        ends[row] = event.end
        rows.append(row)
    return rows
