"""The glossary, and its terms on other pages."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.needs("mkdocs")

EXPECTED = {
    *("Rank", "World size", "Process group", "All-gather", "Reduce-scatter", "Unit", "Shard", "Local shard", "DTensor"),
    *("Flat parameter", "Communication stream", "Mixed precision", "Prefetch, prefetching", "Rate limiter", "FSDP1"),
    *("Pre-backward hook", "Resharding, reshard", "Device mesh, mesh", "FSDP2"),
}


def converted(text: str) -> str:
    import markdown

    from docs_build.pages import glossary

    html = markdown.markdown(text + glossary.definitions(), extensions=["abbr", "pymdownx.superfences"])
    return glossary.first_places(html)


def marked(html: str) -> list[str]:
    return re.findall(r"<abbr [^>]*>(.*?)</abbr>", html)


def test_each_term_has_a_short_definition() -> None:
    from docs_build.pages import glossary

    assert glossary.terms().keys() >= EXPECTED
    assert {title: text for title, text in glossary.terms().items() if not 15 <= len(text) <= 200} == {}
    assert [text for text in glossary.terms().values() if re.search(r"[`*\[\]<>]", text)] == []
    assert len(set(glossary.terms().values())) == len(glossary.terms())


def test_only_the_first_place_of_a_term_is_marked_whatever_its_form() -> None:
    html = converted("Units are cut. A unit on each rank.\n\nThe ranks gather the unit by all-gather.")
    assert marked(html) == ["Units", "rank", "all-gather"]
    definition = "One of the processes that train together, or the number of this process."
    assert f'<abbr title="{definition}" tabindex="0">rank</abbr>' in html


def test_longer_term_has_priority() -> None:
    assert marked(converted("A local shard, a shard and a root unit.")) == ["local shard", "shard", "root unit"]


def test_code_headlines_and_links_are_not_changed() -> None:
    html = converted("# The unit\n\n`unit` and [the rank](x.md)\n\n```python\nunit = mesh\n```\n\nOf a unit.")
    assert marked(html) == ["unit"]
    assert html.index("<abbr") > html.index("mesh")
