"""The recorded runs of the pages: undisturbed, made with the current engine, and compared on one axis."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from docs_build.drawing import pictures
from docs_build.reading import running
from docs_build.reading.source import read_module
from docs_build.recording import record, recordings, watching
from minifsdp import fully_shard
from minifsdp.trace import Event
from spec_tests.harness import ranks

DOCS = Path(__file__).resolve().parents[2] / "docs"
WIDE = "fsdp1-full-{}-block-2-wide"


@pytest.mark.parametrize("key", [key for key in recordings.load()["runs"] if key.endswith("-wide")])
def test_equal_blocks_take_about_the_same_time_and_data_arrives_during_its_collective(key: str) -> None:
    for events in pictures.events_of(key):
        assert record.unevenness(events) <= record.EVEN
        for event in events:
            if event.kind in ("AG", "RS"):
                assert event.start < event.arrived <= event.end


def test_step_disturbed_by_another_program_counts_as_uneven() -> None:
    lengths = {"0": 2.7, "1": 29.0, "2": 2.9}
    events = [Event("F", f"stage.block{name}", 0.0, length) for name, length in lengths.items()]
    assert record.unevenness(events) == pytest.approx(29.0 / 2.7)


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2", "torch1", "torch2"])
@ranks(2)
def test_engine_performs_the_recorded_steps(api: str) -> None:
    run = record.Run(api, "full", "pre", "block", 2)
    found = json.loads(json.dumps(record.perform(run)))

    def compared(moment: list[Any]) -> list[Any]:
        # Times differ, and torch's running functions and memory are not recorded.
        return moment[:3] if run.is_torch else [*moment[:3], moment[4], *moment[6:8]]

    # Only the first rank gets the runs of all ranks.
    if found is not None:
        for mine, of_record in zip(found["ranks"], recordings.find(run.key)["ranks"], strict=True):
            assert list(map(compared, mine["moments"])) == list(map(compared, of_record["moments"])), (
                "the engine has changed: python -m docs_build.recording.record --player"
            )
            assert mine["pieces"] == of_record["pieces"]


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


def test_line_of_each_recorded_function_is_found_and_not_only_recording_code() -> None:
    found = set()
    for run in recordings.load()["runs"].values():
        for kind, _, begins, *_, stack, _, _ in (moment for rank in run["ranks"] for moment in rank["moments"]):
            found |= {(*frame, not begins or kind == "FREE") for frame in map(tuple, stack)}
    assert len(found) > 50
    for name, function, anchor, text, has_ended in found:
        module = read_module(name)
        assert anchor in {row.anchor for row in module.rows}
        if not running.only_records(name, function):
            line = running.line_of(name, function, text, has_ended=has_ended)
            assert line not in module.recording | {0}
            assert line in running.lines_of(name, function)


def test_shown_line_is_the_started_or_finished_operation() -> None:
    lines = read_module("engine/unit.py").text.splitlines()
    begun = running.line_of(
        "engine/unit.py", "Unit.unshard", "events.recorder.all_gather_begins(self)", has_ended=False
    )
    ended = running.line_of("engine/unit.py", "Unit.wait", 'events.recorder.end("AG", self.name)', has_ended=True)
    assert lines[begun - 1].strip() == "self._handle = self.layout.all_gather(self.root.comm_streams)"
    assert lines[ended - 1].strip() == "handle.wait()"


@ranks(2)
def test_unsharded_gradient_counts_while_memory_is_held() -> None:
    model = fully_shard(torch.nn.Linear(8, 8, bias=False))
    whole = watching.WatchedUnit(record.units_of(model)[0])
    model(torch.ones(2, 8)).sum()
    assert whole.whole_bytes() == 0
    gradient = torch.ones(8, 8)
    packed = gradient.view(64)
    whole.see([gradient, packed])
    # Two tensors share one storage.
    assert whole.whole_bytes() == 256
    del gradient, packed
    assert whole.whole_bytes() == 0


@pytest.mark.needs("mkdocs")
def test_timelines_of_one_page_share_an_axis_with_runs_of_as_many_ranks() -> None:
    from docs_build.pages.directives import expand
    from docs_build.pages.raw import put_back

    keys = [WIDE.format("pre"), WIDE.format("post"), "fsdp1-hybrid-pre-block-4-wide"]
    assert pictures.comparable(keys[0], keys) == keys[:2]
    page = put_back(expand("\n\n".join(f"{{{{ timeline {key} | A }}}}" for key in keys[:2]), "learn/x.html"))
    ends = [re.findall(r'soft mid">([\d.]+)', figure)[-1] for figure in page.split("<figure")[1:]]
    assert ends[0] == ends[1]


def overlaps(kind: str, key: str) -> list[bool]:
    """Whether the all-gather of each block, on each rank, began before the end of the previous block's computation."""
    found = []
    for events in pictures.events_of(key):
        blocks = [event for event in events if event.kind == kind and "block" in event.unit]
        for earlier, later in itertools.pairwise(blocks):
            gathers = [one.start for one in events if (one.kind, one.unit) == ("AG", later.unit)]
            # The last all-gather of the block before it computes.
            found.append(max(start for start in gathers if start < later.start) < earlier.end)
    return found


def test_prefetch_pictures_show_overlapping_all_gathers() -> None:
    page = (DOCS / "learn" / "schedule.md").read_text(encoding="utf-8")
    pre, post, forward = map(WIDE.format, ("pre", "post", "forward"))
    assert {pre, post, forward} <= set(re.findall(r"^\{\{ timeline (\S+)", page, re.MULTILINE))
    assert overlaps("B", pre) == overlaps("F", forward) == 6 * [True]
    # The check also detects a run without prefetching.
    assert overlaps("B", post) == overlaps("F", pre) == 6 * [False]


def test_every_kind_in_a_focus_has_a_style() -> None:
    style = (DOCS / "assets" / "css" / "site.css").read_text(encoding="utf-8")
    pages = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "learn").glob("*.md"))
    used = {kind for kinds in re.findall(r"\| focus=([\w ]+) \|", pages) for kind in kinds.split()}
    assert used >= {"AG", "RS", "memory"}
    assert [kind for kind in used if f'[data-focus~="{kind}"] .minifsdp-timeline .{kind}' not in style] == []


def test_size_of_a_model_is_that_of_its_stored_parameters() -> None:
    keys = ("fsdp1-full-pre-block-2-wide", "fsdp1-full-pre-block-2-bf16-wide")
    wide, narrow = (pictures.timeline_figure(key, "A") for key in keys)
    said = re.search(r"The model: [\d.]+ MB of parameters", wide)
    assert said
    assert said[0] in narrow
