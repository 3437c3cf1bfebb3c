"""A link to an anchor shows its target uncovered, below the header, at desktop and phone width."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs_build.tests.browser import Tab
from minifsdp.engine.messages import PAGE

# Whether an element is on the screen, below the header and other fixed elements, and its beginning is not covered.
IN_SIGHT = """((id) => {
    const e = document.getElementById(id), b = e.getBoundingClientRect();
    const bars = [...document.querySelectorAll('.md-header, .spec-filter')].map((bar) => bar.getBoundingClientRect());
    if (!b.height || b.top < Math.max(...bars.map((bar) => bar.bottom)) - 1 || b.top + 10 > innerHeight) return false;
    const top = document.elementFromPoint(b.left + Math.min(20, b.width / 2), b.top + Math.min(12, b.height / 2));
    return e === top || e.contains(top) || top.contains(e);
})"""


def anchors(site: Path, page: str) -> list[str]:
    """Five anchors that a user may link to: headings, requirements, definitions and documented names."""
    html = (site / page).read_text(encoding="utf-8").partition("<article")[2]
    found = re.findall(r'<(?:h[2-5]|dt|tr|a|section|div class="spec-row")\b[^>]*\bid="([^"]+)"', html)
    return [found[number * (len(found) - 1) // 4] for number in range(5)]


@pytest.mark.parametrize("size", [(1440, 900), (820, 1180), (390, 844)])
@pytest.mark.parametrize(
    "page", [PAGE, "glossary.html", "api.html", "spec.html", "evidence.html", "read/engine/unit.html"]
)
def test_link_target_is_visible(site: Path, address: str, tab: Tab, page: str, size: tuple[int, int]) -> None:
    tab.resize(*size)
    try:
        for id in anchors(site, page):
            tab.open(f"{address}{page}#{id}")
            tab.wait_for(f"{IN_SIGHT}({json.dumps(id)})", 5)
    finally:
        tab.resize()
