"""The terms of the glossary on other pages."""

from __future__ import annotations

import json
from pathlib import Path

from docs_build.pages import glossary
from docs_build.tests.browser import Tab


def test_tab_key_shows_definition_of_term(site: Path, tab: Tab) -> None:
    tab.open((site / "learn" / "unit.html").as_uri())
    shown = tab.each("article abbr", "e.title")
    # The first place of each term is marked, with its definition.
    assert len(shown) == len(set(shown)) > 3
    assert set(shown) <= set(glossary.terms().values())
    tab.focus("article abbr")
    tab.press("Tab")
    # The tooltip of the previously focused element may still be fading out.
    texts = "[...document.querySelectorAll('.md-tooltip2--active')].map(tip => tip.textContent.trim())"
    tab.wait_for(f"{texts}.some(text => {json.dumps(shown)}.includes(text))")
