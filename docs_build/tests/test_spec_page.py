"""The page of the spec in a browser: the results of its filter, the state in its address, and link targets."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_build.pages import badges
from docs_build.recording import results
from docs_build.tests.browser import Tab

pytestmark = [pytest.mark.docs, pytest.mark.needs("mkdocs")]

SHOWN = "[...document.querySelectorAll('.spec-row')].filter(row => !row.hidden).map(row => row.id)"
COUNTED = "document.getElementById('spec-count').textContent"


def with_tag(tag: str) -> list[str]:
    return [row.id for row in results.all_rows().values() if tag in badges.tags(row)]


def visit(tab: Tab, address: str) -> None:
    # A browser does not reload a page if only the anchor changes.
    tab.open("about:blank")
    tab.open(address)


def test_address_filters_open_and_partial_requirements(address: str, tab: Tab) -> None:
    for tag in ("open-on-nccl", "in-part", "text-only", "order-only", "simulated"):
        visit(tab, f"{address}spec.html?show={tag}")
        assert tab.look(SHOWN) == with_tag(tag)
        assert tab.look(COUNTED).startswith(str(len(with_tag(tag))))


def test_choice_is_kept_in_the_address_also_from_a_local_file(site: Path, address: str, tab: Tab) -> None:
    for start in (address, site.as_uri() + "/"):
        visit(tab, start + "spec.html")
        tab.choose("#spec-section", "PREF")
        tab.choose("#spec-verdict", "in-part")
        tab.choose("#spec-words", "stream")
        chosen = tab.look(SHOWN)
        assert 0 < len(chosen) < 20
        kept = tab.look("location.href")
        assert kept == start + "spec.html?section=PREF&show=in-part&words=stream"
        visit(tab, kept)
        assert tab.look(SHOWN) == chosen
        tab.choose("#spec-section", "")
        tab.choose("#spec-verdict", "")
        tab.choose("#spec-words", "")
        assert tab.look("location.href") == start + "spec.html"
        assert tab.problems() == []


def test_address_with_invalid_filter_shows_all_requirements(address: str, tab: Tab) -> None:
    visit(tab, f"{address}spec.html?show=nonsense&section=NONE")
    assert len(tab.look(SHOWN)) == len(results.all_rows())


def test_section_title_search_finds_its_requirements(address: str, tab: Tab) -> None:
    visit(tab, f"{address}spec.html?words=deferred+initialisation")
    section = [row.id for row in results.all_rows().values() if row.section == "META: deferred initialisation"]
    assert set(section) <= set(tab.look(SHOWN))


@pytest.mark.parametrize("width", [1440, 1280, 820, 390])
def test_linked_requirement_is_visible_below_filter(address: str, tab: Tab, width: int) -> None:
    top = "Math.round(document.getElementById('PREF-16').getBoundingClientRect().top)"
    covered = (
        "Math.max(...['.md-header', '.spec-filter'].map(name => document.querySelector(name)"
        ".getBoundingClientRect().bottom))"
    )
    tab.resize(width, 900)
    visit(tab, f"{address}spec.html#PREF-16")
    tab.wait_for(f"{top} >= {covered} && {top} < {covered} + 60")
    # The same for a click within the page.
    tab.look("location.hash = '#LIM-02'; true")
    tab.wait_for(f"{top.replace('PREF-16', 'LIM-02')} >= {covered}")
    tab.resize(1280, 900)


def test_linked_requirement_is_shown_with_any_filter(address: str, tab: Tab) -> None:
    visit(tab, f"{address}spec.html?show=text-only#DEV-04")
    assert "DEV-04" in tab.look(SHOWN)


CONTRAST = """[...document.querySelectorAll('.badge')].filter((badge, n) => n % 7 === 0).map(badge => {
  const parts = text => text.match(/[\\d.]+/g).map(Number);
  let ground = badge;
  while (ground && (parts(getComputedStyle(ground).backgroundColor)[3] ?? 1) === 0) ground = ground.parentElement;
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
  const [a, b] = [getComputedStyle(badge).color, getComputedStyle(ground || document.body).backgroundColor]
    .map(text => light(parts(text)));
  return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), badge.className];
})"""


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_badges_can_be_read_in_light_and_in_dark(address: str, tab: Tab, scheme: str) -> None:
    visit(tab, f"{address}spec.html")
    tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
    tab.browser.wait(0.5)
    lowest = {name: ratio for ratio, name in sorted(tab.look(CONTRAST), reverse=True)}
    assert {"badge proven", "badge part", "badge simulated", "badge open"} <= lowest.keys()
    assert {name: ratio for name, ratio in lowest.items() if ratio < 4.5} == {}


def test_results_of_each_backend_are_shown_in_a_table(address: str, tab: Tab) -> None:
    visit(tab, f"{address}spec.html")
    cells = tab.look("[...document.querySelectorAll('article table tbody tr')].slice(0, 3).map(row => row.innerText)")
    assert [text.split("\t")[0] for text in cells] == list(results.WHERE.values())
    for backend, text in zip(results.BACKENDS, cells, strict=True):
        numbers = [int(cell) for cell in text.split("\t")[1:-1]]
        assert sum(numbers) == len(results.all_rows())
        assert ("never run" in text) == (backend not in results.recorded()["runs"])
