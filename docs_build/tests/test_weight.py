"""Number of bytes that a page loads on a first visit, with an empty cache and without compression."""

from __future__ import annotations

import pytest

from docs_build.tests.browser import Tab
from docs_build.tests.kinds import KINDS

pytestmark = [pytest.mark.docs, pytest.mark.needs("mkdocs")]

# A page with its styles and scripts; those of the theme are a quarter of it. The spec page has all requirements.
MOST = {"spec.html": 1_200_000}
ELSEWHERE = 800_000


def loaded(tab: Tab) -> dict[str, int]:
    """Bytes of each address that was loaded since the page was opened."""
    addresses = {}
    found: dict[str, int] = {}
    for event in tab.browser.events:
        facts = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            addresses[facts["requestId"]] = facts["request"]["url"]
        if event.get("method") == "Network.loadingFinished" and facts["requestId"] in addresses:
            url = addresses[facts["requestId"]]
            found[url] = found.get(url, 0) + int(facts["encodedDataLength"])
    return found


@pytest.fixture(scope="module")
def cold(address: str, tab: Tab) -> dict[str, dict[str, int]]:
    """One page of each kind, opened with the browser's cache disabled."""
    tab.send("Network.setCacheDisabled", cacheDisabled=True)
    found = {}
    for page in KINDS:
        tab.open("about:blank")
        tab.open(address + page)
        # Scripts send further requests after the page is loaded.
        for _ in range(3):
            tab.browser.wait(0.3)
        found[page] = {url.removeprefix(address): size for url, size in loaded(tab).items()}
    tab.send("Network.setCacheDisabled", cacheDisabled=False)
    return found


def test_page_size_is_limited(cold: dict[str, dict[str, int]]) -> None:
    weights = {page: sum(files.values()) for page, files in cold.items()}
    print(weights)
    assert min(weights.values()) > 100_000
    assert {page: weight for page, weight in weights.items() if weight > MOST.get(page, ELSEWHERE)} == {}


def test_scripts_are_loaded_by_the_pages_that_use_them(cold: dict[str, dict[str, int]]) -> None:
    users = {"js/player": "tools/player.html", "runs/": "tools/player.html", "js/spec.js": "spec.html"}
    for script, user in users.items():
        assert [page for page, files in cold.items() if any(script in name for name in files)] == [user]
