"""The drawings of the learning pages show values that the package computes, and are readable on a phone."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from docs_build.drawing import holdings, hooksteps, linkbytes, memorycurve, oneweight
from docs_build.drawing.sketch import size_of
from docs_build.drawing.sketches import SKETCHES, draw
from docs_build.reading.order import ROOT
from docs_build.reading.papers import zero_bytes
from docs_build.recording.lessons import recorded
from docs_build.tests.browser import Tab

GB = 10**9
PAGES = ("learn/why", "learn/hooks", "learn/strategies")


@pytest.mark.parametrize("num_ranks", [1, 4, 64])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rank_holds_bytes_of_zero_formula(stage: int, num_ranks: int) -> None:
    held = holdings.bytes_held(stage, num_ranks)
    assert sum(held.values()) == zero_bytes(GB, num_ranks, stage, low=4, optimizer=8)
    assert held["p"] == 4 * GB / (num_ranks if stage == 3 else 1)


def test_drawn_weight_has_row_shards_of_torch() -> None:
    rows = torch.arange(4).chunk(oneweight.NUM_RANKS)
    assert [oneweight.rows_of(rank) for rank in range(4)] == [part.tolist() for part in rows]
    # 64 MiB, a quarter of them, and the bytes that a ring all-gather sends.
    assert {"67.1 MB", "16.8 MB", "50.3 MB"} <= set(re.findall(r"[\d.]+ MB", draw("weight", "A weight.")))


@pytest.mark.parametrize("strategy", linkbytes.STRATEGIES)
def test_links_of_a_drawing_have_the_bytes_that_the_package_counts_and_the_tutorial_sent(strategy: str) -> None:
    drawn = linkbytes.links(strategy)
    summed = Counter[bool]()
    for (a, b), num_bytes in drawn.items():
        summed[a // 2 != b // 2] += num_bytes
    within, between = linkbytes.totals(strategy)
    assert (summed[False], summed[True]) == (4 * within, 4 * between)
    sent = {one.strategy: one for one in linkbytes.sent_in(recorded()["tutorials/hybrid.py"]["output"])}[strategy]
    # A model of 100,224 bytes.
    scale = linkbytes.NUM_PARAMETERS * 4 / 100_224
    assert {link: num_bytes * scale for link, num_bytes in sent.links.items()} == pytest.approx(drawn)


def test_full_shard_sends_more_through_the_network_than_a_hybrid_that_stores_more() -> None:
    # Calculated manually for 4 GB: three times 3/4 around the ring, half of which crosses; twice half of a half.
    html = draw("links", "Links.")
    assert "4.5 GB between machines. Between steps a rank stores 3 GB" in html
    assert "2 GB between machines. Between steps a rank stores 6 GB" in html


def test_drawn_steps_of_a_unit_equal_the_recorded_run() -> None:
    steps = {hook: hooksteps.Step(hook) for hook in hooksteps.STEPS}
    own = [
        [kind for kind, unit, begins, _ in step.happened if unit == hooksteps.UNIT and begins]
        for step in steps.values()
    ]
    assert own == [["AG", "F"], ["FREE"], ["B", "AG"], ["FREE", "RS"], []]
    assert [step.is_whole for step in steps.values()] == [True, False, True, False, False]
    assert [step.is_reducing for step in steps.values()] == [False, False, False, True, False]
    assert [bool(step.gradient) for step in steps.values()] == [False] * 4 + [True]


def test_a_size_has_three_figures() -> None:
    said = {12: "12 bytes", 66304: "66.3 kB", 999_999: "1 MB", 16e9: "16 GB", 5e12: "5,000 GB"}
    assert {num_bytes: size_of(num_bytes) for num_bytes in said} == said


def test_activations_are_drawn_above_stored_and_unsharded_memory() -> None:
    plain, checkpointed = memorycurve.simulated("none"), memorycurve.simulated("full")
    assert plain.result.stored_bytes == checkpointed.result.stored_bytes
    assert plain.peak == plain.result.peak_allocated > 1.5 * checkpointed.peak
    html = memorycurve.draw("")
    assert [f"peak {size_of(curve.peak)}" in html for curve in (plain, checkpointed)] == [True, True]


def test_every_drawing_is_on_a_page() -> None:
    text = "".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
    assert sorted(re.findall(r"^\{\{ sketch (\w+) \| .+ \}\}$", text, re.MULTILINE)) == sorted(SKETCHES)


@pytest.mark.parametrize("page", PAGES)
def test_drawings_are_readable_on_a_phone(site: Path, tab: Tab, page: str) -> None:
    tab.resize(390, 844)
    try:
        tab.open((site / f"{page}.html").as_uri())
        assert max(tab.each(".sketch-panel svg", "e.getBoundingClientRect().right")) <= 390
        # In pixels.
        assert min(tab.each(".sketch text", "parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a")) >= 9
    finally:
        tab.resize()
