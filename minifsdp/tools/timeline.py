"""Drawing what a recorder saw: a picture for the eye. The trace for a browser's zoom is in ``chrome_trace.py``.

It takes the events of all ranks and returns text; nothing is measured or written here, so a picture is a pure function
of its events and a test can hold it to that. How it looks is in ``timeline.css``.

Worked example, one rank and one unit of 8 float32 parameters, in milliseconds::

    AG 0  from 0 to 2, 32 bytes        rank 0               0        2           5 ms
    F 0   from 2 to 5                           compute              [   F 0   ]
    FREE  at 5                                  gather      [  AG 0  ]         v      v is the FREE
                                                gathered    ####################____

How to read such a picture:

1. *compute* is what the CPU thread was busy with. A box that lies under a longer one ran inside it: the forward of a
   block inside the forward of the root.
2. *gather* and *reduce* are collectives, from their issue until they were waited for. Where such a box lies under
   a compute box, communication was hidden behind computation; where compute has a gap above it, it was not.
3. *gathered* is the memory that holds full parameters: each gather adds, each free takes away. The saw teeth are the
   reason why anybody shards. A prefetch makes them higher and the gaps narrower, and that is its whole trade.

What overlaps, and how clocks are compared, is told in ``events.py``; without a shared moment each rank's first event
becomes its zero, which hides how much later one rank began than another. The caption says which of the two it is.

*In torch:* the profiler writes Chrome traces of every operator, and its memory view draws an allocator. It knows
nothing of units, so finding the gather of block 3 in it is detective work; here there is nothing but units.

Spec: the paragraph "The tracer" at the head of the spec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from minifsdp.engine.messages import message
from minifsdp.tools.events import (
    LANES,
    EventsPerRank,
    dtype_of,
    gathered_bytes,
    name_of,
    origins_of,
    peak_gathered_bytes,
    rows_of,
)
from minifsdp.trace import Event

MEANINGS = {
    "F": "forward",
    "B": "backward",
    "AG": "all-gather",
    "RS": "reduce-scatter",
    "AR": "all-reduce",
    "FREE": "free",
    "WAIT": "held back by the rate limiter",
    "H2D": "copied to the device",
    "D2H": "copied to the CPU",
    "BCAST": "broadcast",
}
BOXES = ("F", "B", "AG", "RS", "AR")


# Light tints with a darker edge and text of the same hue; in the dark the other way round. Classes and not attributes,
# so that a page that shows the picture can choose: by the reader's setting, or by the scheme of the documentation.
_STYLE = Path(__file__).with_name("timeline.css").read_text(encoding="utf-8")

# All in pixels.
_LEFT, _RIGHT = 104, 24
_ROW, _GAP, _MEMORY, _STRIP = 20, 4, 40, 10
_LETTER = 6.2


@dataclass
class _Sheet:
    """The paper: collects elements, and knows where a time lies.

    Args:
        width: of the whole picture, in pixels.
        seconds: the time from the left edge of the lanes to their right edge.
    """

    width: int
    seconds: float

    def __post_init__(self) -> None:
        self.bands: list[str] = []
        self.elements: list[str] = []

    def x(self, seconds: float) -> float:
        """Where a time, counted from the origin, lies on the paper."""
        return _LEFT + (self.width - _LEFT - _RIGHT) * seconds / self.seconds

    def add(self, element: str) -> None:
        """Puts an element on top of the others."""
        self.elements.append(element)

    def band(self, y: float, height: float) -> None:
        """Lays the ground of a lane, below all elements and below the grid."""
        across = self.width - _LEFT - _RIGHT
        self.bands.append(f'<rect class="band" x="{_LEFT}" y="{y:.1f}" width="{across}" height="{height:.1f}"/>')

    def text(self, x: float, y: float, text: str, classes: str = "") -> None:
        """Writes ``text`` with its baseline at ``y``."""
        named = f' class="{classes}"' if classes else ""
        self.add(f'<text x="{x:.1f}" y="{y:.1f}"{named}>{escape(text)}</text>')


def svg(
    events_per_rank: EventsPerRank,
    *,
    origins: Sequence[float] | None = None,
    title: str = "What each rank did",
    width: int = 1200,
) -> str:
    """The events as a picture, a complete SVG document that needs nothing from outside.

    Args:
        events_per_rank: the events of rank 0, of rank 1, and so on.
        origins: what each rank's clock showed, in seconds, at one shared moment; by default that of its first event.
        title: a headline.
        width: in pixels; the height follows from the number of lanes.

    Raises:
        ValueError: there is not one origin for each rank, or the width leaves no room for a lane.
    """
    if width < 2 * (_LEFT + _RIGHT):
        raise ValueError(message("timeline-width", width=width))
    zeros = origins_of(events_per_rank, origins)
    shifted = [[_moved(event, zero) for event in events] for events, zero in zip(events_per_rank, zeros, strict=True)]
    everything = [event for events in shifted for event in events]
    # A recording without events, or of a single moment, still has a width.
    sheet = _Sheet(width, max((event.end for event in everything), default=0.0) or 1e-3)
    lanes = [lane for lane in LANES if lane != "all_reduce" or any(event.lane == lane for event in everything)]
    largest = max((peak_gathered_bytes(events) for events in shifted), default=0)
    top = y = _draw_heading(sheet, title, everything, shared_zero=origins is not None)
    for rank, events in enumerate(shifted):
        y = _draw_rank(sheet, y, rank, events, lanes, largest)
    grid = _grid(sheet, top, y)
    return _document(width, y + 34, title, sheet.bands + grid + sheet.elements)


def _moved(event: Event, zero: float) -> Event:
    return Event(
        event.kind,
        event.unit,
        event.start - zero,
        event.end - zero,
        event.num_bytes,
        event.ranks,
        event.dtype,
        event.lane,
    )


def _document(width: int, height: float, title: str, elements: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="minifsdp-timeline" role="img" width="{width}" '
        f'height="{height:.0f}" viewBox="0 0 {width} {height:.0f}">'
    )
    paper = f'<rect class="paper" width="{width}" height="{height:.0f}" rx="6"/>'
    name = f"<title>{escape(title)}</title>"
    return "\n".join([head, name, f"<style>\n{_STYLE}</style>", paper, *elements, "</svg>", ""])


def _draw_heading(sheet: _Sheet, title: str, events: Sequence[Event], *, shared_zero: bool) -> float:
    """Title, caption and legend; returns where they end."""
    sheet.text(20, 30, title, "title")
    zero = "the end of a barrier that all ranks shared" if shared_zero else "each rank's own first event"
    sheet.text(20, 50, f"Milliseconds of the CPU clock since {zero}.", "soft")
    sheet.text(20, 66, "A collective lasts from its issue until it was waited for.", "soft")
    return _draw_legend(sheet, 88.0, events)


def _draw_legend(sheet: _Sheet, y: float, events: Sequence[Event]) -> float:
    """What the kinds mean, of those that occur; returns where it ends."""
    x = 20.0
    for kind, meaning in MEANINGS.items():
        if not any(event.kind == kind for event in events):
            continue
        label = f"{kind} {meaning}"
        width = 22 + _LETTER * len(label) + 20
        if x + width > sheet.width:
            x, y = 20.0, y + 18
        if kind in BOXES:
            sheet.add(f'<g class="{kind}"><rect x="{x:.1f}" y="{y - 10:.1f}" width="16" height="11" rx="2"/></g>')
        else:
            sheet.add(_mark(kind, x, y - 4.5, width=16) if kind == "WAIT" else _mark(kind, x + 8, y - 4.5))
        sheet.text(x + 22, y, label, "soft")
        x += width
    return y + 14


def _draw_rank(
    sheet: _Sheet, y: float, rank: int, events: Sequence[Event], lanes: Sequence[str], largest: int
) -> float:
    """Draws all lanes of one rank from ``y`` down; returns where they end."""
    sheet.text(20, y + 15, f"rank {rank}", "rank")
    y += 24
    for lane in lanes:
        y = _draw_lane(sheet, y, lane, [event for event in events if event.lane == lane])
        if lane == "gather":
            # Between the gathers and the memory, because a free ends the one and takes from the other.
            for event in events:
                if event.kind == "FREE":
                    sheet.add(_mark("FREE", sheet.x(event.start), y + 1, _tip(event)))
            y += _GAP
            y = _draw_memory(sheet, y, events, largest)
    return y + 10


def _draw_lane(sheet: _Sheet, y: float, lane: str, events: Sequence[Event]) -> float:
    boxes = [event for event in events if event.kind in BOXES]
    marks = [event for event in events if event.kind not in BOXES and event.kind != "FREE"]
    # Half a pixel of overlap is nothing that the eye could see, and not worth a row.
    rows = rows_of(boxes, 0.5 * sheet.seconds / sheet.width)
    ground = y + _ROW * (1 + max(rows, default=0))
    height = ground - y + (_STRIP if marks else 0)
    sheet.band(y, height)
    sheet.text(_LEFT - 10, y + _ROW / 2 + 4, lane.replace("_", "-"), "soft end")
    for event, row in zip(boxes, rows, strict=True):
        sheet.add(_box(sheet, event, y + _ROW * row))
    for event in marks:
        width = sheet.x(event.end) - sheet.x(event.start)
        sheet.add(_mark(event.kind, sheet.x(event.start), ground + _STRIP / 2, _tip(event), width))
    return y + height + _GAP


def _box(sheet: _Sheet, event: Event, y: float) -> str:
    x = sheet.x(event.start)
    width = max(sheet.x(event.end) - x, 1.0)
    label = _label(event, width)
    text = f'<text x="{x + width / 2:.1f}" y="{y + 14:.1f}">{escape(label)}</text>' if label else ""
    return (
        f'<g class="box {event.kind}"><title>{escape(_tip(event))}</title><rect x="{x:.1f}" y="{y + 1:.1f}" '
        f'width="{width:.1f}" height="{_ROW - 2}" rx="2.5"/>{text}</g>'
    )


def _label(event: Event, width: float) -> str:
    """The longest name of the box that fits into it: with its kind, in full, or only the last part; or none."""
    name = name_of(event.unit)
    for label in (f"{event.kind} {name}", name, name.rpartition(".")[2]):
        if _LETTER * len(label) + 6 <= width:
            return label
    return ""


def _tip(event: Event) -> str:
    """What appears under the pointer."""
    span = 1e3 * (event.end - event.start)
    parts = [f"{event.kind} {name_of(event.unit)}", f"at {1e3 * event.start:.3f} ms"]
    parts += [f"for {span:.3f} ms"] if span > 0 else []
    parts += [f"{event.num_bytes:,} bytes"] if event.num_bytes else []
    parts += [dtype_of(event)] if event.dtype is not None else []
    parts += ["ranks " + " ".join(map(str, event.ranks))] if event.ranks else []
    return ", ".join(parts)


def _mark(kind: str, x: float, y: float, tip: str = "", width: float = 0.0) -> str:
    """A moment, as a small triangle that points down from where it happened; a wait, as a bar of its length."""
    classes = kind if kind in ("FREE", "WAIT") else "other"
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    shape = f"M{x:.1f} {y - 2:.1f}h{max(width, 1.5):.1f}v4H{x:.1f}z" if kind == "WAIT" else ""
    return f'<path class="{classes}" d="{shape or f"M{x - 3.5:.1f} {y - 3:.1f}h7l-3.5 6z"}">{inside}</path>'


def _draw_memory(sheet: _Sheet, y: float, events: Sequence[Event], largest: int) -> float:
    """The staircase of gathered bytes, to one scale for all ranks."""
    peak = peak_gathered_bytes(events)
    sheet.band(y, _MEMORY)
    sheet.text(_LEFT - 10, y + 14, "gathered", "soft end")
    sheet.text(_LEFT - 10, y + 30, f"peak {_size(peak)}", "soft end")
    if peak:
        floor = y + _MEMORY
        stairs = gathered_bytes(events)
        path = f"M{sheet.x(stairs[0][0]):.1f} {floor:.1f}"
        for seconds, num_bytes in stairs:
            path += f"H{sheet.x(seconds):.1f}V{floor - (_MEMORY - 4) * num_bytes / largest:.1f}"
        sheet.add(f'<path class="memory" d="{path}H{sheet.width - _RIGHT}V{floor:.1f}z"/>')
    return y + _MEMORY + _GAP


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} B"


def _grid(sheet: _Sheet, top: float, bottom: float) -> list[str]:
    """Vertical lines at round numbers of milliseconds, and these numbers below."""
    paper = _Sheet(sheet.width, sheet.seconds)
    step = _round_step(1e3 * sheet.seconds / 10)
    digits = max(0, -math.floor(math.log10(step)))
    for number in range(math.floor(1e3 * sheet.seconds / step + 1e-9) + 1):
        x = paper.x(number * step / 1e3)
        paper.add(f'<line class="grid" x1="{x:.1f}" y1="{top + 20:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"/>')
        paper.text(x, bottom + 16, f"{number * step:.{digits}f}" + (" ms" if number == 0 else ""), "soft mid")
    return paper.elements


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, 50 and so on (or 0.5, 0.2, ...) that is at least ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
