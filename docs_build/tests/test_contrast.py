"""Texts have enough contrast, in light and dark mode, with all folded parts open, and after a click."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs_build.tests.browser import Tab
from docs_build.tests.kinds import KINDS

SCRIPT = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")
UNFOLD = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
# Only the navigation and a heading.
FEWEST = {"404.html": 10}
# Pages in another state: with an error, with two runs, while slides are shown, with the result of a search.
STATES = [
    ("tools/calculator.html#ranks=-1", ""),
    ("tools/player.html#fsdp2-full-pre-block-2+fsdp1-hybrid-pre-block-4/60", ""),
    ("troubleshoot.html", "#paste-example"),
    *(
        pytest.param(f"teach/lecture-{number}.html", click, marks=pytest.mark.spec("TEACH-08"))
        for number in (1, 2)
        for click in ("", ".slides-start")
    ),
    pytest.param("streams.html", "#counterfactual-intact", marks=pytest.mark.spec("COUNTERFACTUAL-04")),
]


def contrasts(tab: Tab, selector: str) -> list[tuple[float, str]]:
    """Contrast and class of every visible element that contains text of its own, the lowest contrast first."""
    return [(ratio, name) for ratio, name in tab.look(f"{SCRIPT}({json.dumps(selector)})")]


@pytest.mark.parametrize("scheme", ["default", "slate"])
@pytest.mark.parametrize(("page", "click"), [*((page, "") for page in KINDS), *STATES])
def test_every_text_has_enough_contrast(address: str, tab: Tab, page: str, click: str, scheme: str) -> None:
    tab.open(address + page)
    tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}'); {UNFOLD}")
    if click:
        tab.wait_for(f"!!document.querySelector('{click}')")
        tab.click(click)
    found = contrasts(tab, "body *:not(:disabled, :hover, :focus)")
    assert len(found) >= FEWEST.get(page, 11)
    assert {name: round(ratio, 2) for ratio, name in reversed(found) if ratio < 4.5} == {}


def test_contrast_is_measured_with_the_boxes_behind_a_text_and_with_opacity(address: str, tab: Tab) -> None:
    tab.open(address + "learn/schedule.html")
    assert contrasts(tab, "article svg text, figcaption")[0][0] > 4.5
    tab.look("document.querySelectorAll('article svg .F rect').forEach((box) => { box.style.fill = '#14694a'; })")
    tab.look("document.querySelector('figcaption').style.opacity = 0.5")
    assert contrasts(tab, "article svg text")[0][0] < 1.5
    assert contrasts(tab, "figcaption")[0][0] < 4.5
