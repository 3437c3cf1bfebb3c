"""The documentation for its readers: built without network access, and opened page by page in a browser."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest

from docs_build.pages import links
from docs_build.reading.messages import messages
from docs_build.tests.browser import Tab
from docs_build.tests.conftest import build
from minifsdp.engine.messages import PAGE


def pages_of(site: Path) -> list[str]:
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")


def test_every_link_and_anchor_leads_somewhere_on_the_site(site: Path) -> None:
    assert len(pages_of(site)) > 90
    assert list(links.problems(site)) == []


def test_second_build_gives_same_files(site: Path, tmp_path: Path) -> None:
    # A time zone far from UTC, another order of sets of strings, and another language.
    again = build(
        tmp_path / "again", {**os.environ, "TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "20260", "LANG": "C"}
    )
    # Site maps contain the dates of all pages.
    contents = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("[!s]*") if path.is_file()}
        for folder in (site, again)
    ]
    assert len(contents[0]) > 200
    assert contents[0].keys() == contents[1].keys()
    assert [name for name in contents[0] if contents[0][name] != contents[1][name]] == []


def test_every_page_has_its_own_description(site: Path) -> None:
    texts = {
        page: re.findall(r'<meta name="description" content="(.*?)">', (site / page).read_text())
        for page in pages_of(site)
    }
    assert [page for page, found in texts.items() if len(found) != 1] == []
    assert [text for text, number in Counter(found[0] for found in texts.values()).items() if number > 1] == []


class Ids(HTMLParser):
    """Counts the ids of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.update(value for name, value in attrs if name == "id" and value)


def test_no_id_is_there_twice_on_any_page(site: Path) -> None:
    twice = {page: [id for id, number in Ids(site / page).found.items() if number > 1] for page in pages_of(site)}
    assert {page: names for page, names in twice.items() if names} == {}


def test_the_address_in_each_message_leads_to_its_entry(site: Path) -> None:
    text = (site / PAGE).read_text(encoding="utf-8")
    for message in messages():
        _, found, after = text.partition(f'id="{message.id}"')
        entry = after.partition("<h3")[0]
        assert found
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
    """A page: its errors, its requests, unnamed fields, and on a phone its width and boxes that need a mouse."""

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
def survey(site: Path, address: str, tab: Tab) -> dict[str, Survey]:
    """Each page, opened once."""
    found = {}
    for page in pages_of(site):
        tab.resize()
        tab.open(address + page)
        nameless = list(filter(None, tab.each("article :is(button, select, input, textarea)", NAMELESS)))
        problems, requests = tab.problems(), tab.requests()
        tab.resize(390, 800)
        width = tab.look("document.documentElement.scrollWidth")
        found[page] = Survey(problems, requests, nameless, width, unreachable(tab))
    tab.resize()
    return found


@pytest.mark.parametrize("kind", ["problems", "nameless", "unreachable"])
def test_every_page_opens_without_problem_and_is_usable_by_keyboard(survey: dict[str, Survey], kind: str) -> None:
    assert {page: getattr(found, kind) for page, found in survey.items() if getattr(found, kind)} == {}


def test_pages_load_nothing_from_other_sites(survey: dict[str, Survey], address: str) -> None:
    own = (address, "data:", "blob:", "about:")
    asked = {page: [url for url in found.requests if not url.startswith(own)] for page, found in survey.items()}
    assert all(found.requests for found in survey.values())
    assert {page: urls for page, urls in asked.items() if urls} == {}


@pytest.mark.spec("COUNTERFACTUAL-04", "TEACH-08")
def test_no_page_is_wider_than_a_phone(survey: dict[str, Survey]) -> None:
    assert {"streams.html", "teach/lecture-1.html"} <= survey.keys()
    assert {page: found.width for page, found in survey.items() if found.width > 390} == {}


def test_pictures_of_a_tutorial_scroll_on_a_phone_and_stay_readable(address: str, tab: Tab) -> None:
    tab.resize(390, 800)
    try:
        tab.open(address + "tutorials/overlap.html")
        pictures = ".lesson-picture svg.minifsdp-timeline"
        # The height of a label on the screen, in pixels.
        assert min(tab.each(pictures, "e.querySelector('.box text').getBoundingClientRect().height")) > 8
        assert all(tab.each(pictures, "e.parentElement.scrollWidth > e.parentElement.clientWidth"))
    finally:
        tab.resize()
