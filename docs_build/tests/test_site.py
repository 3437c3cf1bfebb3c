"""The documentation for its readers: built strictly, and opened page by page in a browser."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from docs_build.reading.messages import messages
from docs_build.tests.browser import Tab
from minifsdp.engine.messages import PAGE


def pages_of(site: Path) -> dict[str, str]:
    """The HTML of each page, by its address."""
    paths = (path for path in sorted(site.rglob("*.html")) if path.name != "404.html")
    return {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def repeated(found: list[str]) -> list[str]:
    return [one for one, number in Counter(found).items() if number > 1]


def test_every_page_has_one_description_of_its_own_and_no_id_twice(site: Path) -> None:
    pages, found = pages_of(site), []
    assert len(pages) > 250
    for page, html in pages.items():
        assert repeated(re.findall(r'<[a-z][^<>]*?\sid="([^"]+)"', html)) == [], page
        (about,) = re.findall(r'<meta name="description" content="(.*?)">', html)
        found.append(about)
    assert repeated(found) == []


def test_the_address_in_each_message_leads_to_its_entry(site: Path) -> None:
    text = (site / PAGE).read_text(encoding="utf-8")
    for message in messages():
        entry = text.partition(f'id="{message.id}"')[2].partition("<h3")[0]
        assert message.kind in entry
        assert message.module in entry


# ---- in a browser ----

# Fields and buttons without a name for screen readers.
NAMELESS = "!(e.textContent.trim() || e.ariaLabel || e.title || (e.labels && e.labels.length)) && e.outerHTML"
# Elements that scroll sideways, and that the keyboard cannot reach or that have no name.
UNREACHABLE = """e.checkVisibility() && e.scrollWidth > e.clientWidth
    && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX)
    && !(e.tabIndex === 0 && ['region', 'group'].includes(e.getAttribute('role')) && e.ariaLabel)
    && `${e.tagName} ${e.className}`"""
# The script of a page observes sizes, which change before the next frame.
NEXT_FRAME = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def problems_of(tab: Tab, address: str) -> dict[str, Any]:
    """Errors of a page, requests to other hosts, fields without a name, and too wide elements on a phone."""
    tab.page.goto(address)
    nameless = tab.each("article :is(button, select, input, textarea)", NAMELESS)
    requests = [request.url for request in tab.page.requests()]
    tab.resize(390, 800)
    tab.look(NEXT_FRAME)
    found = {
        "problems": tab.problems(),
        "requests": [url for url in requests if not url.startswith(("file:", "data:", "blob:"))],
        "nameless": list(filter(None, nameless)),
        "unreachable": list(filter(None, tab.each("article *:not(svg *)", UNREACHABLE))),
        "wide": tab.look("document.documentElement.scrollWidth > 390"),
    }
    return {kind: value for kind, value in found.items() if value}


@pytest.mark.spec("COUNTERFACTUAL-04", "TEACH-08")
def test_every_page_opens_without_problem_and_fits_on_a_phone(site: Path, chromium: Any) -> None:
    found = {}
    # Only every sixth page about a source file, because they have one template.
    sources = [page for page in pages_of(site) if page.startswith("read/")]
    pages = sorted(pages_of(site).keys() - sources) + sources[::6]
    assert {"streams.html", "teach/lecture-1.html"} <= set(pages)
    for page in pages:
        with chromium.new_page(viewport={"width": 1280, "height": 900}) as opened:
            found[page] = problems_of(Tab(opened), (site / page).as_uri())
    assert {page: problems for page, problems in found.items() if problems} == {}
