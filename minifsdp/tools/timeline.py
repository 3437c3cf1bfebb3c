"""Drawing what a recorder saw: a picture for the eye, a trace for a browser's zoom.

Both take the events of all ranks and return text; nothing is measured, opened or written here, so a picture is a pure
function of its events and a test can hold it to that.

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

Boxes of one lane may overlap in time (two gathers in flight). They then go to rows of their own, the first row that is
free; nothing is drawn over anything else.

**Clocks.** Each rank has a clock of its own, and the zeros of two ``perf_counter`` need have nothing to do with each
other. If the caller noted a time on each rank at a moment that all ranks shared, such as the end of a barrier, these
times go in as ``origins``. Without them each rank's first event becomes its zero, which hides how much later one rank
began than another; the caption says which of the two it is.

*In torch:* the profiler writes Chrome traces of every operator, and its memory view draws an allocator. It knows
nothing of units, so finding the gather of block 3 in it is detective work; here there is nothing but units.

Spec: the paragraph "The tracer" at the head of the spec.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from minifsdp.engine.messages import message
from minifsdp.trace import Event

__all__ = ["chrome_trace", "gathered_bytes", "peak_gathered_bytes", "svg"]

EventsPerRank = Sequence[Sequence[Event]]

LANES = ("compute", "gather", "reduce", "all_reduce")
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


# --- what both have in common ---


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


def _origins(events_per_rank: EventsPerRank, origins: Sequence[float] | None) -> list[float]:
    """The zero of each rank's clock."""
    if origins is None:
        return [min((event.start for event in events), default=0.0) for events in events_per_rank]
    if len(origins) != len(events_per_rank):
        raise ValueError(message("timeline-origins", ranks=len(events_per_rank), origins=len(origins)))
    return list(origins)


def _rows(events: Sequence[Event], tolerance: float) -> list[int]:
    """The row for each event: the lowest where it overlaps with none before it by more than ``tolerance`` seconds."""
    ends: list[float] = []
    rows = []
    for event in events:
        row = next((row for row, end in enumerate(ends) if end <= event.start + tolerance), len(ends))
        if row == len(ends):
            ends.append(event.end)
        ends[row] = event.end
        rows.append(row)
    return rows


def _name(unit: str) -> str:
    return unit or "root"


# --- for chrome://tracing and ui.perfetto.dev ---


def chrome_trace(events_per_rank: EventsPerRank, *, origins: Sequence[float] | None = None) -> dict[str, Any]:
    """The events in the Chrome trace event format, ready for ``json.dump``.

    A rank is a process, a lane a thread (two threads where spans of one lane overlap), the gathered bytes a counter.

    Args:
        events_per_rank: the events of rank 0, of rank 1, and so on.
        origins: what each rank's clock showed, in seconds, at one shared moment; by default that of its first event.

    Raises:
        ValueError: there is not one origin for each rank.
    """
    zeros = _origins(events_per_rank, origins)
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
        for event, row in zip(on_lane, _rows(on_lane, 0.0), strict=True):
            thread = 100 * number + row
            if thread not in named:
                named.add(thread)
                name = lane if row == 0 else f"{lane} ({row + 1})"
                yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
            yield _chrome_event(rank, thread, event, zero)


def _chrome_event(rank: int, thread: int, event: Event, zero: float) -> dict[str, Any]:
    item: dict[str, Any] = {
        "name": f"{event.kind} {_name(event.unit)}",
        "cat": event.kind,
        "pid": rank,
        "tid": thread,
        "ts": _micro(event.start - zero),
        "args": {"unit": event.unit, "bytes": event.num_bytes, "ranks": list(event.ranks), "dtype": _dtype(event)},
    }
    # Scope "t": the mark of a moment stays on its own thread and does not cross the whole window.
    duration = {"ph": "X", "dur": _micro(event.end - event.start)} if event.end > event.start else {"ph": "i", "s": "t"}
    return item | duration


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _dtype(event: Event) -> str:
    return "" if event.dtype is None else str(event.dtype).removeprefix("torch.")


# --- for the eye ---

# Light tints with a darker edge and text of the same hue; in the dark the other way round. Classes and not attributes,
# so that a page that shows the picture can choose: by the reader's setting, or by the scheme of the documentation.
_LIGHT = """--ink:#22272e;--soft:#667080;--line:#d9dee5;--band:#f5f7f9;--paper:#ffffff;
--F:#d7f0e3;--F-ink:#14694a;--B:#fde6c8;--B-ink:#8f4d05;--AG:#d9e6fb;--AG-ink:#234f9b;
--RS:#e8dcf8;--RS-ink:#5c3296;--AR:#f9d9e8;--AR-ink:#97225d;--FREE-ink:#c2372f;--WAIT-ink:#7d8694"""
_DARK = """--ink:#e4e8ee;--soft:#98a2b0;--line:#343b45;--band:#1b2027;--paper:#14181d;
--F:#123f30;--F-ink:#7fdcb5;--B:#4a3110;--B-ink:#f6bd72;--AG:#1a3560;--AG-ink:#9cc0f8;
--RS:#38245a;--RS-ink:#cbaaf5;--AR:#551d3a;--AR-ink:#f5a3c9;--FREE-ink:#ff8078;--WAIT-ink:#8b95a3"""
_STYLE = f"""
.minifsdp-timeline{{{_LIGHT};
font-family:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-size:12px}}
@media (prefers-color-scheme:dark){{.minifsdp-timeline{{{_DARK}}}}}
[data-md-color-scheme=default] .minifsdp-timeline{{{_LIGHT}}}
[data-md-color-scheme=slate] .minifsdp-timeline{{{_DARK}}}
.minifsdp-timeline .paper{{fill:var(--paper)}} .minifsdp-timeline .band{{fill:var(--band)}}
.minifsdp-timeline .grid{{stroke:var(--line)}} .minifsdp-timeline text{{fill:var(--ink)}}
.minifsdp-timeline .soft{{fill:var(--soft)}} .minifsdp-timeline .title{{font-size:16px;font-weight:600}}
.minifsdp-timeline .rank{{font-size:13px;font-weight:600}} .minifsdp-timeline .end{{text-anchor:end}}
.minifsdp-timeline .mid{{text-anchor:middle}} .minifsdp-timeline .box text{{font-size:11px;text-anchor:middle}}
.minifsdp-timeline .memory{{fill:var(--AG);stroke:var(--AG-ink);stroke-width:1}}
.minifsdp-timeline .FREE{{fill:var(--FREE-ink)}} .minifsdp-timeline .WAIT{{fill:var(--WAIT-ink)}}
.minifsdp-timeline .other{{fill:var(--soft)}}
""" + "".join(
    f".minifsdp-timeline .{kind} rect{{fill:var(--{kind});stroke:var(--{kind}-ink);stroke-width:.8}}"
    f" .minifsdp-timeline .{kind} text{{fill:var(--{kind}-ink)}}\n"
    for kind in BOXES
)

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
    zeros = _origins(events_per_rank, origins)
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
    return "\n".join([head, name, f"<style>{_STYLE}</style>", paper, *elements, "</svg>", ""])


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
    rows = _rows(boxes, 0.5 * sheet.seconds / sheet.width)
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
    name = _name(event.unit)
    for label in (f"{event.kind} {name}", name, name.rpartition(".")[2]):
        if _LETTER * len(label) + 6 <= width:
            return label
    return ""


def _tip(event: Event) -> str:
    """What appears under the pointer."""
    span = 1e3 * (event.end - event.start)
    parts = [f"{event.kind} {_name(event.unit)}", f"at {1e3 * event.start:.3f} ms"]
    parts += [f"for {span:.3f} ms"] if span > 0 else []
    parts += [f"{event.num_bytes:,} bytes"] if event.num_bytes else []
    parts += [_dtype(event)] if event.dtype is not None else []
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
