"""A trace for a browser's zoom: the events in the format of chrome://tracing and ui.perfetto.dev.

A rank is a process, a lane a thread (two threads where spans of one lane overlap), the gathered bytes a counter. Worked
example: a gather of unit 0 from 0 to 2 ms on rank 1 is ``{"ph": "X", "name": "AG 0", "pid": 1, "ts": 0, "dur": 2000}``.

*In torch:* the profiler writes such traces of every operator; finding the gather of block 3 in one is detective work.

Spec: the paragraph "The tracer" at the head of the spec.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from minifsdp.tools.events import LANES, EventsPerRank, dtype_of, gathered_bytes, name_of, origins_of, rows_of
from minifsdp.trace import Event


def chrome_trace(events_per_rank: EventsPerRank, *, origins: Sequence[float] | None = None) -> dict[str, Any]:
    """The events in the Chrome trace event format, ready for ``json.dump``.

    Args:
        events_per_rank: the events of rank 0, of rank 1, and so on.
        origins: what each rank's clock showed, in seconds, at one shared moment; by default that of its first event.

    Raises:
        ValueError: there is not one origin for each rank.
    """
    zeros = origins_of(events_per_rank, origins)
    items: list[dict[str, Any]] = []
    for rank, (events, zero) in enumerate(zip(events_per_rank, zeros, strict=True)):
        items.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        items += _threads(rank, events, zero)
        for seconds, num_bytes in gathered_bytes(events):
            count = {"bytes": num_bytes}
            items.append({"ph": "C", "name": "gathered", "pid": rank, "ts": _micro(seconds - zero), "args": count})
    return {"traceEvents": items, "displayTimeUnit": "ms"}


def _threads(rank: int, events: Sequence[Event], zero: float) -> Iterable[dict[str, Any]]:
    """The spans and moments of one rank, each on the thread of its lane and row."""
    for number, lane in enumerate(LANES):
        on_lane = [event for event in events if event.lane == lane]
        named: set[int] = set()
        for event, row in zip(on_lane, rows_of(on_lane, 0.0), strict=True):
            thread = 100 * number + row
            if thread not in named:
                named.add(thread)
                name = lane if row == 0 else f"{lane} ({row + 1})"
                yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
            yield _chrome_event(rank, thread, event, zero)


def _chrome_event(rank: int, thread: int, event: Event, zero: float) -> dict[str, Any]:
    item: dict[str, Any] = {
        "name": f"{event.kind} {name_of(event.unit)}",
        "cat": event.kind,
        "pid": rank,
        "tid": thread,
        "ts": _micro(event.start - zero),
        "args": {"unit": event.unit, "bytes": event.num_bytes, "ranks": list(event.ranks), "dtype": dtype_of(event)},
    }
    # Scope "t": the mark of a moment stays on its own thread and does not cross the whole window.
    duration = {"ph": "X", "dur": _micro(event.end - event.start)} if event.end > event.start else {"ph": "i", "s": "t"}
    return item | duration


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)
