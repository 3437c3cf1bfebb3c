"""The search over all pages: errors find their entry, words the page that explains them, and excerpts are texts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from docs_build.reading.messages import messages
from docs_build.tests.browser import Tab
from docs_build.tests.pasted import ASKED, OF_TORCH, not_first, spoken

READY = "document.querySelector('.md-search-result__meta').textContent.includes('Type to start')"
# Types a text into the search field and waits until the theme has drawn the answer. Search for one text at a time:
# otherwise a late answer could be taken for the answer to the next text.
ASK = """((text) => new Promise((done) => {
    const field = document.querySelector(".md-search__input");
    const list = document.querySelector(".md-search-result__list");
    list.replaceChildren();
    new MutationObserver((_, observer) => {
        const links = [...list.querySelectorAll(".md-search-result__link")].slice(0, 3);
        if (!links.length) return;
        observer.disconnect();
        done(links.map((one) => one.hash.slice(1) || one.pathname));
    }).observe(list, { childList: true });
    field.value = text;
    field.dispatchEvent(new Event("keyup"));
}))"""


def test_each_error_finds_its_entry_first_also_from_a_local_file(site: Path, tab: Tab) -> None:
    tab.open((site / "learn/why.html").as_uri())
    # The texts are loaded when a search begins.
    assert not [request for request in tab.page.requests() if "documents.js" in request.url]
    tab.click(".md-search__input")
    tab.wait_for(READY, 120)
    # The search field has one line.
    ours = {message.id: spoken(message, False)[:200] for message in messages()}
    torchs = {id: " ".join(text.split()) for id, text in OF_TORCH.items()}
    found = {id: tab.look(f"{ASK}({json.dumps(text)})") for id, text in (ours | torchs).items()}
    assert not_first(found) == {}
    assert tab.problems() == []


@pytest.mark.parametrize("words", ["loss becomes nan", "my training hangs", "ran out of memory", "slower than DDP"])
def test_problem_in_a_few_words_finds_its_entry_first(site: Path, tab: Tab, words: str) -> None:
    tab.open((site / "index.html").as_uri())
    tab.click(".md-search__input")
    tab.wait_for(READY, 120)
    assert tab.look(f"{ASK}({json.dumps(words)})")[0] == ASKED[words]


WORDS = {
    "save checkpoint": "checkpoint|use-it",
    "gradient accumulation": "learn/accumulate|choosing",
    "prefetch": "learn/schedule",
    "launch two machines": "several-machines|two-machines|use-it",
}


@pytest.mark.parametrize("words", WORDS)
def test_words_in_the_address_find_the_page_that_explains_them(address: str, tab: Tab, words: str) -> None:
    tab.open(f"{address}index.html?q={words.replace(' ', '%20')}")
    tab.wait_for("document.querySelectorAll('.md-search-result__link').length > 0", 120)
    found = tab.look("[...document.querySelectorAll('.md-search-result__link')].slice(0, 2).map((one) => one.pathname)")
    assert re.search(WORDS[words], " ".join(found)), found


def documents(site: Path) -> list[dict[str, Any]]:
    """The texts that the search finds."""
    text = (site / "search" / "documents.js").read_text(encoding="utf-8")
    return list(json.loads(text.partition("=")[2].rstrip(";\n")))


@pytest.mark.spec("TEACH-05")
def test_every_page_but_the_answers_for_teachers_can_be_found(site: Path) -> None:
    known = {one["location"].partition("#")[0] for one in documents(site)}
    pages = {page.relative_to(site).as_posix() for page in site.rglob("*.html")} - {"404.html"}
    assert pages - known == {"teach/answers.html"}


def test_excerpts_contain_neither_navigation_nor_badges_nor_labels_of_pictures(site: Path) -> None:
    others = r"in reading order|On this page:|¶|(?:never run|open|proven|in part|only)(?:CPU|CUDA)|, for \d+\.\d+ ms"
    found = {one["location"]: re.search(f".{{0,40}}(?:{others})", one["text"]) for one in documents(site)}
    assert {place: match[0] for place, match in found.items() if match} == {}
