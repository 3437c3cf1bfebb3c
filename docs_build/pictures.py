"""Pictures: the timeline of a recorded run, and the elements that each rank holds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

import torch

from docs_build import recordings
from minifsdp.tools import timeline
from minifsdp.trace import Event

__all__ = ["events_of", "figure", "longest", "timeline_figure"]


def events_of(key: str) -> list[list[Event]]:
    """The events of each rank of a recorded run."""
    return [[_event(*fields) for fields in rank["events"]] for rank in recordings.find(key)["ranks"]]


def _event(
    kind: str,
    unit: str,
    start: float,
    end: float,
    num_bytes: int,
    ranks: list[int],
    dtype: str,
    stream: str,
    arrived: float | None,
) -> Event:
    known = None if dtype == "None" else getattr(torch, dtype.removeprefix("torch."))
    return Event(kind, unit, start, end, num_bytes, tuple(ranks), known, stream, arrived)


def longest(keys: Iterable[str]) -> float | None:
    """The length of the longest of these runs in seconds, for pictures that share an axis."""
    return max((event.end for key in keys for events in events_of(key) for event in events), default=None)


def timeline_figure(key: str, caption: str, num_ranks: int = 1, seconds: float | None = None) -> str:
    """The timeline of the first ranks of a run, with a caption that contains the machine of the recording.

    Args:
        key: the run.
        caption: begins with a few words and a colon, period or comma; these words are the title of the picture.
        num_ranks: number of ranks to draw.
        seconds: the length of the axis; by default that of the run.
    """
    run = recordings.find(key)
    events = events_of(key)[:num_ranks]
    title = re.split(r"[:.,]( |$)", caption)[0]
    picture = timeline.svg(events, origins=[0.0] * len(events), title=title, width=840, seconds=seconds)
    return figure(picture, caption, _source_of(run, num_ranks))


def _source_of(run: dict[str, object], num_ranks: int) -> str:
    facts = run["run"]
    assert isinstance(facts, dict)
    shown = "rank 0 is shown" if num_ranks == 1 else f"{num_ranks} are shown"
    data = recordings.load()
    units = run["units"]
    assert isinstance(units, list)
    whole = sum(unit["bytes"] for unit in units) / 1e6
    when = f"Recorded on {data['date']} with {facts['ranks']} gloo ranks, {shown}; {data['machine']}."
    return f"The model: {whole:.2f} MB of parameters. {when}"


def figure(svg: str, caption: str, source: str) -> str:
    """An SVG with its caption, as wide as the page; on a phone it scrolls."""
    # Without width and height the picture has the width of the column; the viewBox keeps its proportions.
    svg = re.sub(r'(<svg[^>]*?) width="\d+" height="\d+"', r"\1", svg, count=1)
    return (
        f'<figure class="recorded"><div class="recorded-scroll" tabindex="0">{svg}</div>'
        f"<figcaption>{escape(caption)} <small>{escape(source)}</small></figcaption></figure>"
    ).replace("\n", " ")
