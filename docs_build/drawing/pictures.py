"""Pictures: the timeline of a recorded run, and the elements that each rank holds."""

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import torch

from docs_build.recording import recordings
from minifsdp.trace import Event
from minifsdp_tools import timeline
from minifsdp_tools.events import peak_gathered_bytes


def events_of(key: str) -> list[list[Event]]:
    """The events of each rank of a recorded run."""
    return [[_event(*fields) for fields in rank["events"]] for rank in recordings.find(key)["ranks"]]


def _event(*fields: Any) -> Event:
    *first, ranks, dtype, stream, arrived = fields
    known = None if dtype == "None" else getattr(torch, dtype.removeprefix("torch."))
    return Event(*first, tuple(ranks), known, stream, arrived)


def longest(keys: Iterable[str]) -> float | None:
    """The length of the longest of these runs in seconds, for pictures that share an axis."""
    return max((event.end for key in keys for events in events_of(key) for event in events), default=None)


def comparable(key: str, keys: Iterable[str]) -> list[str]:
    """The runs among these with the number of ranks of the first one."""
    num_ranks = recordings.find(key)["run"]["ranks"]
    return [other for other in keys if recordings.find(other)["run"]["ranks"] == num_ranks]


# The template of a timeline: its descriptions of the kinds, and its text for screen readers.
_WORDS: Any = timeline.TEMPLATES.get_template("timeline.svg.jinja").module


def timeline_figure(
    key: str, caption: str, num_ranks: int = 1, others: Sequence[str] = (), focus: Sequence[str] = ()
) -> str:
    """The timeline of the first ranks of a run, with a caption that names the machine of the recording.

    Args:
        key: the run.
        caption: begins with a few words and a colon, period or comma; these words are the title of the picture.
        num_ranks: number of ranks to draw.
        others: runs on the same page, for common axes of time and memory.
        focus: the kinds of events that the page is about, or ``memory``; everything else is pale.
    """
    run, data = recordings.find(key), recordings.load()
    events = events_of(key)[:num_ranks]
    title = re.split(r"[:.,]( |$)", caption)[0]
    peaks = [peak_gathered_bytes(one) for other in (key, *others) for one in events_of(other)]
    seconds = longest([key, *others])
    picture = timeline.svg(
        events, origins=[0.0] * len(events), title=title, width=840, seconds=seconds, num_bytes=max(peaks)
    )
    shown = "rank 0 is shown" if num_ranks == 1 else f"{num_ranks} are shown"
    source = _highlighted(focus) + f"The model: {_size(run, events)}. Recorded on {data['date']} with "
    source += f"{run['run']['ranks']} gloo ranks, {shown}; {data['machine']}."
    return figure(picture, caption, source, focus)


def _size(run: dict[str, Any], events: list[list[Event]]) -> str:
    """The size of the model. The stored parameters are float32, also if a run gathers them in another dtype."""
    size = sum(unit["bytes"] for unit in run["units"]) / 1e6
    dtypes = {event.dtype for event in events[0] if event.kind == "AG" and event.dtype is not None}
    if dtypes <= {torch.float32}:
        return f"{size:.2f} MB of parameters"
    (dtype,) = dtypes
    stored = size * torch.float32.itemsize / dtype.itemsize
    return f"{stored:.2f} MB of parameters in float32, which are {size:.2f} MB after the cast to {str(dtype)[6:]}"


def _highlighted(focus: Sequence[str]) -> str:
    """A sentence for the legend."""
    words = [{**_WORDS.meanings, "memory": "memory of gathered parameters"}[kind] for kind in focus]
    return f"Highlighted: {', '.join(words)}; everything else is pale. " if words else ""


_TIP = re.compile(r"<title>([A-Z][A-Z0-9]*) (\S+), at ([\d.]+) ms")


def described(svg: str) -> str:
    """A stored timeline, with the description that new timelines have; it is computed from the tooltips of rank 0."""
    if "<desc>" in svg:
        return svg
    tips = _TIP.findall(svg.partition(">rank 1</text>")[0])
    events = [Event(kind, unit, float(at), float(at)) for kind, unit, at in sorted(tips, key=lambda tip: float(tip[2]))]
    return svg.replace("</title>", f"</title>\n<desc>{_WORDS.description(events)}</desc>", 1)


def scrolling(svg: str) -> str:
    """An SVG as wide as its column. On a phone it scrolls, by touch and by keyboard."""
    # Without width and height the picture has the width of the column; the viewBox keeps its proportions.
    svg = re.sub(r'(<svg[^>]*?) width="\d+" height="\d+"', r"\1", svg, count=1)
    name = svg.partition("<title>")[2].partition("</title>")[0].replace('"', "&quot;")
    return f'<div class="recorded-scroll" tabindex="0" role="region" aria-label="{name}">{svg}</div>'


def figure(svg: str, caption: str, source: str, focus: Sequence[str] = ()) -> str:
    """An SVG with its caption; ``focus`` are the classes of the shapes to highlight."""
    attribute = f' data-focus="{escape(" ".join(focus))}"' if focus else ""
    return (
        f'<figure class="recorded"{attribute}>{scrolling(svg)}'
        f"<figcaption>{escape(caption)} <small data-search-exclude>{escape(source)}</small></figcaption></figure>"
    ).replace("\n", " ")
