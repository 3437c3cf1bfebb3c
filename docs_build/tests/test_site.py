"""The documentation for its readers: built without network access, and opened page by page in a browser."""

from __future__ import annotations

from pathlib import Path

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


@pytest.fixture(scope="module")
def survey(site: Path, address: str, tab: Tab) -> dict[str, tuple[list[str], list[str], int]]:
    """For each page, opened once: its errors, its requests, and its width on a phone."""
    found = {}
    for page in pages_of(site):
        tab.resize(*DESK)
        tab.open(address + page)
        tab.resize(*PHONE)
        width = tab.look("document.documentElement.scrollWidth")
        found[page] = (tab.problems(), tab.requests(), width)
    tab.resize(*DESK)
    return found


def test_every_page_opens_without_problem(survey: dict[str, tuple[list[str], list[str], int]]) -> None:
    assert {page: problems for page, (problems, _, _) in survey.items() if problems} == {}


def test_pages_load_nothing_from_other_sites(survey: dict[str, tuple[list[str], list[str], int]], address: str) -> None:
    own = (address, "data:", "blob:")
    asked = {page: [url for url in urls if not url.startswith(own)] for page, (_, urls, _) in survey.items()}
    assert all(urls for _, urls, _ in survey.values())
    assert {page: urls for page, urls in asked.items() if urls} == {}


def test_no_page_is_wider_than_a_phone(survey: dict[str, tuple[list[str], list[str], int]]) -> None:
    assert {page: width for page, (_, _, width) in survey.items() if width > PHONE[0]} == {}


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
