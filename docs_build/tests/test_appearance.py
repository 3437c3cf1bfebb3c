"""Pages as readers see them: contrast, links to anchors, definitions of terms, on a phone and on paper."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs_build.pages import glossary
from docs_build.reading.source import read_module
from docs_build.tests.browser import Tab
from minifsdp.engine.messages import PAGE

# ---- contrast ----

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


@pytest.mark.parametrize(("page", "click"), [*((f"{page}.html", "") for page in KINDS.split()), *STATES])
def test_every_text_has_enough_contrast(address: str, tab: Tab, page: str, click: str) -> None:
    tab.open(address + page)
    tab.look(UNFOLD)
    if click:
        tab.click(click)
    for scheme in ("default", "slate"):
        tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
        # The contrast and the class of every visible element with a text of its own.
        found = tab.look(f"{SCRIPT}('body *:not(:disabled, :hover, :focus)')")
        assert len(found) > 10
        assert {name: round(ratio, 2) for ratio, name in found if ratio < 4.5} == {}, scheme


# ---- links to anchors, and terms ----

# Whether an element is on the screen, below the header and other fixed elements, and its beginning is not covered.
IN_SIGHT = """((id) => {
    const e = document.getElementById(id), b = e.getBoundingClientRect();
    const bars = [...document.querySelectorAll('.md-header, .spec-filter')].map((bar) => bar.getBoundingClientRect());
    if (!b.height || b.top < Math.max(...bars.map((bar) => bar.bottom)) - 1 || b.top + 10 > innerHeight) return false;
    const top = document.elementFromPoint(b.left + Math.min(20, b.width / 2), b.top + Math.min(12, b.height / 2));
    return e === top || e.contains(top) || top.contains(e);
})"""
# Headings, requirements, definitions, documented names, and rows of code.
ANCHOR = r'<(?:h[2-5]|dt|tr|section|div class="spec-row")\b[^>]*\bid="([^"]+)"'
UNIT = read_module("engine/unit.py").text.splitlines()
# The second line is folded.
LINES = [f"L{n}" for n, text in enumerate(UNIT, 1) if "self.layout.all_gather(" in text or "all_gather_begins" in text]
TARGETS = {PAGE: [], "glossary.html": [], "api.html": [], "spec.html": [], "read/engine/unit.html": LINES}


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("page", TARGETS)
def test_link_target_is_visible(site: Path, address: str, tab: Tab, page: str, width: int) -> None:
    found = re.findall(ANCHOR, (site / page).read_text(encoding="utf-8").partition("<article")[2])
    tab.resize(width, 900)
    for id in (found[0], found[len(found) // 2], found[-1], *TARGETS[page]):
        tab.open(f"{address}{page}#{id}")
        tab.wait_for(f"{IN_SIGHT}({json.dumps(id)})")
    assert tab.problems() == []


def test_tab_key_shows_definition_of_term(site: Path, tab: Tab) -> None:
    tab.open((site / "learn" / "unit.html").as_uri())
    shown = tab.each("article abbr", "e.title")
    # The first place of each term is marked, with its definition.
    assert len(shown) == len(set(shown)) > 3
    assert set(shown) <= set(glossary.terms().values())
    tab.focus("article abbr")
    tab.press("Tab")
    # The tooltip of the previously focused element may still be fading out.
    texts = "[...document.querySelectorAll('.md-tooltip2--active')].map(tip => tip.textContent.trim())"
    tab.wait_for(f"{texts}.some(text => {json.dumps(shown)}.includes(text))")


# ---- screens and paper ----


def test_command_start_and_picture_of_the_home_page_are_visible_without_scrolling(address: str, tab: Tab) -> None:
    tab.resize(1440, 900)
    tab.open(address + "index.html")
    for selector in (".home-words .command", ".home-words .md-button--primary", ".home-picture svg"):
        assert 0 < tab.each(selector, "e.getBoundingClientRect().bottom")[0] < 900, selector


@pytest.mark.parametrize("page", ["learn/why", "learn/hooks", "learn/strategies"])
def test_drawings_are_readable_on_a_phone(site: Path, tab: Tab, page: str) -> None:
    tab.resize(390, 844)
    tab.open((site / f"{page}.html").as_uri())
    assert max(tab.each(".sketch-panel svg", "e.getBoundingClientRect().right")) <= 390
    # In pixels.
    assert min(tab.each(".sketch text", "parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a")) >= 9


PRINTED = "index learn/why learn/schedule streams read/engine/schedule tutorials/overlap moving/from-ddp benchmarks"
# Whether the content of a box is larger than the box and is hidden outside it.
HIDES = """((style) => style.display !== 'inline'
    && (e.scrollWidth > e.clientWidth + 1 && style.overflowX !== 'visible'
        || e.scrollHeight > e.clientHeight + 1 && style.overflowY !== 'visible'))(getComputedStyle(e))"""


# "streams" has the pictures of removed lines.
@pytest.mark.spec("COUNTERFACTUAL-04")
@pytest.mark.parametrize("page", PRINTED.split())
def test_printed_page_is_not_cut_off(site: Path, tab: Tab, page: str) -> None:
    tab.open((site / f"{page}.html").as_uri())
    tab.page.emulate_media(media="print")
    # A4 without margins of 15 mm at each side, at 96 dots per inch.
    tab.resize(round((210 - 30) / 25.4 * 96), 1000)
    hidden = tab.each("article *:not(svg *)", f"{HIDES} && e.outerHTML.slice(0, 80)")
    rights = tab.each("article svg text, article pre > code, article table", "e.getBoundingClientRect().right")
    assert list(filter(None, hidden)) == []
    assert max(rights) <= tab.look("document.documentElement.clientWidth + 1")


def test_a_dark_page_is_printed_in_light_colours(site: Path, tab: Tab) -> None:
    tab.open((site / "learn/schedule.html").as_uri())
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    tab.look("document.body.setAttribute('data-md-color-scheme', 'slate'); window.seen = []")
    tab.look(f"window.addEventListener('beforeprint', () => window.seen.push({scheme})); true")
    tab.page.pdf()
    assert tab.look("window.seen") == ["default"]
    assert tab.look(scheme) == "slate"
