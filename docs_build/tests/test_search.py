"""The search over all pages, given an error message: its entry on "Troubleshoot" is the first result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs_build.reading.messages import messages
from docs_build.tests.browser import Tab
from docs_build.tests.pasted import OF_TORCH, spoken
from docs_build.tests.test_paste import share
from minifsdp.engine.messages import PAGE

pytestmark = [pytest.mark.docs, pytest.mark.needs("mkdocs")]

# Texts that a user copies from a terminal into the one-line search field.
OURS = {
    "the first 200 characters": lambda message: spoken(message, False)[:200],
    "the whole message": lambda message: " ".join(spoken(message, True).split()),
    "the address that it prints": lambda message: f"{PAGE}#{message.id}",
    "the end of the address": lambda message: message.id,
}

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


@pytest.fixture(scope="module")
def page(address: str, tab: Tab) -> Tab:
    tab.open(address + "index.html")
    tab.click(".md-search__input")
    tab.wait_for("document.querySelector('.md-search-result__meta').textContent.includes('Type to start')", 120)
    return tab


def found_in(tab: Tab, asked: dict[str, str]) -> dict[str, list[str]]:
    """The first results for each text: the anchors of their addresses, or pages."""
    return {id: tab.look(f"{ASK}({json.dumps(text)})") for id, text in asked.items()}


@pytest.mark.parametrize("part", OURS)
def test_each_message_of_this_package_finds_its_entry_first(page: Tab, part: str) -> None:
    asked = {message.id: OURS[part](message) for message in messages()}
    assert share(f"search, ours, {part}", found_in(page, asked)) == 1
    assert page.problems() == []


def test_each_error_of_torch_finds_its_entry_first(page: Tab) -> None:
    asked = {id: " ".join(text.split()) for id, text in OF_TORCH.items()}
    assert share("search, torch's", found_in(page, asked)) == 1


@pytest.mark.parametrize("words", ["rate limiter", "PREF-16", "title:mixed", "+tied +weights", "reshard_after_forward"])
def test_theme_handles_other_searches(page: Tab, words: str) -> None:
    assert page.look(f"minifsdpTroubles({json.dumps(words)})") == []
    assert found_in(page, {"it": words})["it"]


def test_search_finds_errors_from_a_local_file(site: Path, tab: Tab) -> None:
    tab.open((site / "learn/why.html").as_uri())
    tab.click(".md-search__input")
    tab.wait_for("document.querySelector('.md-search-result__meta').textContent.includes('Type to start')", 120)
    assert found_in(tab, {"it": OF_TORCH["E-freed-storage"]})["it"][0] == "E-freed-storage"
    assert tab.problems() == []
