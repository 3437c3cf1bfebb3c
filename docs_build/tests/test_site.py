"""The documentation for its readers: built strictly, and opened page by page in a browser."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from docs_build.pages import links
from docs_build.reading.messages import messages
from docs_build.tests.browser import Tab
from docs_build.tests.conftest import build
from minifsdp.engine.messages import PAGE


def pages_of(site: Path) -> dict[str, str]:
    """The HTML of each page, by its address."""
    paths = (path for path in sorted(site.rglob("*.html")) if path.name != "404.html")
    return {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_every_link_and_anchor_leads_somewhere_on_the_site(site: Path) -> None:
    assert len(pages_of(site)) > 250
    assert list(links.problems(site)) == []


@pytest.mark.spec("PROBLEMS-06")
def test_second_build_gives_same_files(site: Path, tmp_path: Path) -> None:
    # A time zone far from UTC, another order of sets of strings, and another language.
    other = {"TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "20260", "LANG": "C"}
    again = build(tmp_path / "again", {**os.environ, **other})
    # Site maps contain the dates of all pages.
    contents = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("[!s]*") if path.is_file()}
        for folder in (site, again)
    ]
    assert contents[0].keys() == contents[1].keys()
    assert [name for name in contents[0] if contents[0][name] != contents[1][name]] == []


def test_every_page_has_its_own_description(site: Path) -> None:
    found = {
        page: re.findall(r'<meta name="description" content="(.*?)">', html) for page, html in pages_of(site).items()
    }
    assert [page for page, texts in found.items() if len(texts) != 1] == []
    assert [text for (text,), number in Counter(map(tuple, found.values())).items() if number > 1] == []


def test_no_id_is_there_twice_on_any_page(site: Path) -> None:
    for page, html in pages_of(site).items():
        ids = re.findall(r'<[a-z][^<>]*?\sid="([^"]+)"', html)
        assert [id for id, number in Counter(ids).items() if number > 1] == [], page


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


class Survey(NamedTuple):
    """A page: its errors, requests to other hosts, unnamed fields, and on a phone its width and unreachable boxes."""

    problems: list[str]
    requests: list[str]
    nameless: list[str]
    width: int
    unreachable: list[str]


def unreachable(tab: Tab) -> list[str]:
    """The script of a page needs a moment after a change of the width."""
    end = time.monotonic() + 3
    while (found := list(filter(None, tab.each("article *:not(svg *)", UNREACHABLE)))) and time.monotonic() < end:
        tab.browser.wait(0.05)
    return found


@pytest.fixture(scope="module")
def survey(site: Path, address: str, browser: Tab) -> dict[str, Survey]:
    """The pages, each opened once; only every sixth page about a source file, because they have one template."""
    found = {}
    own = (address, "data:", "blob:", "about:")
    sources = [page for page in pages_of(site) if page.startswith("read/")]
    for page in sorted(pages_of(site).keys() - sources) + sources[::6]:
        browser.resize()
        browser.open(address + page)
        nameless = list(filter(None, browser.each("article :is(button, select, input, textarea)", NAMELESS)))
        problems, requests = browser.problems(), [url for url in browser.requests() if not url.startswith(own)]
        browser.resize(390, 800)
        width = browser.look("document.documentElement.scrollWidth")
        found[page] = Survey(problems, requests, nameless, width, unreachable(browser))
    browser.resize()
    return found


@pytest.mark.docs
@pytest.mark.parametrize("kind", ["problems", "requests", "nameless", "unreachable"])
def test_every_page_opens_without_problem_and_is_usable_by_keyboard(survey: dict[str, Survey], kind: str) -> None:
    assert {page: getattr(found, kind) for page, found in survey.items() if getattr(found, kind)} == {}


@pytest.mark.docs
@pytest.mark.spec("COUNTERFACTUAL-04", "TEACH-08")
def test_no_page_is_wider_than_a_phone(survey: dict[str, Survey]) -> None:
    assert {"streams.html", "teach/lecture-1.html"} <= survey.keys()
    assert {page: found.width for page, found in survey.items() if found.width > 390} == {}


def test_command_start_and_picture_of_the_home_page_are_visible_without_scrolling(address: str, tab: Tab) -> None:
    tab.resize(1440, 900)
    tab.open(address + "index.html")
    for selector in (".home-words .command", ".home-words .md-button--primary", ".home-picture svg"):
        assert 0 < tab.each(selector, "e.getBoundingClientRect().bottom")[0] < 900, selector
