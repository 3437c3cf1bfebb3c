"""The documentation for its readers: built without network access, and opened page by page in a browser."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import pytest

from docs_build.pages import links
from docs_build.reading.messages import Message, messages
from docs_build.tests.browser import Tab
from minifsdp.engine.messages import PAGE

pytestmark = [pytest.mark.docs, pytest.mark.needs("mkdocs")]


def pages_of(site: Path) -> list[str]:
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")


def test_the_site_is_built_without_a_network_and_without_a_warning(site: Path) -> None:
    assert len(pages_of(site)) > 90


def test_every_link_and_anchor_leads_somewhere(site: Path) -> None:
    assert list(links.problems(site)) == []


def test_site_loads_no_external_resources(site: Path) -> None:
    assert list(links.external(site)) == []


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.id)
def test_the_address_in_a_message_leads_to_its_entry(site: Path, message: Message) -> None:
    _, found, after = (site / PAGE).read_text(encoding="utf-8").partition(f'id="{message.id}"')
    entry = after.partition("<h3")[0]
    assert found
    assert message.kind in entry
    assert message.module in entry


PHONE, DESK = (390, 800), (1280, 900)


# The elements of a page that scroll sideways, and that the keyboard cannot reach or that have no name.
UNREACHABLE = """[...document.querySelectorAll('article *:not(svg *)')].filter((one) =>
    one.checkVisibility() && one.scrollWidth > one.clientWidth &&
    ['auto', 'scroll'].includes(getComputedStyle(one).overflowX) && !(
        one.tabIndex === 0 && ['region', 'group'].includes(one.getAttribute('role')) && one.getAttribute('aria-label')
    )).map((one) => `${one.tagName} ${one.className}`)"""


def unreachable(tab: Tab) -> list[str]:
    """These elements. The script of the page needs a moment after a change of the width."""
    end = time.monotonic() + 3
    while (found := list(tab.look(UNREACHABLE))) and time.monotonic() < end:
        tab.browser.wait(0.05)
    return found


class Survey(NamedTuple):
    """A page: its errors, its requests, and on a phone its width and the boxes that need a mouse to scroll."""

    problems: list[str]
    requests: list[str]
    width: int
    unreachable: list[str]


@pytest.fixture(scope="module")
def survey(site: Path, address: str, tab: Tab) -> dict[str, Survey]:
    """Each page, opened once."""
    found = {}
    for page in pages_of(site):
        tab.resize(*DESK)
        tab.open(address + page)
        tab.resize(*PHONE)
        width = tab.look("document.documentElement.scrollWidth")
        found[page] = Survey(tab.problems(), tab.requests(), width, unreachable(tab))
    tab.resize(*DESK)
    return found


def test_every_page_opens_without_problem(survey: dict[str, Survey]) -> None:
    assert {page: found.problems for page, found in survey.items() if found.problems} == {}


def test_pages_load_nothing_from_other_sites(survey: dict[str, Survey], address: str) -> None:
    own = (address, "data:", "blob:")
    asked = {page: [url for url in found.requests if not url.startswith(own)] for page, found in survey.items()}
    assert all(found.requests for found in survey.values())
    assert {page: urls for page, urls in asked.items() if urls} == {}


def test_no_page_is_wider_than_a_phone(survey: dict[str, Survey]) -> None:
    assert {page: found.width for page, found in survey.items() if found.width > PHONE[0]} == {}


def test_everything_that_scrolls_sideways_can_be_scrolled_with_the_keyboard(survey: dict[str, Survey]) -> None:
    assert {page: found.unreachable for page, found in survey.items() if found.unreachable} == {}


@pytest.mark.parametrize("page", ["tutorials/overlap.html", "tutorials/train_gpt.html"])
def test_pictures_of_a_tutorial_scroll_on_a_phone_and_stay_readable(address: str, tab: Tab, page: str) -> None:
    tab.resize(*PHONE)
    try:
        tab.open(address + page)
        pictures = "[...document.querySelectorAll('.lesson-picture svg.minifsdp-timeline')]"
        # The height of a label on the screen, in pixels.
        labels = tab.look(pictures + ".map((one) => one.querySelector('.box text').getBoundingClientRect().height)")
        assert labels
        assert min(labels) > 8
        assert tab.look(pictures + ".every((one) => one.parentElement.scrollWidth > one.parentElement.clientWidth)")
    finally:
        tab.resize(*DESK)


def find_the_error_of_mixed_tensors(tab: Tab) -> None:
    tab.click(".md-search__input")
    tab.wait_for("document.querySelector('.md-search-result__meta').textContent.includes('Type to start')", 120)
    tab.type("mixed torch.Tensor and DTensor")
    # The search field listens for keyup events. Without one, it would use inserted text only at the next key.
    tab.press("End")
    tab.wait_for("!!document.querySelector('.md-search-result__link[href*=troubleshoot]')", 120)
    assert tab.problems() == []


def test_the_search_works_from_a_disk(site: Path, tab: Tab) -> None:
    tab.open((site / "index.html").as_uri())
    find_the_error_of_mixed_tensors(tab)


def test_the_spec_can_be_filtered(address: str, tab: Tab) -> None:
    tab.open(address + "spec.html")
    shown = "[...document.querySelectorAll('.spec-row')].filter(e => !e.hidden).length"
    everything = tab.look(shown)
    tab.choose("#spec-section", "PREF")
    assert 10 < tab.look(shown) < 30
    tab.choose("#spec-section", "")
    tab.choose("#spec-verdict", "unproven")
    assert 0 <= tab.look(shown) < everything


def test_the_search_finds_an_error_by_its_text(address: str, tab: Tab) -> None:
    tab.open(address + "index.html")
    find_the_error_of_mixed_tensors(tab)


def test_dark_and_light_theme_have_readable_background_colours(address: str, tab: Tab) -> None:
    tab.open(address + "read/engine/unit.html")
    ground = "getComputedStyle(document.body).backgroundColor"
    grounds = set()
    for scheme in ("default", "slate"):
        tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
        grounds.add(tab.look(ground))
        ink = tab.look("getComputedStyle(document.querySelector('.sbs-prose')).color")
        assert ink != tab.look(ground)
    assert len(grounds) == 2
