"""Printed pages show pictures and code in full, and leave out the navigation."""

from __future__ import annotations

import base64
import io
import re
import unicodedata
from pathlib import Path

import pytest

from docs_build.tests.browser import Tab

PAGES = (
    "index.html",
    "learn/why.html",
    "learn/schedule.html",
    "streams.html",
    "read/engine/schedule.html",
    "tutorials/overlap.html",
    "moving/from-ddp.html",
    "benchmarks.html",
)
NAVIGATION = ("in reading order", "On this page:", "Back to top", "Skip to content", "Made with")


def squeezed(text: str) -> str:
    # A PDF can break a line anywhere, and can store a pair of letters as one character.
    return re.sub(r"\s+", "", unicodedata.normalize("NFKC", text))


def sheets(tab: Tab) -> list[str]:
    """The text of each sheet of the PDF of the open page."""
    from pypdf import PdfReader

    data = tab.send("Page.printToPDF", preferCSSPageSize=True, paperWidth=210 / 25.4, paperHeight=297 / 25.4)["data"]
    return [squeezed(page.extract_text()) for page in PdfReader(io.BytesIO(base64.b64decode(data))).pages]


# The label at the right end of each picture, and the last line of each block of code.
LAST_LABEL = """(([...texts], right) => texts.sort((a, b) => right(a) - right(b)).at(-1)?.textContent ?? '')(
    e.querySelectorAll('text'), (one) => one.getBoundingClientRect().right)"""
LAST_LINE = "e.textContent.trim().split('\\n').at(-1)"


@pytest.mark.needs("pypdf")
@pytest.mark.parametrize("page", PAGES)
def test_printed_page_contains_the_last_label_and_the_last_line(site: Path, tab: Tab, page: str) -> None:
    tab.open((site / page).as_uri())
    last = tab.each("article figure svg", LAST_LABEL) + tab.each("article pre > code", LAST_LINE)
    text = "".join(sheets(tab))
    assert [words for words in last if squeezed(words) not in text] == []
    assert [words for words in NAVIGATION if squeezed(words) in text] == []


# Whether the content of a box is larger than the box and is hidden outside it.
HIDES = """((style) => style.display !== 'inline'
    && (e.scrollWidth > e.clientWidth + 1 && style.overflowX !== 'visible'
        || e.scrollHeight > e.clientHeight + 1 && style.overflowY !== 'visible'))(getComputedStyle(e))"""


# "streams.html" has the pictures of removed lines.
@pytest.mark.spec("COUNTERFACTUAL-04")
@pytest.mark.parametrize("page", PAGES)
def test_printed_page_is_not_cut_off(site: Path, tab: Tab, page: str) -> None:
    tab.open((site / page).as_uri())
    tab.send("Emulation.setEmulatedMedia", media="print")
    # A4 without margins of 15 mm at each side, at 96 dots per inch.
    tab.resize(round((210 - 30) / 25.4 * 96), 1000)
    try:
        assert [one for one in tab.each("article *:not(svg *)", f"{HIDES} && e.outerHTML.slice(0, 80)") if one] == []
        rights = tab.each("article svg text, article pre > code, article table", "e.getBoundingClientRect().right")
        assert max(rights) <= tab.look("document.documentElement.clientWidth + 1")
    finally:
        tab.send("Emulation.setEmulatedMedia", media="")
        tab.resize()


@pytest.mark.needs("pypdf")
def test_printed_page_contains_only_unfolded_answers(site: Path, tab: Tab) -> None:
    question, answer = "What does a reduce-scatter return on each rank", "has the same result. The two collectives"
    tab.open((site / "learn/why.html").as_uri())
    text = "".join(sheets(tab))
    assert (squeezed(question) in text, squeezed(answer) in text) == (True, False)
    tab.click(".exercise summary")
    assert squeezed(answer) in "".join(sheets(tab))


def test_a_dark_page_is_printed_in_light_colours(site: Path, tab: Tab) -> None:
    tab.open((site / "learn/schedule.html").as_uri())
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    tab.look("document.body.setAttribute('data-md-color-scheme', 'slate'); window.seen = []")
    tab.look(f"window.addEventListener('beforeprint', () => window.seen.push({scheme})); true")
    tab.send("Page.printToPDF")
    assert tab.look("window.seen") == ["default"]
    assert tab.look(scheme) == "slate"
