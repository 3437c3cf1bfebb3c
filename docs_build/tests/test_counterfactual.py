"""The section "Remove one line": its texts, and its pictures in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_build.recording.records import load
from docs_build.tests.browser import Tab

RECORD = load("counterfactual")
ENTRIES = {entry["name"]: entry for entry in RECORD["entries"]}

pytestmark = pytest.mark.spec("COUNTERFACTUAL-04")


def opened(tab: Tab, site: Path, page: str, choice: str) -> None:
    tab.open((site / page).as_uri())
    tab.choose("#counterfactual-choice", choice)


def test_each_removed_line_has_code_result_and_a_check_that_detects_it(site: Path) -> None:
    sections = (site / "streams.html").read_text(encoding="utf-8").split('<section data-name="')[1:]
    for entry, section in zip(ENTRIES.values(), sections, strict=True):
        assert section.startswith(entry["name"])
        assert "Detected by " in section
        assert ("are wrong." in section.partition("</section>")[0]) is bool(entry["race"])
        assert f'href="read/{entry["file"].replace(".py", ".html")}' in section


@pytest.mark.parametrize("page", ["streams.html", "tools/player.html"])
def test_each_choice_shows_its_text_and_draws_all_boxes(site: Path, tab: Tab, page: str) -> None:
    opened(tab, site, page, "unlimited-gathers")
    for name, entry in ENTRIES.items():
        tab.choose("#counterfactual-choice", name)
        assert tab.each(".counterfactual section", "e.dataset.name") == [name]
        assert len(tab.each(".cf-box")) == len(entry["boxes"])
        if entry["race"]:
            assert "Too early: " in tab.text(".counterfactual-now")
    assert tab.problems() == []


def test_replay_is_operated_with_the_keyboard(site: Path, tab: Tab) -> None:
    opened(tab, site, "streams.html", "forward-does-not-wait")
    tab.focus("#counterfactual-column")
    tab.press("Home")
    assert tab.value("counterfactual-column") == "1"
    # No later box is shown as wrong.
    assert tab.each(".cf-wrong") == []
    tab.press("ArrowRight")
    assert "48 of 48 elements that F0 writes are wrong." in tab.text(".counterfactual-now")
    tab.press("End")
    assert len(tab.each(".cf-wrong")) == sum(box[3] > 0 for box in ENTRIES["forward-does-not-wait"]["boxes"])


def test_the_kept_line_shows_the_intact_step(site: Path, tab: Tab) -> None:
    opened(tab, site, "streams.html", "unlimited-gathers")
    assert tab.text(".counterfactual-now").endswith(f"the peak is {ENTRIES['unlimited-gathers']['peak']:,}.")
    tab.click("#counterfactual-intact")
    intact = RECORD["intact"]["flat, 5 blocks"]
    assert tab.text(".counterfactual-now").endswith(f"the peak is {intact['peak']:,}.")
    assert len(tab.each(".cf-box")) == len(intact["boxes"])
