"""The search over all pages: errors find their entry, words the page that explains them, and excerpts are texts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs_build.reading.messages import Message, messages
from docs_build.tests.browser import Tab
from docs_build.tests.pasted import OF_TORCH, share, spoken
from minifsdp.engine.messages import PAGE

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


def begin(tab: Tab, address: str) -> None:
    tab.open(address + "learn/why.html")
    # The texts are loaded when a search begins.
    assert not [url for url in tab.requests() if "documents.js" in url]
    tab.click(".md-search__input")
    tab.wait_for(READY, 120)


@pytest.fixture(scope="module")
def page(address: str, tab: Tab) -> Tab:
    begin(tab, address)
    return tab


def found_in(tab: Tab, text: str) -> list[str]:
    """The first results for a text: the anchors of their addresses, or pages."""
    return list(tab.look(f"{ASK}({json.dumps(text)})"))


def in_a_line(message: Message) -> dict[str, str]:
    """The texts that a user copies from a terminal into the search field, which has one line."""
    return {
        "200 characters": spoken(message, False)[:200],
        "all": " ".join(spoken(message, True).split()),
        "address": f"{PAGE}#{message.id}",
        "ID": message.id,
    }


@pytest.mark.parametrize("part", ["200 characters", "all", "address", "ID"])
def test_each_message_of_this_package_finds_its_entry_first(page: Tab, part: str) -> None:
    assert share({one.id: found_in(page, in_a_line(one)[part]) for one in messages()}) == 1
    assert page.problems() == []


def test_each_error_of_torch_finds_its_entry_first(page: Tab) -> None:
    assert share({id: found_in(page, " ".join(text.split())) for id, text in OF_TORCH.items()}) == 1


WORDS = {
    "save checkpoint": "checkpoint|use-it",
    "gradient accumulation": "learn/accumulate|choosing",
    "prefetch": "learn/schedule",
    "launch two machines": "several-machines|two-machines|use-it",
    "record_stream": "",
    "PREF-16": "",
    "title:mixed": "",
    "+tied +weights": "",
}


@pytest.mark.parametrize("words", WORDS)
def test_words_in_the_address_find_the_page_that_explains_them(address: str, tab: Tab, words: str) -> None:
    tab.open(f"{address}index.html?q={words.replace(' ', '%20').replace('+', '%2B')}")
    tab.wait_for("document.querySelectorAll('.md-search-result__link').length > 0", 120)
    found = tab.look("[...document.querySelectorAll('.md-search-result__link')].slice(0, 2).map((one) => one.pathname)")
    assert re.search(WORDS[words], " ".join(found)), found


def test_search_finds_errors_from_a_local_file(site: Path, tab: Tab) -> None:
    begin(tab, site.as_uri() + "/")
    assert found_in(tab, OF_TORCH["E-freed-storage"])[0] == "E-freed-storage"
    assert tab.problems() == []
