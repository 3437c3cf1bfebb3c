"""Pictures and traces are pure functions of the events, so their contents can be computed and compared."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifsdp.trace import Event
from minifsdp_tools.timeline import chrome_trace, gathered_bytes, peak_gathered_bytes, svg

SVG = "{http://www.w3.org/2000/svg}"
MILLI = 1e-3


def step_of_two_units(zero: float = 50.0) -> list[Event]:
    """The root and one block, 100 ms long, in the order in which FSDP with prefetching records them."""

    def span(kind: str, unit: str, start: float, end: float, num_bytes: int = 0, stream: str = "compute") -> Event:
        ranks, dtype = ((0, 1), torch.float32) if stream != "compute" else ((), None)
        return Event(kind, unit, zero + start * MILLI, zero + end * MILLI, num_bytes, ranks, dtype, stream)

    return [
        span("AG", "", 0, 5, 64, "gather"),
        span("F", "", 5, 40),
        span("AG", "blocks.0", 5, 10, 200, "gather"),
        span("F", "blocks.0", 10, 30),
        span("FREE", "blocks.0", 30, 30, 200),
        span("B", "", 40, 90),
        span("AG", "blocks.0", 40, 50, 200, "gather"),
        span("B", "blocks.0", 50, 85),
        span("FREE", "blocks.0", 85, 85, 200),
        span("RS", "blocks.0", 85, 95, 200, "reduce"),
        span("FREE", "", 90, 90, 64),
        span("RS", "", 90, 100, 64, "reduce"),
    ]


def boxes(picture: str) -> list[tuple[str, float, float, float, str]]:
    """Kind, left edge, top, width and label of every box, in the order of the file."""
    found = []
    for group in ET.fromstring(picture).iter(f"{SVG}g"):
        if not group.get("class", "").startswith("box "):
            continue
        rect, label = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        assert rect is not None
        left, top, width = (float(rect.get(name, "nan")) for name in ("x", "y", "width"))
        found.append((group.get("class", "")[4:], left, top, width, label.text or "" if label is not None else ""))
    return found


def texts(picture: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(picture).iter(f"{SVG}text")]


# --- memory ---


def test_all_gather_adds_bytes_and_reshard_subtracts_them() -> None:
    heights = [num_bytes for _, num_bytes in gathered_bytes(step_of_two_units())]

    assert heights == [64, 264, 64, 264, 64, 0]
    assert peak_gathered_bytes(step_of_two_units()) == 264


# --- the picture ---


def test_left_edge_and_width_of_a_box_are_proportional_to_time() -> None:
    found = boxes(svg([step_of_two_units()], width=1128))  # 104 + 24 of margin leave 1000 pixels for 100 ms.

    assert [(left, width) for kind, left, _, width, _ in found if kind == "F"] == [(154.0, 350.0), (204.0, 200.0)]
    assert [(left, width) for kind, left, _, width, _ in found if kind == "RS"] == [(954.0, 100.0), (1004.0, 100.0)]


def test_overlapping_boxes_are_in_different_rows() -> None:
    found = boxes(svg([step_of_two_units(), step_of_two_units()]))

    for top in {top for _, _, top, _, _ in found}:
        row = sorted((left, left + width) for _, left, other, width, _ in found if other == top)
        assert all(end <= start + 0.6 for (_, end), (start, _) in pairwise(row))


def test_origins_shift_later_rank_and_change_caption() -> None:
    picture = svg([step_of_two_units(50.0), step_of_two_units(7.02)], origins=[50.0, 7.0], width=1328)
    lefts = [left for kind, left, *_ in boxes(picture) if kind == "AG"]

    assert lefts[3] - lefts[0] == pytest.approx(200.0, abs=0.2)  # 20 of 120 ms on 1200 pixels.
    assert any("barrier" in text for text in texts(picture))


def test_reshards_have_marks_and_waits_of_the_rate_limiter_have_bars() -> None:
    events = [*step_of_two_units(), Event("WAIT", "blocks.0", 50.02, 50.03)]
    paths = list(ET.fromstring(svg([events], width=1128)).iter(f"{SVG}path"))
    # The first of each kind is in the legend. A mark is 7 pixels wide.
    marks, bars = ([path.get("d", "") for path in paths if path.get("class") == kind][1:] for kind in ("FREE", "WAIT"))
    assert [mark.split()[0] for mark in marks] == ["M400.5", "M950.5", "M1000.5"]
    assert bars[0].startswith("M304.0 ")
    assert "h100.0" in bars[0]


def test_all_reduce_track_appears_only_if_recorded() -> None:
    plain = step_of_two_units()
    hybrid = [*plain, Event("AR", "", 50.1, 50.11, 64, (0, 2), torch.float32, "all_reduce")]
    assert "AR all-reduce" not in texts(svg([plain]))
    assert "AR all-reduce" in texts(svg([hybrid]))


def test_short_label_is_never_shared_by_two_units() -> None:
    events = [Event("F", f"blocks.{n // 2}.linear{n % 2}", n, n + 1.0) for n in range(4)]
    assert [label for *_, label in boxes(svg([events], width=1200))][1] == "F blocks.0.linear1"
    assert [label for *_, label in boxes(svg([events], width=400))] == [""] * 4


@pytest.mark.spec("SAVE-09")
def test_names_are_escaped() -> None:
    picture = svg([[Event("F", 'a<b>&"c"', 0.0, 1.0)]], title="<&>")

    assert 'F a<b>&"c"' in texts(picture)
    assert "<&>" in texts(picture)


@pytest.mark.parametrize("events", [[], [[]], [[], [Event("FREE", "0", 3.0, 3.0, 8)]]])
def test_a_recording_with_nothing_in_it_still_gives_a_valid_picture(events: list[list[Event]]) -> None:
    assert ET.fromstring(svg(events)).tag == f"{SVG}svg"
    json.dumps(chrome_trace(events))


# --- the trace ---


def test_trace_has_process_per_rank_and_thread_per_stream() -> None:
    items = chrome_trace([step_of_two_units(), step_of_two_units()])["traceEvents"]
    named = {(item["pid"], item["args"]["name"]) for item in items if item["name"] == "thread_name"}

    assert {item["args"]["name"] for item in items if item["name"] == "process_name"} == {"rank 0", "rank 1"}
    assert {name for rank, name in named if rank == 1} == {"compute", "compute (2)", "gather", "reduce", "reduce (2)"}


def test_spans_moments_and_memory_follow_the_trace_event_format() -> None:
    items = json.loads(json.dumps(chrome_trace([step_of_two_units()])))["traceEvents"]
    spans = [item for item in items if item["ph"] == "X"]
    moments = [item for item in items if item["ph"] == "i"]
    counters = [item for item in items if item["ph"] == "C"]

    assert {item["ph"] for item in items} == {"M", "X", "i", "C"}
    assert (len(spans), len(moments), len(counters)) == (9, 3, 6)
    assert all({"name", "cat", "pid", "tid", "ts", "dur", "args"} <= item.keys() and item["dur"] > 0 for item in spans)
    assert max(item["args"]["bytes"] for item in counters) == 264
    first = next(item for item in spans if item["name"] == "AG blocks.0")
    assert first["ts"] == pytest.approx(5000)
    assert first["dur"] == pytest.approx(5000)
    assert first["args"] == {"unit": "blocks.0", "bytes": 200, "ranks": [0, 1], "dtype": "float32"}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30))
def test_spans_in_one_thread_of_a_trace_do_not_overlap(spans: list[tuple[int, int]]) -> None:
    events = [Event("AG", str(n), start, start + length, 8, stream="gather") for n, (start, length) in enumerate(spans)]
    items = [item for item in chrome_trace([events])["traceEvents"] if item["ph"] == "X"]

    assert len(items) == len(spans)
    for thread in {item["tid"] for item in items}:
        busy = sorted((item["ts"], item["ts"] + item["dur"]) for item in items if item["tid"] == thread)
        assert all(end <= start for (_, end), (start, _) in pairwise(busy))
