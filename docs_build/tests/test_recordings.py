"""The recorded runs of the pages: undisturbed, made with the current engine, and compared on one axis."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter

import pytest

from docs_build.drawing import pictures
from docs_build.reading import running
from docs_build.reading.order import ROOT
from docs_build.reading.source import read_module
from docs_build.recording import record, recordings
from spec_tests.harness import ranks

WIDE = "fsdp1-full-{}-block-2-wide"


@pytest.mark.parametrize("key", [key for key in recordings.load()["runs"] if key.endswith("-wide")])
def test_equal_blocks_take_about_the_same_time_and_data_arrives_during_its_collective(key: str) -> None:
    for events in pictures.events_of(key):
        assert record.unevenness(events) <= record.EVEN
        for event in events:
            if event.kind in ("AG", "RS"):
                assert event.start < event.arrived <= event.end


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
@ranks(2)
def test_engine_performs_the_recorded_steps(api: str) -> None:
    recorded = recordings.find(f"{api}-full-pre-block-2")
    found = json.loads(json.dumps(record.perform(recorded)))
    # Only the first rank gets the runs of all ranks.
    if found is not None:
        for mine, of_record in zip(found["ranks"], recorded["ranks"], strict=True):
            # Times differ, and the bytes of the optimizer are those of torch.
            seen, expected = ([[*m[:3], m[4], *m[6:8]] for m in rank["moments"]] for rank in (mine, of_record))
            assert seen == expected, "the engine has changed: python -m docs_build.recording.record --player"
            assert mine["pieces"] == of_record["pieces"]


@pytest.mark.parametrize("strategy", ["full", "zero2"])
@pytest.mark.parametrize("generation", "12")
def test_torch_run_has_same_events_as_ours(generation: str, strategy: str) -> None:
    ours, torchs = (recordings.find(f"{api}{generation}-{strategy}-pre-block-2") for api in ("fsdp", "torch"))
    assert ours["units"] == torchs["units"]
    for mine, other in zip(ours["ranks"], torchs["ranks"], strict=True):
        assert mine["pieces"] == other["pieces"]
        counted = [Counter((m[0], m[1], m[2], m[4]) for m in rank["moments"]) for rank in (mine, other)]
        assert counted[0] == counted[1]


def test_line_of_each_recorded_function_is_found_and_not_only_recording_code() -> None:
    found = {
        (*frame, not begins or kind == "FREE")
        for run in recordings.load()["runs"].values()
        for rank in run["ranks"]
        for kind, _, begins, *_, stack, _, _ in rank["moments"]
        for frame in map(tuple, stack)
    }
    assert len(found) > 50
    for name, function, anchor, text, has_ended in found:
        module = read_module(name)
        assert anchor in {row.anchor for row in module.rows}
        if not running.only_records(name, function):
            line = running.line_of(name, function, text, has_ended=has_ended)
            assert line in set(running.lines_of(name, function)) - module.recording


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
    page = (ROOT / "docs" / "learn" / "schedule.md").read_text(encoding="utf-8")
    pre, post, forward = map(WIDE.format, ("pre", "post", "forward"))
    assert {pre, post, forward} <= set(re.findall(r"^\{\{ timeline (\S+)", page, re.MULTILINE))
    assert overlaps("B", pre) == overlaps("F", forward) == 6 * [True]
    # The check also detects a run without prefetching.
    assert overlaps("B", post) == overlaps("F", pre) == 6 * [False]
