"""The search index contains the text of a page, but neither its navigation nor the text of its pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from docs_build.tests.browser import Tab

docs = pytest.mark.docs
pytestmark = pytest.mark.needs("mkdocs")

# Navigation; badges and their labels; code chips; axis ticks, boxes and sources of pictures.
NOT_TEXT = (
    r"in reading order|of \d+ tutorials|On this page:|[←→] (?:engine|fsdp)|¶",
    r"(?:never run|not run|open|passed|proven|in part|only)(?:CPU|simulated|CUDA)",
    r"\bline \d+<|Computed while this page was built, by",
    r", for \d+\.\d+ ms|Milliseconds of the CPU clock since the end|Recorded on 20",
)


def documents(site: Path) -> list[dict[str, Any]]:
    text = (site / "search" / "documents.js").read_text(encoding="utf-8")
    return list(json.loads(text.partition("=")[2].rstrip(";\n")))


def test_exclusion_matches_full_class_and_keeps_attributes() -> None:
    from docs_build.pages.searching import leave_out

    left_out = '<b data-search-exclude="yes" class="badge open">open</b>'
    assert leave_out('<b class="badge open">open</b>') == left_out
    assert leave_out('<b class="badges">open</b>') == '<b class="badges">open</b>'
    assert leave_out("<svg><text>0 ms</text></svg>").startswith('<svg data-search-exclude="yes">')
    source = "<figcaption>A <b>step</b>. <small>2 cores</small></figcaption><small>here</small>"
    assert leave_out(source).count("exclude") == 1


@docs
@pytest.mark.parametrize("words", NOT_TEXT)
def test_search_excerpts_contain_only_text_of_the_page(site: Path, words: str) -> None:
    found = {one["location"]: re.search(f".{{0,40}}(?:{words})", one["text"]) for one in documents(site)}
    assert {place: match[0] for place, match in found.items() if match} == {}


@docs
def test_dialog_of_the_search_has_a_name(site: Path) -> None:
    assert 'role="dialog" aria-label="Search"' in (site / "learn/why.html").read_text(encoding="utf-8")


@docs
@pytest.mark.parametrize(
    ("words", "pages"),
    [
        ("save checkpoint", ("checkpoint", "use-it")),
        ("gradient accumulation", ("learn/accumulate", "choosing")),
        ("prefetch", ("learn/schedule",)),
        ("launch two machines", ("several-machines", "two-machines", "use-it")),
    ],
)
def test_search_finds_the_page_that_explains(address: str, tab: Tab, words: str, pages: tuple[str, ...]) -> None:
    tab.open(f"{address}index.html?q={words.replace(' ', '%20')}")
    tab.wait_for("document.querySelectorAll('.md-search-result__link').length > 1", 120)
    found = tab.look("[...document.querySelectorAll('.md-search-result__link')].slice(0, 2).map((one) => one.pathname)")
    assert any(page in one for page in pages for one in found), found


@docs
def test_every_page_can_be_found(site: Path) -> None:
    known = {one["location"].partition("#")[0] for one in documents(site)}
    pages = {page.relative_to(site).as_posix() for page in site.rglob("*.html")} - {"404.html"}
    # Only the answers for teachers are left out, by their front matter.
    assert pages - known == {"teach/answers.html"}
    assert known <= pages


@docs
@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("spec.html", "PREF-16"),
        ("read/engine/unit.html", "The state machine of one unit"),
        ("learn/schedule.html", "Units <strong>leave</strong>"),
        ("lab/slow_rank.html", "a separate process group with a longer time-out"),
        ("troubleshoot.html", "mixed torch.Tensor and DTensor"),
    ],
)
def test_search_index_contains_the_texts_of_the_pages(site: Path, page: str, words: str) -> None:
    plain = re.sub("<[^>]+>", "", words)
    texts = [one["title"] + one["text"] for one in documents(site) if one["location"].startswith(page)]
    assert any(plain in re.sub("<[^>]+>", "", text) for text in texts)


@docs
@pytest.mark.parametrize("from_disk", [False, True])
def test_search_texts_load_at_first_search(site: Path, address: str, tab: Tab, from_disk: bool) -> None:
    start = site.as_uri() + "/" if from_disk else address
    tab.open("about:blank")
    tab.open(start + "learn/schedule.html")
    tab.browser.wait(1.0)
    assert not [url for url in tab.requests() if "documents.js" in url]
    tab.click(".md-search__input")
    tab.type("rate limiter")
    tab.press("End")
    tab.wait_for("!!document.querySelector('.md-search-result__link')", 120)
    assert len([url for url in tab.requests() if "documents.js" in url]) == 1
    assert tab.problems() == []


@docs
def test_search_query_in_the_address_gives_results(address: str, tab: Tab) -> None:
    tab.open("about:blank")
    tab.open(address + "index.html?q=record_stream")
    tab.wait_for("!!document.querySelector('.md-search-result__link')", 120)
