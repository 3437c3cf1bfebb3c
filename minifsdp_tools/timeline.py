"""Draws the events of a recorder as an SVG picture, or converts them for chrome://tracing and ui.perfetto.dev.

It takes the events of all ranks and returns text. Nothing is measured or written, so tests can check the result. This
module computes positions; the template ``timeline.svg.jinja`` draws the shapes, and ``timeline.css`` has the style.

Worked example, one rank and one unit of 8 float32 parameters, in milliseconds::

    AG 0  from 0 to 2, 32 bytes        rank 0               0        2           5 ms
    F 0   from 2 to 5                           compute              [   F 0   ]
    FREE  at 5                                  gather      [  AG 0  ]         v      v is the FREE
                                                gathered    ####################____

How to read such a picture:

1. *compute* shows the work of the CPU thread. A box below a longer one ran inside it: the forward of a block inside the
   forward of the root.
2. *gather* and *reduce* are collectives, from their issue until the wait for them ended. A box below a compute box is
   communication that overlaps with computation. Below a gap in compute, the communication did not overlap.
3. *gathered* is the memory of unsharded parameters: each all-gather increases it, each reshard decreases it. The
   saw-tooth shape shows the memory that sharding saves. A prefetch makes the teeth higher and the gaps narrower, which
   is its trade-off.

``events.py`` explains overlap and clocks. Without a shared moment, each rank's first event becomes its zero, which
hides how much later one rank began than another. The caption states which zero is used.

In a trace (`chrome_trace`), a rank becomes a process, a track a thread (two if its spans overlap), the unsharded bytes
a counter. Worked example: an all-gather of unit 0 from 0 to 2 ms on rank 1 is
``{"ph": "X", "name": "AG 0", "pid": 1, "ts": 0, "dur": 2000}``.

*In torch:* the profiler writes Chrome traces of every operator, and its memory view shows the allocator. Neither
contains units, so the all-gather of block 3 is hard to find; this picture only contains units.

Spec: the paragraph "The tracer" at the head of the spec.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2

from minifsdp.engine.messages import message
from minifsdp.trace import Event
from minifsdp_tools.events import (
    STREAMS,
    EventsPerRank,
    from_zero,
    gathered_bytes,
    peak_gathered_bytes,
    rows_of,
)
from minifsdp_tools.formulas import size_of

__all__ = ["chrome_trace", "gathered_bytes", "peak_gathered_bytes", "svg"]

BOXES = ("F", "B", "AG", "RS", "AR")

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True
)
TEMPLATES.filters["px"] = "{:.1f}".format
# The macros of the template by their names, and ``meanings``: its description of each kind.
_SHAPES: Any = TEMPLATES.get_template("timeline.svg.jinja").module

# All in pixels.
_LEFT = 104
_RIGHT = 24
_ROW = 20
_GAP = 4
_MEMORY = 40
_STRIP = 10
_LETTER = 6.2


def svg(
    events_per_rank: EventsPerRank,
    *,
    origins: Sequence[float] | None = None,
    title: str = "What each rank did",
    width: int = 1200,
    seconds: float | None = None,
    num_bytes: int | None = None,
) -> str:
    """Draws the events as a picture, a complete SVG document without external resources.

    Args:
        events_per_rank: the events of rank 0, of rank 1, and so on.
        origins: each rank's clock, in seconds, at one shared moment; by default the time of its first event.
        title: a headline.
        width: the width in pixels; the height follows from the number of tracks.
        seconds: the time that the width stands for, to compare several pictures; by default the time of the last event.
        num_bytes: the unsharded bytes at the top of their tracks, to compare several pictures; by default the peak.

    Raises:
        ValueError: the number of origins is not the number of ranks, or the width is too small for a track.
    """
    least = 2 * (_LEFT + _RIGHT)
    if width < least:
        raise ValueError(message("timeline-width", width=width, least=least))
    ranks = from_zero(events_per_rank, origins)
    everything = [event for events in ranks for event in events]
    # A recording without events, or of a single moment, still has a width.
    seconds = (
        max((event.end for event in everything), default=0.0) or 1e-3
        if seconds is None
        else seconds
    )
    num_bytes = num_bytes or max(map(peak_gathered_bytes, ranks), default=0)
    used = {event.stream for event in everything}
    streams = [stream for stream in STREAMS if stream != "all_reduce" or stream in used]
    has_arrivals = any(event.arrived is not None for event in everything)
    captions = str(_SHAPES.captions(origins is not None, has_arrivals)).splitlines()
    kinds = {event.kind for event in everything}
    y = 56.0 + 16 * len(captions)
    legend = _legend(kinds, width, y)
    y = top = 14 + max((entry["y"] for entry in legend), default=y)
    drawn = []
    for rank, events in enumerate(ranks):
        tracks = _tracks(events, streams, y + 24, seconds / width, num_bytes)
        drawn.append({"name": f"rank {rank}", "y": y, "tracks": tracks})
        y = tracks[-1]["y"] + tracks[-1]["height"] + _GAP + 10

    def x(when: float) -> float:
        return _LEFT + (width - _LEFT - _RIGHT) * when / seconds

    boxes = [event for event in everything if event.kind in BOXES]
    labels = _labels([(one.kind, one.unit, x(one.end) - x(one.start)) for one in boxes])
    picture = _SHAPES.document(
        width=width,
        left=_LEFT,
        right=_RIGHT,
        top=top,
        bottom=y,
        title=title,
        order=sorted(ranks[0], key=lambda event: event.start) if ranks else [],
        captions=captions,
        legend=legend,
        ticks=_ticks(seconds),
        ranks=drawn,
        x=x,
        labels=labels,
        fits=_fits,
    )
    return str(picture)


def _legend(kinds: set[str], right: float, y: float) -> list[dict[str, Any]]:
    """The position and the label of each kind that occurs, in lines that end at ``right``."""
    legend: list[dict[str, Any]] = []
    x = 20.0
    for kind, meaning in _SHAPES.meanings.items():
        if kind in kinds:
            label = f"{kind} {meaning}"
            width = 42 + _LETTER * len(label)
            if x + width > right:
                x = 20.0
                y += 18
            legend.append(
                {"kind": kind, "is_box": kind in BOXES, "x": x, "y": y, "label": label}
            )
            x += width
    return legend


def _tracks(
    events: Sequence[Event],
    streams: Sequence[str],
    y: float,
    seconds_of_pixel: float,
    num_bytes: int,
) -> list[dict[str, Any]]:
    """The tracks of one rank from ``y`` down: their positions, and what is drawn on them."""
    tracks: list[dict[str, Any]] = []
    for stream in streams:
        mine = [event for event in events if event.stream == stream]
        boxes = [event for event in mine if event.kind in BOXES]
        # An overlap of half a pixel is invisible and does not need another row.
        rows = rows_of(boxes, 0.5 * seconds_of_pixel)
        strip = _ROW * (1 + max(rows, default=0))
        marks = [
            (event, y + strip + _STRIP / 2)
            for event in mine
            if event.kind not in BOXES and event.kind != "FREE"
        ]
        height = strip + (_STRIP if marks else 0)
        tracks.append(
            {
                "names": [stream.replace("_", "-")],
                "y": y,
                "height": height,
                "boxes": [
                    (event, y + _ROW * row)
                    for event, row in zip(boxes, rows, strict=True)
                ],
                "marks": marks,
            }
        )
        y += height + _GAP
        if stream == "gather":
            # Between the all-gathers and the memory, because a reshard ends the former and decreases the latter.
            marks += [(event, y + 1) for event in events if event.kind == "FREE"]
            tracks.append(_memory(events, y + _GAP, num_bytes))
            y += _MEMORY + 2 * _GAP
    return tracks


def _memory(events: Sequence[Event], y: float, num_bytes: int) -> dict[str, Any]:
    """The track of the unsharded bytes, as steps, with the same scale for all ranks."""
    peak = peak_gathered_bytes(events)
    scale = (_MEMORY - 4) / max(num_bytes, 1)
    return {
        "names": ["gathered", f"peak {size_of(peak)}"],
        "y": y,
        "height": _MEMORY,
        "stairs": [
            (seconds, y + _MEMORY - scale * held)
            for seconds, held in gathered_bytes(events)
            if peak
        ],
    }


def _labels(boxes: Sequence[tuple[str, str, float]]) -> dict[tuple[str, str], str]:
    """Labels by kind and unit, all of the same form, such as ``F blocks.block2``, ``F block2``, ``F 2`` or ``2``.

    It is the longest form that fits into two thirds of the boxes, or the shortest one if none does. Short names that
    two units have in common are not used.

    Args:
        boxes: kind, unit and width in pixels of each box.
    """
    full = {unit: unit or "root" for _, unit, _ in boxes}
    last = {unit: name.rpartition(".")[2] for unit, name in full.items()}
    number = {unit: re.sub(r"^\D+(?=\d+$)", "", name) for unit, name in last.items()}
    names = [
        full,
        *(short for short in (last, number) if len(set(short.values())) == len(full)),
    ]
    forms = [
        {(kind, unit): f"{kind} {form[unit]}" for kind, unit, _ in boxes}
        for form in names
    ]
    forms.append({(kind, unit): names[-1][unit] for kind, unit, _ in boxes})

    def fits(form: dict[tuple[str, str], str]) -> bool:
        return 3 * sum(
            _fits(form[kind, unit], width) for kind, unit, width in boxes
        ) >= 2 * len(boxes)

    return next(filter(fits, forms), forms[-1])


def _fits(label: str, width: float) -> bool:
    return _LETTER * len(label) + 6 <= width


def _ticks(seconds: float) -> list[tuple[float, str]]:
    """About ten round numbers of milliseconds, in seconds and as text."""
    # The smallest of 1, 2, 5, 10, 20, 50 and so on (or 0.5, 0.2, ...) that is large enough.
    rough = 1e3 * seconds / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(
        power * factor
        for factor in (1, 2, 5, 10)
        if power * factor >= rough * (1 - 1e-9)
    )
    digits = max(0, -math.floor(math.log10(step)))
    return [
        (number * step / 1e3, f"{number * step:.{digits}f}" + ("" if number else " ms"))
        for number in range(math.floor(1e3 * seconds / step + 1e-9) + 1)
    ]


# ---- as a trace ------------------------------------------------------------------------------------------------------


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
    ranks = enumerate(from_zero(events_per_rank, origins))
    items = [item for rank, events in ranks for item in _items(rank, events)]
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
