"""The drawings of the learning pages show values that the package computes, and are readable on a phone."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from docs_build.drawing import holdings, hooksteps, linkbytes, memorycurve, oneweight
from docs_build.drawing.sketch import bar, size_of
from docs_build.drawing.sketches import SKETCHES, draw
from docs_build.reading.order import ROOT
from docs_build.reading.papers import zero_bytes
from docs_build.recording.lessons import recorded
from docs_build.tests.browser import Tab
from docs_build.tests.contrast import contrasts

GB = 10**9
# The drawings of each page.
PAGES = {
    "learn/why": ["weight", "holdings", "bars", "activations"],
    "learn/hooks": ["hooks", *hooksteps.STEPS],
    "learn/strategies": ["links"],
}


def bars_of(html: str, kind: str) -> list[tuple[float, float]]:
    """Start and width of each bar of a kind."""
    found = re.findall(rf'<rect class="{kind}" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', html)
    return [(float(x), float(width)) for x, width in found]


@pytest.mark.parametrize("num_ranks", [1, 4, 64])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rank_holds_bytes_of_zero_formula(stage: int, num_ranks: int) -> None:
    held = holdings.bytes_held(stage, num_ranks)
    assert sum(held.values()) == zero_bytes(GB, num_ranks, stage, low=4, optimizer=8)
    assert held["p"] == 4 * GB / (num_ranks if stage == 3 else 1)


def test_drawn_shards_of_all_ranks_form_full_bar() -> None:
    *_, last = draw("holdings", "Held.").split('class="sketch-panel"')
    for kind in "pgo":
        parts = bars_of(last, kind)
        # Each rank's shard begins, in its own box, where the previous rank's shard ends in the previous box.
        assert parts == [(room + rank * 18, 18) for rank, (room, _) in enumerate(bars_of(last, "absent")[::3])]


def test_drawn_weight_has_row_shards_of_torch() -> None:
    rows = torch.arange(4).chunk(oneweight.NUM_RANKS)
    assert [oneweight.rows_of(rank) for rank in range(4)] == [part.tolist() for part in rows]
    html = draw("weight", "A weight.")
    # 64 MiB, a quarter of them, and the bytes that a ring all-gather sends.
    assert {"67.1 MB", "16.8 MB", "50.3 MB"} <= set(re.findall(r"[\d.]+ MB", html))


@pytest.mark.parametrize("strategy", linkbytes.STRATEGIES)
def test_links_of_a_drawing_have_the_bytes_that_the_package_counts(strategy: str) -> None:
    summed = Counter[bool]()
    for (a, b), num_bytes in linkbytes.links(strategy).items():
        summed[a // 2 != b // 2] += num_bytes
    within, between = linkbytes.totals(strategy)
    assert (summed[False], summed[True]) == (4 * within, 4 * between)


def test_full_shard_sends_more_through_the_network_than_a_hybrid_that_stores_more() -> None:
    # Calculated manually for 4 GB: three times 3/4 around the ring, half of which crosses; twice half of a half.
    assert linkbytes.totals("FULL_SHARD") == (4.5 * GB, 4.5 * GB)
    assert linkbytes.totals("HYBRID_SHARD") == (6 * GB, 2 * GB)
    html = draw("links", "Links.")
    assert "4.5 GB between machines. Between steps a rank stores 3 GB" in html
    assert "2 GB between machines. Between steps a rank stores 6 GB" in html


def test_hybrid_sketch_shows_recorded_bytes_per_link() -> None:
    run = recorded()["tutorials/hybrid.py"]
    found = {sent.strategy: sent for sent in linkbytes.sent_in(run["output"])}
    assert list(found) == linkbytes.STRATEGIES
    hybrid = found["HYBRID_SHARD"]
    # A model of 100,224 bytes. Each rank sends three times half of it within a machine and twice half of a half across.
    assert (hybrid.within, hybrid.between, hybrid.stored) == (150_336, 50_112, 50_112)
    for strategy, sent in found.items():
        crossing = sum(num_bytes for (a, b), num_bytes in sent.links.items() if a // 2 != b // 2)
        assert crossing == 4 * sent.between, strategy
        # The package computes the same, scaled to the size of the model.
        model = linkbytes.NUM_PARAMETERS * 4 / 100_224
        assert {link: num_bytes * model for link, num_bytes in sent.links.items()} == pytest.approx(
            linkbytes.links(strategy)
        )


@pytest.mark.needs("mkdocs")
def test_page_of_the_hybrid_tutorial_shows_the_drawing() -> None:
    from docs_build.pages.lessonpage import lesson_page

    page = lesson_page("tutorials/hybrid.py")
    assert page.count('class="sketch-panel"') == 4
    assert "50.1 kB between machines. Between steps a rank stores 50.1 kB" in page


def test_drawn_steps_of_a_unit_equal_the_recorded_run() -> None:
    steps = {hook: hooksteps.after(hook) for hook in hooksteps.STEPS}
    own = {hook: [kind for kind, unit, begins, _ in step.happened if unit == hooksteps.UNIT and begins]
           for hook, step in steps.items()}  # fmt: skip
    assert own == {
        "pre_forward": ["AG", "F"],
        "leave_forward": ["FREE"],
        "pre_backward": ["B", "AG"],
        "post_backward": ["FREE", "RS"],
        "end_backward": [],
    }
    assert [step.is_whole for step in steps.values()] == [True, False, True, False, False]
    assert [step.is_reducing for step in steps.values()] == [False, False, False, True, False]
    assert [bool(step.gradient) for step in steps.values()] == [False] * 4 + [True]


def test_step_draws_full_bars_or_half_of_each_rank() -> None:
    assert [width for _, width in bars_of(draw("pre_forward", "Whole."), "p")] == [hooksteps.WHOLE] * 2
    (first, half), (second, same) = bars_of(draw("leave_forward", "Cut."), "p")
    assert half == same == hooksteps.WHOLE / 2
    assert second - first == hooksteps.WHOLE + 12 + half
    assert [width for _, width in bars_of(draw("end_backward", "Cut."), "g")] == [hooksteps.WHOLE / 2] * 2


def test_storyboard_shows_all_steps_of_a_unit_in_their_order() -> None:
    html = draw("hooks", "All.")
    assert re.findall(r'class="sketch-title">([^<]*)<', html) == list(hooksteps.TITLES.values())
    for panel, hook in zip(html.split('class="sketch-panel"')[1:], hooksteps.STEPS, strict=True):
        (alone,) = draw(hook, "One.").split('class="sketch-panel"')[1:]
        for kind in "pg":
            drawn = [width / 56 for _, width in bars_of(panel, kind)]
            assert drawn == [width / hooksteps.WHOLE for _, width in bars_of(alone, kind)]
        words = re.search(r'class="sketch-text">([^<]*)<', panel)
        assert words
        assert words[1] in alone


def test_kinds_of_bytes_differ_in_more_than_colour() -> None:
    stripes = [re.findall(r"[vh]", bar(kind, 0, 0, 40, 40).partition(' d="')[2])[:1] for kind in "pgo"]
    assert stripes == [[], ["v"], ["h"]]


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [(12, "12 bytes"), (66304, "66.3 kB"), (999_999, "1 MB"), (16e9, "16 GB"), (5e12, "5,000 GB")],
)
def test_a_size_has_three_figures(num_bytes: float, said: str) -> None:
    assert size_of(num_bytes) == said


def test_activations_are_drawn_above_stored_and_unsharded_memory() -> None:
    plain, checkpointed = memorycurve.simulated("none"), memorycurve.simulated("full")
    assert plain.result.stored_bytes == checkpointed.result.stored_bytes
    assert plain.peak == plain.result.peak_allocated > 1.5 * checkpointed.peak
    # Activations grow until the end of forward: the peak is in the middle of the step.
    when = next(time for time, size in plain.allocated if size == plain.peak)
    assert 0.2 < when / plain.result.seconds < 0.6
    html = memorycurve.draw("")
    assert [f"peak {size_of(curve.peak)}" in html for curve in (plain, checkpointed)] == [True, True]
    # Per panel: all memory is drawn first, then the unsharded parameters over it, then the stored state.
    assert re.findall(r'<path class="([gpo])" d="M8 154', html) == list("gpogpo")


def test_every_drawing_is_on_a_page() -> None:
    for page, names in PAGES.items():
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        assert re.findall(r"^\{\{ sketch (\w+) \| .+ \}\}$", text, re.MULTILINE) == names
    assert sorted(name for names in PAGES.values() for name in names) == sorted(SKETCHES)


@pytest.mark.docs
@pytest.mark.needs("mkdocs")
@pytest.mark.parametrize("page", PAGES)
def test_drawings_are_readable_on_a_phone_and_in_dark_theme(site: Path, tab: Tab, page: str) -> None:
    tab.resize(390, 844)
    tab.open((site / f"{page}.html").as_uri())
    panels = "[...document.querySelectorAll('.sketch-panel svg')]"
    assert tab.look(f"{panels}.length") >= len(PAGES[page])
    # No panel is wider than the window, and no text is smaller than 9 pixels.
    assert tab.look(f"{panels}.every(e => e.getBoundingClientRect().right <= 390)")
    size = "parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a"
    assert tab.look(f"Math.min(...[...document.querySelectorAll('.sketch text')].map(t => {size}))") >= 9
    for scheme in ("default", "slate"):
        tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
        ratio, name = contrasts(tab, ".sketch p, .sketch li, .sketch figcaption, .sketch small")[0]
        assert ratio >= 4.5, (scheme, name)
    tab.resize(1280, 900)
