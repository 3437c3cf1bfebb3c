"""Printed pages show pictures and code in full."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_build.tests.browser import Tab

PAGES = (
    "index",
    "learn/why",
    "learn/schedule",
    "streams",
    "read/engine/schedule",
    "tutorials/overlap",
    "moving/from-ddp",
    "benchmarks",
)
# Whether the content of a box is larger than the box and is hidden outside it.
HIDES = """((style) => style.display !== 'inline'
    && (e.scrollWidth > e.clientWidth + 1 && style.overflowX !== 'visible'
        || e.scrollHeight > e.clientHeight + 1 && style.overflowY !== 'visible'))(getComputedStyle(e))"""


# "streams" has the pictures of removed lines.
@pytest.mark.spec("COUNTERFACTUAL-04")
@pytest.mark.parametrize("page", PAGES)
def test_printed_page_is_not_cut_off(site: Path, tab: Tab, page: str) -> None:
    tab.open((site / f"{page}.html").as_uri())
    tab.send("Emulation.setEmulatedMedia", media="print")
    # A4 without margins of 15 mm at each side, at 96 dots per inch.
    tab.resize(round((210 - 30) / 25.4 * 96), 1000)
    hidden = tab.each("article *:not(svg *)", f"{HIDES} && e.outerHTML.slice(0, 80)")
    rights = tab.each("article svg text, article pre > code, article table", "e.getBoundingClientRect().right")
    width = tab.look("document.documentElement.clientWidth + 1")
    tab.send("Emulation.setEmulatedMedia", media="")
    assert list(filter(None, hidden)) == []
    assert max(rights) <= width


def test_a_dark_page_is_printed_in_light_colours(site: Path, tab: Tab) -> None:
    tab.open((site / "learn/schedule.html").as_uri())
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    tab.look("document.body.setAttribute('data-md-color-scheme', 'slate'); window.seen = []")
    tab.look(f"window.addEventListener('beforeprint', () => window.seen.push({scheme})); true")
    tab.send("Page.printToPDF")
    assert tab.look("window.seen") == ["default"]
    assert tab.look(scheme) == "slate"
