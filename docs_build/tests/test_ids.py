"""Every ID is unique on its page. Otherwise a link to the second element would lead to the first."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest


class _Ids(HTMLParser):
    """Counts the ids of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.update(value for name, value in attrs if name == "id" and value)


def twice(html: str) -> list[str]:
    ids = _Ids()
    ids.feed(html)
    return [name for name, number in ids.found.items() if number > 1]


def test_duplicate_id_inside_a_picture_is_found() -> None:
    assert twice('<h2 id="a">x</h2><svg><defs><marker id="a"/></defs></svg><p id="b">') == ["a"]


@pytest.mark.docs
@pytest.mark.needs("mkdocs")
def test_no_id_is_there_twice_on_any_page(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 100
    found = {page.relative_to(site).as_posix(): twice(page.read_text(encoding="utf-8")) for page in pages}
    assert {page: names for page, names in found.items() if names} == {}


@pytest.mark.needs("mkdocs")
@pytest.mark.parametrize("number", range(12))
def test_source_rows_of_tutorial_have_unique_names(number: int) -> None:
    from docs_build.reading.source import read_module
    from docs_build.recording.lessons import LESSONS

    anchors = [row.anchor for row in read_module(LESSONS[number].name).rows]
    assert [anchor for anchor, times in Counter(anchors).items() if times > 1] == []
