"""The page of the spec in a browser: the results of its filter, and the state in its address."""

from __future__ import annotations

from pathlib import Path

from docs_build.pages import badges
from docs_build.recording import results
from docs_build.tests.browser import Tab

ROWS = "[...document.querySelectorAll('.spec-row')].filter(row => !row.hidden).map(row => row.id)"


def test_address_filters_open_and_partial_requirements(address: str, tab: Tab) -> None:
    rows = results.all_rows()
    for tag in ("open-on-nccl", "in-part", "text-only", "simulated"):
        tab.open(f"{address}spec.html?show={tag}")
        expected = [row.id for row in rows.values() if tag in badges.tags(row)]
        assert tab.look(ROWS) == expected
        assert tab.text("#spec-count").startswith(str(len(expected)))
    # A link to a row shows it, whatever the filter.
    tab.open(f"{address}spec.html?show=text-only#DEV-04")
    assert "DEV-04" in tab.look(ROWS)


def test_choice_is_kept_in_the_address_also_from_a_local_file(site: Path, tab: Tab) -> None:
    tab.open(f"{site.as_uri()}/spec.html")
    tab.choose("#spec-section", "PREF")
    tab.choose("#spec-verdict", "in-part")
    tab.choose("#spec-words", "stream")
    chosen, kept = tab.look(ROWS), tab.look("location.href")
    assert 0 < len(chosen) < 20
    assert kept == f"{site.as_uri()}/spec.html?section=PREF&show=in-part&words=stream"
    tab.open(kept)
    assert tab.look(ROWS) == chosen
    assert tab.problems() == []
