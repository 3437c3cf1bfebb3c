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
# Headings, requirements, definitions, documented names, and lines of code.
ANCHOR = r'<(?:h[2-5]|dt|tr|a|section|div class="spec-row")\b[^>]*\bid="([^"]+)"'


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("page", [PAGE, "glossary.html", "api.html", "spec.html", "read/engine/unit.html"])
def test_link_target_is_visible(site: Path, address: str, tab: Tab, page: str, width: int) -> None:
    found = re.findall(ANCHOR, (site / page).read_text(encoding="utf-8").partition("<article")[2])
    tab.resize(width)
    for id in (found[0], found[len(found) // 2], found[-1]):
        tab.open(f"{address}{page}#{id}")
        tab.wait_for(f"{IN_SIGHT}({json.dumps(id)})", 5)
