"""The recorded runs of the pages: undisturbed, made with the current engine, and compared on one axis."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from docs_build.drawing import pictures
from docs_build.reading import running
from docs_build.reading.source import read_module
from docs_build.recording import record, recordings, watching
from minifsdp import fully_shard
from minifsdp.trace import Event
from minifsdp_tools.events import peak_gathered_bytes
from spec_tests.harness import ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"
LAST_TICK = re.compile(r'<text x="([\d.]+)"[^>]*>([\d.]+)</text>(?!.*mid">[\d.]+<)', re.DOTALL)


@pytest.mark.parametrize("key", [key for key in recordings.load()["runs"] if key.endswith("-wide")])
def test_equal_blocks_take_about_the_same_time(key: str) -> None:
    assert all(record.unevenness(events) <= record.EVEN for events in pictures.events_of(key))


def test_step_disturbed_by_another_program_counts_as_uneven() -> None:
    lengths = {"0": 2.7, "1": 29.0, "2": 2.9}
    events = [Event("F", f"stage.block{name}", 0.0, length) for name, length in lengths.items()]
    assert record.unevenness(events) == pytest.approx(29.0 / 2.7)


def test_collectives_in_picture_have_arrival_times() -> None:
    for events in pictures.events_of("fsdp1-full-pre-block-2-wide"):
        collectives = [event for event in events if event.kind in ("AG", "RS")]
        assert collectives
        for event in collectives:
            assert event.arrived is not None
            assert event.start < event.arrived <= event.end


def performed_and_recorded(api: str) -> Iterator[tuple[Any, Any]]:
    """A new run of an API and its record, for each rank. Only the first rank gets the runs of all ranks."""
    run = record.Run(api, "full", "pre", "block", 2)
    found = record.perform(run)
    assert (found is None) == (dist.get_rank() == 1)
    if found is not None:
        yield from zip(found["ranks"], recordings.find(run.key)["ranks"], strict=True)


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
@ranks(2)
def test_engine_performs_the_recorded_steps(api: str) -> None:
    for mine, of_record in performed_and_recorded(api):
        kinds = [(moment[0], moment[1], moment[2], moment[4], moment[6:8]) for moment in mine["moments"]]
        before = [(moment[0], moment[1], moment[2], moment[4], moment[6:8]) for moment in of_record["moments"]]
        # Compare as in the file, where tuples are lists.
        assert [str(kind).replace("(", "[").replace(")", "]") for kind in kinds] == [
            str(kind).replace("(", "[").replace(")", "]") for kind in before
        ], "the engine has changed: python -m docs_build.recording.record --player"


@pytest.mark.parametrize("api", ["torch1", "torch2"])
@ranks(2)
def test_torch_performs_the_recorded_steps(api: str) -> None:
    for mine, of_record in performed_and_recorded(api):
        assert [moment[:3] for moment in map(list, mine["moments"])] == [m[:3] for m in of_record["moments"]]
        assert mine["pieces"] == [[tuple(piece) for piece in unit] for unit in of_record["pieces"]]


@pytest.mark.parametrize("strategy", ["full", "zero2"])
@pytest.mark.parametrize("generation", "12")
def test_torch_run_has_same_events_as_ours(generation: str, strategy: str) -> None:
    runs = [recordings.find(f"{api}{generation}-{strategy}-pre-block-2") for api in ("fsdp", "torch")]
    assert runs[0]["units"] == runs[1]["units"]
    for ours, torchs in zip(*(run["ranks"] for run in runs), strict=True):
        assert ours["pieces"] == torchs["pieces"]
        counted = [Counter((m[0], m[1], m[2], m[4]) for m in rank["moments"]) for rank in (ours, torchs)]
        assert counted[0] == counted[1]
        # At the end of both runs the optimizer uses the same gradients, and no other memory is left.
        left = [[held[2:] for held in rank["moments"][-1][7]] for rank in (ours, torchs)]
        assert left[0] == left[1]


def test_recorded_functions_have_their_source_rows() -> None:
    for run in recordings.load()["runs"].values():
        frames = {tuple(frame) for rank in run["ranks"] for moment in rank["moments"] for frame in moment[6]}
        for name, _, anchor, _ in frames:
            assert anchor in {row.anchor for row in read_module(name).rows}


def test_line_of_each_recorded_function_is_found_and_not_only_recording_code() -> None:
    found = set()
    for run in recordings.load()["runs"].values():
        for kind, _, begins, *_, stack, _, _ in (moment for rank in run["ranks"] for moment in rank["moments"]):
            for name, function, _, text in stack:
                if not running.only_records(name, function):
                    found.add((name, function, text, not begins or kind == "FREE"))
    assert len(found) > 50
    for name, function, text, has_ended in found:
        line = running.line_of(name, function, text, has_ended=has_ended)
        assert line not in read_module(name).recording | {0}
        assert line in running.lines_of(name, function)


def test_shown_line_is_the_started_or_finished_operation() -> None:
    lines = read_module("engine/unit.py").text.splitlines()
    begun = running.line_of(
        "engine/unit.py", "Unit.unshard", "events.recorder.all_gather_begins(self)", has_ended=False
    )
    ended = running.line_of("engine/unit.py", "Unit.wait", 'events.recorder.end("AG", self.name)', has_ended=True)
    assert lines[begun - 1].strip() == "self._handle = self.layout.all_gather(self.root.comm_streams)"
    assert lines[ended - 1].strip() == "handle.wait()"
    assert running.line_of("engine/unit.py", "Unit.wait", "what is there no more", has_ended=True) == 0


@ranks(2)
def test_unsharded_gradient_counts_while_memory_is_held() -> None:
    model = fully_shard(torch.nn.Linear(8, 8, bias=False))
    unit = record.units_of(model)[0]
    whole = watching.WatchedUnit(unit)
    model(torch.ones(2, 8)).sum()
    assert whole.whole_bytes() == 0
    gradient = torch.ones(8, 8)
    packed = gradient.view(64)
    whole.see([gradient, packed])
    # Two tensors share one storage.
    assert whole.whole_bytes() == 256
    del gradient, packed
    assert whole.whole_bytes() == 0
    assert whole.pieces() == [[(0.0, 0.5)], [(0.5, 1.0)]][dist.get_rank()]


@pytest.mark.needs("mkdocs")
def test_timelines_of_one_page_share_an_axis() -> None:
    from docs_build.pages.directives import expand
    from docs_build.pages.raw import put_back

    text = "{{ timeline fsdp1-full-pre-block-2-wide | A }}\n\n{{ timeline fsdp1-full-off-block-2-wide | B }}\n"
    page = put_back(expand(text, "learn/x.html"))
    longest = pictures.longest(["fsdp1-full-pre-block-2-wide", "fsdp1-full-off-block-2-wide"])
    assert longest is not None
    last = [found.rpartition(">")[2] for found in re.findall(r'soft mid">[\d.]+', page)]
    ends = [float(tick) for tick, following in zip(last, [*last[1:], "0"], strict=True) if float(following or 0) == 0]
    assert len(ends) == 2
    assert ends[0] == ends[1]
    assert ends[0] <= 1e3 * longest


@pytest.mark.needs("mkdocs")
def test_timelines_of_one_page_share_the_scale_of_memory_and_not_the_axis_of_other_ranks() -> None:
    from docs_build.pages.directives import expand
    from docs_build.pages.raw import put_back

    keys = ["fsdp1-full-pre-block-2-wide", "fsdp1-full-post-block-2-wide", "fsdp1-hybrid-pre-block-4-wide"]
    assert pictures.comparable(keys[0], keys) == keys[:2]
    page = put_back(expand("\n\n".join(f"{{{{ timeline {key} | A }}}}" for key in keys), "learn/x.html"))
    figures = page.split("<figure")[1:]
    assert [figure.count('class="memory"') for figure in figures] == [1, 1, 1]

    def height(figure: str) -> float:
        path = re.search(r'class="memory" d="([^"]+)"', figure)
        assert path
        floor, *ups = map(float, re.findall(r"(?:M[\d.]+ |V)([\d.]+)", path[1]))
        return floor - min(ups)

    peaks = [peak_gathered_bytes(pictures.events_of(key)[0]) for key in keys[:2]]
    assert height(figures[1]) / height(figures[0]) == pytest.approx(peaks[1] / peaks[0], abs=0.02)


def begun_before_the_end_of(kind: str, key: str) -> list[list[bool]]:
    """For each rank, whether the all-gather of each block except the first began while the previous block computed.

    Args:
        kind: ``F`` for forward, ``B`` for backward.
        key: key of the run.
    """
    found = []
    for events in pictures.events_of(key):
        blocks = [event for event in events if event.kind == kind and "block" in event.unit]
        gathers = [event for event in events if event.kind == "AG"]
        begun = []
        for earlier, later in itertools.pairwise(blocks):
            # The last all-gather of the block before it computes.
            gather = max(one.start for one in gathers if one.unit == later.unit and one.start < later.start)
            begun.append(gather < earlier.end)
        found.append(begun)
    return found


ALL, NONE = 2 * [3 * [True]], 2 * [3 * [False]]


def test_prefetch_pictures_show_overlapping_all_gathers() -> None:
    page = (DOCS / "learn" / "schedule.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\{\{ timeline (\S+)", page, re.MULTILINE)
    pre, post, forward = (f"fsdp1-full-{prefetch}-block-2-wide" for prefetch in ("pre", "post", "forward"))
    assert {pre, post, forward} <= set(shown)
    assert begun_before_the_end_of("B", pre) == ALL
    assert begun_before_the_end_of("F", forward) == ALL
    # The check also detects a run without prefetching.
    assert begun_before_the_end_of("B", post) == begun_before_the_end_of("F", pre) == NONE


@pytest.mark.needs("mkdocs")
def test_picture_with_a_focus_names_its_highlighted_part() -> None:
    from docs_build.pages.directives import expand
    from docs_build.pages.raw import put_back

    line = "{{ timeline fsdp1-full-pre-block-2-wide 2 | focus=B RS | One step: both ranks. }}"
    page = put_back(expand(line, "learn/x.html"))
    assert '<figure class="recorded" data-focus="B RS">' in page
    assert "<title>One step</title>" in page
    assert "<figcaption>One step: both ranks. <small>Highlighted: backward, reduce-scatter; everything else" in page
    assert "data-focus" not in pictures.timeline_figure("fsdp1-full-pre-block-2-wide", "A")
    with pytest.raises(KeyError, match="XY"):
        pictures.timeline_figure("fsdp1-full-pre-block-2-wide", "A", focus=["XY"])


def test_every_kind_in_a_focus_has_a_style() -> None:
    style = (DOCS / "assets" / "css" / "site.css").read_text(encoding="utf-8")
    pages = [path.read_text(encoding="utf-8") for path in (DOCS / "learn").glob("*.md")]
    used = {kind for page in pages for kinds in re.findall(r"\| focus=([\w ]+) \|", page) for kind in kinds.split()}
    assert used >= {"AG", "RS", "memory"}
    assert all(f'[data-focus~="{kind}"] .minifsdp-timeline .{kind}' in style for kind in used)


def test_size_of_a_model_is_that_of_its_stored_parameters() -> None:
    wide, narrow = (pictures.timeline_figure(f"fsdp1-full-pre-block-2{kind}-wide", "A") for kind in ("", "-bf16"))
    said = re.search(r"The model: [\d.]+ MB of parameters", wide)
    assert said
    assert said[0] in narrow
    assert "MB after the cast to bfloat16. Recorded on" in narrow
