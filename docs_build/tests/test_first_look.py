"""The first page as a new visitor sees it: the part above the fold, keyboard access, and terms with a tooltip."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from docs_build.pages import glossary
from docs_build.tests.browser import Tab

pytestmark = [pytest.mark.docs, pytest.mark.needs("mkdocs")]

BOTTOM = "document.querySelector('{}').getBoundingClientRect().bottom"


def test_every_built_page_has_its_own_description(site: Path) -> None:
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    found = {page: re.findall(r'<meta name="description" content="(.*?)">', page.read_text()) for page in pages}
    assert len(found) >= 125
    assert [page for page, texts in found.items() if len(texts) != 1] == []
    assert [text for text, number in Counter(texts[0] for texts in found.values()).items() if number > 1] == []


def test_command_start_and_picture_are_visible_without_scrolling(address: str, tab: Tab) -> None:
    tab.resize(1440, 900)
    tab.open(address + "index.html")
    for selector in (".home-words .command", ".home-words .md-button--primary", ".home-picture svg"):
        assert 0 < tab.look(BOTTOM.format(selector)) < 900, selector
    # The whole command is visible, on as many lines as it needs.
    code = "document.querySelector('.command code')"
    assert tab.look(f"{code}.scrollWidth <= {code}.clientWidth")
    tab.resize(1280, 900)


def test_cards_are_ordered_by_importance(address: str, tab: Tab) -> None:
    tab.open(address + "index.html")
    cards = tab.look("[...document.querySelectorAll('.apis a')].map(card => card.getAttribute('href'))")
    assert cards[:3] == ["tutorials/naive_fsdp.html", "learn/index.html", "tools/player.html"]
    assert tab.look("document.querySelector('.md-button--primary').getAttribute('href')") == cards[0]


def test_tab_key_shows_definition_of_term(site: Path, tab: Tab) -> None:
    tab.open((site / "learn" / "unit.html").as_uri())
    words = "[...document.querySelectorAll('article abbr')].map(word => word.title)"
    shown = tab.look(words)
    assert shown
    assert len(shown) == len(set(shown))
    assert set(shown) <= set(glossary.terms().values())
    for _ in range(80):
        tab.press("Tab")
        if tab.look("document.activeElement.tagName") == "ABBR":
            break
    # The tooltip of the previously focused element may still be fading out.
    texts = "[...document.querySelectorAll('.md-tooltip2--active')].map(tip => tip.textContent.trim())"
    tab.wait_for(f"{texts}.some(text => {json.dumps(shown)}.includes(text))")


def test_code_contains_no_marked_terms(site: Path) -> None:
    marked = re.compile(r"<(?:code|pre)\b[^>]*>(?:(?!</(?:code|pre)>).)*<abbr", re.DOTALL)
    assert [path for path in site.rglob("*.html") if marked.search(path.read_text(encoding="utf-8"))] == []
