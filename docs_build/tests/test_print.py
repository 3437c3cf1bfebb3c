"""Printed pages show pictures and code in full, and leave out the navigation."""

from __future__ import annotations

import base64
import io
import re
import unicodedata
from pathlib import Path

import pytest

from docs_build.tests.browser import Tab

pytestmark = [pytest.mark.docs, pytest.mark.needs("mkdocs")]

PAGES = (
    "index.html",
    "learn/why.html",
    "learn/schedule.html",
    "streams.html",
    "read/engine/schedule.html",
    "tutorials/overlap.html",
    "lab/slow_rank.html",
    "moving/from-ddp.html",
    "benchmarks.html",
)
# A4 without margins of 15 mm at each side, at 96 dots per inch.
PAPER = round((210 - 30) / 25.4 * 96)
NAVIGATION = (
    "in reading order",
    "On this page:",
    "Back to top",
    "Skip to content",
    "Made with",
    "Type to start searching",
)


def squeezed(text: str) -> str:
    # A PDF can break a line anywhere, and can store a pair of letters as one character.
    return re.sub(r"\s+", "", unicodedata.normalize("NFKC", text))


def printed(tab: Tab) -> str:
    """The text of the PDF of the open page."""
    from pypdf import PdfReader

    data = tab.send("Page.printToPDF", preferCSSPageSize=True, paperWidth=210 / 25.4, paperHeight=297 / 25.4)["data"]
    return squeezed("".join(page.extract_text() for page in PdfReader(io.BytesIO(base64.b64decode(data))).pages))


LAST_OF_PICTURES = """[...document.querySelectorAll('article figure svg')].map((picture) => {
  const texts = [...picture.querySelectorAll('text')];
  if (!texts.length) return [];
  const right = (one) => one.getBoundingClientRect().right;
  return [texts.reduce((a, b) => (right(b) > right(a) ? b : a)).textContent, texts.at(-1).textContent];
})"""
LAST_OF_CODE = (
    "[...document.querySelectorAll('article pre > code')].map((one) => one.textContent.trim().split('\\n').at(-1))"
)


@pytest.mark.needs("pypdf")
@pytest.mark.parametrize("page", PAGES)
def test_printed_page_contains_the_last_label_and_the_last_line(site: Path, tab: Tab, page: str) -> None:
    tab.open((site / page).as_uri())
    last = [label for labels in tab.look(LAST_OF_PICTURES) for label in labels] + tab.look(LAST_OF_CODE)
    text = printed(tab)
    assert [words for words in last if squeezed(words) not in text] == []
    assert [words for words in NAVIGATION if squeezed(words) in text] == []


# Each box whose content is larger than the box and is hidden outside it, and each text of a picture that lies outside
# the paper.
CUT = """(() => {
  const hides = (one) => {
    const style = getComputedStyle(one);
    return one.scrollWidth > one.clientWidth + 1 && style.overflowX !== 'visible' && style.display !== 'inline'
        || one.scrollHeight > one.clientHeight + 1 && style.overflowY !== 'visible' && style.display !== 'inline';
  };
  const boxes = [...document.querySelectorAll('article, article *:not(svg *)')];
  const beside = (one) => one.getBoundingClientRect().right > document.documentElement.clientWidth + 1;
  const texts = [...document.querySelectorAll('article svg text, article pre > code, article table')];
  return [...boxes.filter(hides), ...texts.filter(beside)].map((one) => `${one.tagName} ${one.className.baseVal ??
    one.className} ${one.textContent.trim().slice(0, 30)}`);
})()"""


@pytest.mark.parametrize("page", PAGES)
def test_printed_page_is_not_cut_off(site: Path, tab: Tab, page: str) -> None:
    tab.open((site / page).as_uri())
    tab.send("Emulation.setEmulatedMedia", media="print")
    tab.resize(PAPER, 1000)
    try:
        assert tab.look(CUT) == []
    finally:
        tab.send("Emulation.setEmulatedMedia", media="")
        tab.resize(1280, 900)


@pytest.mark.needs("pypdf")
def test_printed_page_contains_only_unfolded_answers(site: Path, tab: Tab) -> None:
    tab.open((site / "learn/why.html").as_uri())
    question, answer = "What does a reduce-scatter return on each rank", "has the same result. The two collectives"
    text = printed(tab)
    assert (squeezed(question) in text, squeezed(answer) in text) == (True, False)
    tab.open((site / "learn/why.html").as_uri())
    tab.look("document.querySelector('.exercise summary').focus(); true")
    tab.click(".exercise summary")
    assert squeezed(answer) in printed(tab)


def test_a_dark_page_is_printed_in_light_colours(site: Path, tab: Tab) -> None:
    tab.open((site / "learn/schedule.html").as_uri())
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    tab.look("document.body.setAttribute('data-md-color-scheme', 'slate'); window.seen = []; true")
    tab.look(f"window.addEventListener('beforeprint', () => window.seen.push({scheme})); true")
    tab.send("Page.printToPDF")
    assert tab.look("window.seen") == ["default"]
    assert tab.look(scheme) == "slate"
