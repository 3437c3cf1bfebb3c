"""The section "Remove one line": its texts, and its pictures in a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs_build.tests.browser import Tab

ROOT = Path(__file__).resolve().parents[2]
RECORD: dict[str, Any] = json.loads((ROOT / "docs" / "data" / "counterfactual.json").read_text(encoding="utf-8"))
ENTRIES = {entry["name"]: entry for entry in RECORD["entries"]}
COLUMN = "Number(document.getElementById('counterfactual-column').value)"


@pytest.mark.needs("mkdocs")
@pytest.mark.spec("COUNTERFACTUAL-04")
def test_each_removed_line_has_code_result_and_a_check_that_detects_it() -> None:
    from docs_build.pages import counterfactual

    sections = counterfactual.section("streams.html").split('<section data-name="')[1:]
    for entry, section in zip(ENTRIES.values(), sections, strict=True):
        assert section.startswith(entry["name"])
        assert entry["lesson"] in section
        assert "Detected by " in section
        assert ("are wrong." in section) is bool(entry["race"])
        assert f'href="read/{entry["file"].replace(".py", ".html")}' in section
    with pytest.raises(KeyError):
        counterfactual.notices("no-such-break")


@pytest.mark.spec("COUNTERFACTUAL-04")
@pytest.mark.parametrize("page", ["streams.html", "tools/player.html"])
def test_each_choice_shows_its_text_and_draws_all_boxes(site: Path, tab: Tab, page: str) -> None:
    tab.open((site / page).as_uri())
    tab.wait_for("!!document.querySelector('#counterfactual-choice')")
    for name, entry in ENTRIES.items():
        tab.choose("#counterfactual-choice", name)
        assert tab.each(".counterfactual section", "e.dataset.name") == [name]
        assert len(tab.each(".cf-box")) == len(entry["boxes"])
        if entry["race"]:
            new = entry["boxes"][entry["race"]["new"][0]]
            assert tab.look(COLUMN) == new[2]
            assert "Too early: " in tab.text(".counterfactual-now")
    assert tab.problems() == []


@pytest.mark.spec("COUNTERFACTUAL-04")
def test_replay_is_operated_with_the_keyboard(site: Path, tab: Tab) -> None:
    tab.open((site / "streams.html").as_uri())
    tab.wait_for("!!document.querySelector('#counterfactual-choice')")
    tab.choose("#counterfactual-choice", "forward-does-not-wait")
    tab.focus("#counterfactual-column")
    tab.press("Home")
    assert tab.look(COLUMN) == 1
    # No later box is shown as wrong.
    assert tab.each(".cf-wrong") == []
    tab.press("ArrowRight")
    assert "48 of 48 elements that F0 writes are wrong." in tab.text(".counterfactual-now")
    tab.press("End")
    assert len(tab.each(".cf-wrong")) == sum(box[3] > 0 for box in ENTRIES["forward-does-not-wait"]["boxes"])


@pytest.mark.spec("COUNTERFACTUAL-04")
def test_the_kept_line_shows_the_intact_step(site: Path, tab: Tab) -> None:
    tab.open((site / "streams.html").as_uri())
    tab.wait_for("!!document.querySelector('#counterfactual-choice')")
    tab.choose("#counterfactual-choice", "unlimited-gathers")
    assert tab.text(".counterfactual-now").endswith(f"the peak is {ENTRIES['unlimited-gathers']['peak']:,}.")
    tab.click("#counterfactual-intact")
    intact = RECORD["intact"]["flat, 5 blocks"]
    assert tab.text(".counterfactual-now").endswith(f"the peak is {intact['peak']:,}.")
    assert len(tab.each(".cf-box")) == len(intact["boxes"])
