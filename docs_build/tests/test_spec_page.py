"""The page of the spec in a browser: the results of its filter, the state in its address, and keys."""

from __future__ import annotations

from pathlib import Path

from docs_build.pages import badges
from docs_build.recording import results
from docs_build.tests.browser import Tab

ROWS = "[...document.querySelectorAll('.spec-row')].filter(row => !row.hidden).map(row => row.id)"


def test_address_filters_open_and_partial_requirements(address: str, tab: Tab) -> None:
    rows = results.all_rows()
    for tag in ("open-on-nccl", "in-part", "text-only", "order-only", "simulated"):
        tab.open(f"{address}spec.html?show={tag}")
        expected = [row.id for row in rows.values() if tag in badges.tags(row)]
        assert tab.look(ROWS) == expected
        assert tab.text("#spec-count").startswith(str(len(expected)))
    tab.open(f"{address}spec.html?show=nonsense&section=NONE")
    assert tab.look(ROWS) == list(rows)
    tab.open(f"{address}spec.html?show=text-only#DEV-04")
    assert "DEV-04" in tab.look(ROWS)


def test_choice_is_kept_in_the_address_also_from_a_local_file(site: Path, address: str, tab: Tab) -> None:
    for start in (address, site.as_uri() + "/"):
        tab.open(start + "spec.html")
        tab.choose("#spec-section", "PREF")
        tab.choose("#spec-verdict", "in-part")
        tab.choose("#spec-words", "stream")
        chosen, kept = tab.look(ROWS), tab.look("location.href")
        assert 0 < len(chosen) < 20
        assert kept == start + "spec.html?section=PREF&show=in-part&words=stream"
        tab.open(kept)
        assert tab.look(ROWS) == chosen
        assert tab.problems() == []


def test_the_filter_is_used_by_keyboard(address: str, tab: Tab) -> None:
    tab.open(address + "spec.html")
    # The first Tab stop of a page is the link that skips the navigation.
    tab.press("Tab", "Enter")
    for _ in range(20):
        tab.press("Tab")
        if tab.look("document.activeElement.id") == "spec-section":
            break
    tab.press("ArrowDown")
    of_section = tab.wait_for(f"(n => n < {len(results.all_rows())} && n)({ROWS}.length)")
    tab.press("Tab", "Tab")
    tab.type("root")
    assert tab.wait_for(f"(n => n < {of_section} && n)({ROWS}.length)") > 0


def test_results_of_each_backend_are_shown_in_a_table(address: str, tab: Tab) -> None:
    tab.open(address + "spec.html")
    cells = [text.split("\t") for text in tab.each("article table tbody tr", "e.innerText")[:3]]
    for (backend, where), (shown, *numbers, last) in zip(results.WHERE.items(), cells, strict=True):
        assert shown == where
        assert sum(map(int, numbers)) == len(results.all_rows())
        assert ("never run" in last) == (backend not in results.recorded()["runs"])
