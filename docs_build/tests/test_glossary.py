"""The terms of the glossary on other pages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs_build.pages import glossary
from docs_build.tests.browser import Tab


def marked(text: str) -> list[str]:
    import markdown

    html = markdown.markdown(text + glossary.definitions(), extensions=["abbr", "pymdownx.superfences"])
    return re.findall(r"<abbr [^>]*>(.*?)</abbr>", glossary.first_places(html))


@pytest.mark.needs("mkdocs")
def test_each_term_has_a_short_definition_without_markup() -> None:
    assert len(glossary.terms()) > 18
    assert {title: text for title, text in glossary.terms().items() if not 15 <= len(text) <= 200} == {}
    assert [text for text in glossary.terms().values() if re.search(r"[`*\[\]<>]", text)] == []


@pytest.mark.needs("mkdocs")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Units are cut. A unit on each rank.\n\nThe ranks gather the unit by all-gather.",
            ["Units", "rank", "all-gather"],
        ),
        ("A local shard, a shard and a root unit.", ["local shard", "shard", "root unit"]),
        ("# The unit\n\n`unit` and [the rank](x.md)\n\n```python\nunit = mesh\n```\n\nOf a unit.", ["unit"]),
    ],
)
def test_first_place_of_a_term_in_running_text_is_marked(text: str, expected: list[str]) -> None:
    assert marked(text) == expected


def test_tab_key_shows_definition_of_term(site: Path, tab: Tab) -> None:
    tab.open((site / "learn" / "unit.html").as_uri())
    shown = tab.each("article abbr", "e.title")
    assert set(shown) <= set(glossary.terms().values())
    tab.focus("article abbr")
    tab.press("Tab")
    # The tooltip of the previously focused element may still be fading out.
    texts = "[...document.querySelectorAll('.md-tooltip2--active')].map(tip => tip.textContent.trim())"
    tab.wait_for(f"{texts}.some(text => {json.dumps(shown)}.includes(text))")
