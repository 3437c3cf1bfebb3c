"""Texts have enough contrast, in light and dark mode, with all folded parts open, and after a click."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_build.tests.browser import Tab

SCRIPT = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")
UNFOLD = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
# One page of each kind.
KINDS = (
    "index learn/why learn/schedule streams read/index read/engine/unit read/verbs read/path tutorials/index "
    "tutorials/overlap lab/slow_rank tools/player tools/calculator tools/placement tools/explain troubleshoot myths "
    "moving/from-ddp glossary evidence api spec design benchmarks"
)
# Pages in another state: with an error, with two runs, while slides are shown, with the result of a search.
STATES = [
    ("tools/calculator.html#ranks=-1", ""),
    ("tools/player.html#fsdp2-full-pre-block-2+fsdp1-hybrid-pre-block-4/60", ""),
    ("troubleshoot.html", "#paste-example"),
    pytest.param("teach/lecture-1.html", "", marks=pytest.mark.spec("TEACH-08")),
    pytest.param("teach/lecture-1.html", ".slides-start", marks=pytest.mark.spec("TEACH-08")),
    pytest.param("streams.html", "#counterfactual-intact", marks=pytest.mark.spec("COUNTERFACTUAL-04")),
]


@pytest.mark.parametrize("scheme", ["default", "slate"])
@pytest.mark.parametrize(("page", "click"), [*((f"{page}.html", "") for page in KINDS.split()), *STATES])
def test_every_text_has_enough_contrast(address: str, tab: Tab, page: str, click: str, scheme: str) -> None:
    tab.open(address + page)
    tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}'); {UNFOLD}")
    if click:
        tab.wait_for(f"!!document.querySelector('{click}')")
        tab.click(click)
    # The contrast and the class of every visible element with a text of its own.
    found = tab.look(f"{SCRIPT}('body *:not(:disabled, :hover, :focus)')")
    assert len(found) > 10
    assert {name: round(ratio, 2) for ratio, name in found if ratio < 4.5} == {}
