"""Each page has a description of one sentence."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.needs("mkdocs")

DOCS = Path(__file__).resolve().parents[2] / "docs"


def heads() -> dict[str, tuple[dict[str, Any], str]]:
    """Metadata and title of each page, including generated pages."""
    from mkdocs.utils.meta import get_data

    from docs_build.reading.order import all_modules
    from docs_build.recording import lessons

    found: dict[str, tuple[dict[str, Any], str]] = {}
    for path in sorted(DOCS.rglob("*.md")):
        text, head = get_data(path.read_text(encoding="utf-8"))
        found[path.relative_to(DOCS).as_posix()] = (head, text.strip().splitlines()[0].removeprefix("# "))
    found |= {f"read/{name}": ({"minifsdp_module": name}, name) for name in all_modules()}
    found |= {one.name: ({"minifsdp_lesson": one.name}, one.name) for one in lessons.LESSONS}
    return found


def test_every_page_has_a_unique_description_of_suitable_length() -> None:
    from docs_build.pages import descriptions

    said = {uri: descriptions.description(uri, head, title) or "" for uri, (head, title) in heads().items()}
    assert len(said) >= 125
    bounds = range(descriptions.SHORTEST, descriptions.LONGEST + 1)
    assert {uri: text for uri, text in said.items() if len(text) not in bounds} == {}
    assert [text for text, number in Counter(said.values()).items() if number > 1] == []


def test_long_description_is_cut_and_short_one_extended() -> None:
    from docs_build.pages.descriptions import LONGEST, fitted

    cut = fitted("word, " * 40, "More.")
    assert len(cut) <= LONGEST
    assert cut.endswith("word ...")
    assert fitted("Short", "More.") == "Short. More."
