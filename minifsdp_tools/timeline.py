"""Draws the events of a recorder as an SVG picture. ``chrome_trace.py`` converts them for a trace viewer.

It takes the events of all ranks and returns text. Nothing is measured or written, so tests can check the result. This
module computes positions; the template ``timeline.svg.jinja`` and ``timeline.css`` define the style.

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

*In torch:* the profiler writes Chrome traces of every operator, and its memory view shows the allocator. Neither
contains units, so the all-gather of block 3 is hard to find; this picture only contains units.

Spec: the paragraph "The tracer" at the head of the spec.
"""

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2

from minifsdp.engine.messages import message
from minifsdp.trace import Event
from minifsdp_tools.chrome_trace import chrome_trace
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
TEMPLATES.filters |= {"px": "{:.1f}".format, "fill": textwrap.fill}
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


class _Sheet:
    """The drawing: collects shapes, and converts times and numbers of bytes to positions.

    Args:
        width: the width of the whole picture, in pixels.
        seconds: the time from the left edge of the tracks to their right edge.
        num_bytes: the number of unsharded bytes at the top of their track.
        events: all events of the picture, for the labels.

    Attributes:
        labels: the label of each box by its kind and unit.
        ground: bands and grid, drawn below all other shapes.
        shapes: the others, the first at the bottom.
    """

    def __init__(
        self,
        width: int,
        seconds: float,
        num_bytes: int = 0,
        events: Iterable[Event] = (),
    ) -> None:
        self.width = width
        self.seconds = seconds
        self.num_bytes = num_bytes
        boxes = [event for event in events if event.kind in BOXES]
        self.labels = _labels(
            [(one.kind, one.unit, self.x(one.end) - self.x(one.start)) for one in boxes]
        )
        self.ground: list[str] = []
        self.shapes: list[str] = []

    def x(self, seconds: float) -> float:
        """The horizontal position of a time, counted from the origin."""
        return _LEFT + (self.width - _LEFT - _RIGHT) * seconds / self.seconds

    def text(self, x: float, y: float, classes: str, *lines: str) -> None:
        """Writes lines below each other, the first with its baseline at ``y``."""
        self.shapes.append(_SHAPES.lines(x, y, lines, classes))

    def stream(self, y: float, height: float, *names: str) -> None:
        """Draws the background of a track, and its names to the left of it."""
        self.ground.append(_SHAPES.band(_LEFT, y, self.width - _LEFT - _RIGHT, height))
        self.text(_LEFT - 10, y + 14, "soft end", *names)

    def mark(self, event: Event, y: float) -> None:
        """Marks a moment or a wait."""
        x = self.x(event.start)
        self.shapes.append(
            _SHAPES.mark(event.kind, x, y, _SHAPES.tip(event), self.x(event.end) - x)
        )

    def finished(self, height: float, title: str, events: Sequence[Event] = ()) -> str:
        """The complete SVG document; a description for screen readers gives the order of ``events``."""
        return str(
            _SHAPES.document(
                self.width,
                height,
                title,
                sorted(events, key=lambda event: event.start),
                self.ground + self.shapes,
            )
        )


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
    sheet = _Sheet(
        width,
        seconds,
        num_bytes or max(map(peak_gathered_bytes, ranks), default=0),
        everything,
    )
    used = {event.stream for event in everything}
    streams = [stream for stream in STREAMS if stream != "all_reduce" or stream in used]
    has_arrivals = any(event.arrived is not None for event in everything)
    captions = str(_SHAPES.captions(origins is not None, has_arrivals)).splitlines()
    top = y = _draw_heading(sheet, everything, title, *captions)
    for rank, events in enumerate(ranks):
        y = _draw_rank(sheet, y, f"rank {rank}", events, streams)
    _draw_grid(sheet, top, y)
    return sheet.finished(y + 34, title, ranks[0] if ranks else ())


def _draw_heading(
    sheet: _Sheet, events: Sequence[Event], title: str, *captions: str
) -> float:
    """Draws title, captions, and a legend of the kinds that occur; returns the position below them."""
    sheet.text(20, 30, "title", title)
    sheet.text(20, 50, "soft", *captions)
    x = 20.0
    y = 56.0 + 16 * len(captions)
    kinds = {event.kind for event in events}
    for kind, meaning in _SHAPES.meanings.items():
        if kind in kinds:
            label = f"{kind} {meaning}"
            width = 42 + _LETTER * len(label)
            if x + width > sheet.width:
                x = 20.0
                y = y + 18
            sheet.shapes.append(_SHAPES.key(kind, kind in BOXES, x, y, label))
            x += width
    return y + 14


def _draw_rank(
    sheet: _Sheet, y: float, name: str, events: Sequence[Event], streams: Sequence[str]
) -> float:
    """Draws all tracks of one rank from ``y`` down; returns the position below them."""
    sheet.text(20, y + 15, "rank", name)
    y += 24
    for stream in streams:
        y = _draw_stream(
            sheet,
            y,
            stream.replace("_", "-"),
            [event for event in events if event.stream == stream],
        )
        if stream == "gather":
            # Between the all-gathers and the memory, because a reshard ends the former and decreases the latter.
            for event in events:
                if event.kind == "FREE":
                    sheet.mark(event, y + 1)
            y = _draw_memory(sheet, y + _GAP, events)
    return y + 10


def _draw_stream(sheet: _Sheet, y: float, name: str, events: Sequence[Event]) -> float:
    boxes = [event for event in events if event.kind in BOXES]
    marks = [
        event for event in events if event.kind not in BOXES and event.kind != "FREE"
    ]
    # An overlap of half a pixel is invisible and does not need another row.
    rows = rows_of(boxes, 0.5 * sheet.seconds / sheet.width)
    strip = _ROW * (1 + max(rows, default=0))
    height = strip + (_STRIP if marks else 0)
    sheet.stream(y, height, name)
    for event, row in zip(boxes, rows, strict=True):
        x = sheet.x(event.start)
        width = max(sheet.x(event.end) - x, 1.0)
        there = None if event.arrived is None else sheet.x(event.arrived)
        label = sheet.labels[event.kind, event.unit]
        label = label if _fits(label, width) else ""
        sheet.shapes.append(_SHAPES.box(event, x, y + _ROW * row, width, label, there))
    for event in marks:
        sheet.mark(event, y + strip + _STRIP / 2)
    return y + height + _GAP


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


def _draw_memory(sheet: _Sheet, y: float, events: Sequence[Event]) -> float:
    """Draws the unsharded bytes as steps, with the same scale for all ranks."""
    peak = peak_gathered_bytes(events)
    floor = y + _MEMORY
    sheet.stream(y, _MEMORY, "gathered", f"peak {size_of(peak)}")
    if peak:
        scale = (_MEMORY - 4) / sheet.num_bytes
        stairs = [
            (sheet.x(seconds), floor - scale * num_bytes)
            for seconds, num_bytes in gathered_bytes(events)
        ]
        sheet.shapes.append(_SHAPES.memory(stairs, floor, sheet.width - _RIGHT))
    return floor + _GAP


def _draw_grid(sheet: _Sheet, top: float, bottom: float) -> None:
    """Vertical lines at round numbers of milliseconds, and these numbers below."""
    # About ten numbers: the smallest of 1, 2, 5, 10, 20, 50 and so on (or 0.5, 0.2, ...) that is large enough.
    rough = 1e3 * sheet.seconds / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(
        power * factor
        for factor in (1, 2, 5, 10)
        if power * factor >= rough * (1 - 1e-9)
    )
    digits = max(0, -math.floor(math.log10(step)))
    for number in range(math.floor(1e3 * sheet.seconds / step + 1e-9) + 1):
        time = f"{number * step:.{digits}f}" + (" ms" if number == 0 else "")
        sheet.ground.append(
            _SHAPES.tick(sheet.x(number * step / 1e3), top + 20, bottom, time)
        )
