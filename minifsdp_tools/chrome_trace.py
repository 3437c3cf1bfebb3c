"""Converts the events to the format of the trace viewers chrome://tracing and ui.perfetto.dev.

A rank becomes a process, a track a thread (two if its spans overlap), the unsharded bytes a counter. Worked example: an
all-gather of unit 0 from 0 to 2 ms on rank 1 is ``{"ph": "X", "name": "AG 0", "pid": 1, "ts": 0, "dur": 2000}``.

*In torch:* the profiler writes such traces of every operator, in which the all-gather of block 3 is hard to find.

Spec: the paragraph "The tracer" at the head of the spec.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from minifsdp.trace import Event
from minifsdp_tools.events import (
    STREAMS,
    EventsPerRank,
    from_zero,
    gathered_bytes,
    rows_of,
)


def chrome_trace(
    events_per_rank: EventsPerRank, *, origins: Sequence[float] | None = None
) -> dict[str, Any]:
    """The events in the Chrome trace event format, ready for ``json.dump``.

    Args:
        events_per_rank: the events of rank 0, of rank 1, and so on.
        origins: each rank's clock, in seconds, at one shared moment; by default the time of its first event.

    Raises:
        ValueError: the number of origins is not the number of ranks.
    """
    items = [
        item
        for rank, events in enumerate(from_zero(events_per_rank, origins))
        for item in _items(rank, events)
    ]
    return {"traceEvents": items, "displayTimeUnit": "ms"}


def _items(rank: int, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """All items of one rank: its name, its threads, the spans and moments by track and row, and its memory."""
    yield {
        "ph": "M",
        "name": "process_name",
        "pid": rank,
        "args": {"name": f"rank {rank}"},
    }
    for number, stream in enumerate(STREAMS):
        on_stream = [event for event in events if event.stream == stream]
        rows = rows_of(on_stream, 0.0)
        for row in sorted({*rows}):
            name = stream if row == 0 else f"{stream} ({row + 1})"
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": rank,
                "tid": 100 * number + row,
                "args": {"name": name},
            }
        for event, row in zip(on_stream, rows, strict=True):
            yield {"pid": rank, "tid": 100 * number + row} | _chrome_event(event)
    for seconds, num_bytes in gathered_bytes(events):
        yield {
            "ph": "C",
            "name": "gathered",
            "pid": rank,
            "ts": _micro(seconds),
            "args": {"bytes": num_bytes},
        }


def _chrome_event(event: Event) -> dict[str, Any]:
    dtype = "" if event.dtype is None else str(event.dtype).removeprefix("torch.")
    # Scope "t": the mark of a moment is drawn on its own thread only, and not across the whole window.
    span = (
        {"ph": "X", "dur": _micro(event.end - event.start)}
        if event.end > event.start
        else {"ph": "i", "s": "t"}
    )
    return span | {
        "name": f"{event.kind} {event.unit or 'root'}",
        "cat": event.kind,
        "ts": _micro(event.start),
        "args": {
            "unit": event.unit,
            "bytes": event.num_bytes,
            "ranks": list(event.ranks),
            "dtype": dtype,
        },
    }


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)
