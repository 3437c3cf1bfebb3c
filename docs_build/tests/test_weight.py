"""Number of bytes that a page loads on a first visit, with an empty cache and without compression."""

from __future__ import annotations

import pytest

from docs_build.tests.browser import Tab
from docs_build.tests.kinds import KINDS

# A page with its styles and scripts; those of the theme are a quarter of it. The spec page has all requirements.
MOST = {"spec.html": 1_200_000}
ELSEWHERE = 800_000


@pytest.mark.parametrize("page", KINDS)
def test_page_size_is_limited_and_the_player_is_loaded_by_its_page_only(address: str, tab: Tab, page: str) -> None:
    tab.send("Network.setCacheDisabled", cacheDisabled=True)
    tab.open(address + page)
    # Scripts send further requests after the page is loaded.
    for _ in range(3):
        tab.browser.wait(0.3)
    tab.send("Network.setCacheDisabled", cacheDisabled=False)
    finished = [event["params"] for event in tab.browser.events if event.get("method") == "Network.loadingFinished"]
    assert 100_000 < sum(one["encodedDataLength"] for one in finished) <= MOST.get(page, ELSEWHERE)
    assert any("js/player" in url for url in tab.requests()) == (page == "tools/player.html")
    assert any("js/spec.js" in url for url in tab.requests()) == (page == "spec.html")
