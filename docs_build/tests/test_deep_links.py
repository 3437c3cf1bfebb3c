"""A link to an anchor shows its target uncovered, below the header, at desktop and phone width."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from docs_build.pages.paste import of_the_page
from docs_build.reading.messages import messages
from docs_build.recording.results import all_rows
from docs_build.tests.browser import Tab
from minifsdp.engine.messages import PAGE

pytestmark = [pytest.mark.docs, pytest.mark.needs("mkdocs")]

SIZES = [(1440, 900), (820, 1180), (390, 844)]

# Whether an element is on the screen, below the header and other fixed elements, and its beginning is not covered.
IN_SIGHT = """((id) => {
    const e = document.getElementById(id), b = e.getBoundingClientRect();
    const header = document.querySelector('.md-header').getBoundingClientRect();
    if (!b.height || b.top < header.bottom - 1 || b.top + 10 > innerHeight) return false;
    const top = document.elementFromPoint(b.left + Math.min(20, b.width / 2), b.top + Math.min(12, b.height / 2));
    return e === top || e.contains(top) || top.contains(e);
})"""


def some(names: list[str]) -> list[str]:
    """The first and the last name, and three between them."""
    return [names[number * (len(names) - 1) // 4] for number in range(5)]


def terms(site: Path, page: str) -> list[str]:
    """Anchors that a user may link to: headings, definitions and documented names."""
    html = (site / page).read_text(encoding="utf-8").partition("<article")[2]
    return re.findall(r'<(?:h[2-5]|dt|tr|a|section)\b[^>]*\bid="([^"]+)"', html)


def places_of(site: Path) -> list[tuple[str, str]]:
    ours, torchs = [one.id for one in messages()], [one.id for one in of_the_page()]
    found = [(PAGE, id) for id in some(ours) + some(torchs)]
    for page in ("glossary.html", "api.html", "spec.html", "evidence.html", "read/engine/unit.html"):
        found += [(page, id) for id in some(terms(site, page))]
    return [*found, *(("spec.html", row) for row in some([*all_rows()]))]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_link_target_is_visible(site: Path, address: str, tab: Tab, width: int, height: int) -> None:
    tab.resize(width, height)
    hidden = []
    for page, id in places_of(site):
        # Open another page first; otherwise only the address would change.
        tab.open("about:blank")
        tab.open(f"{address}{page}#{id}")
        try:
            tab.wait_for(f"{IN_SIGHT}({json.dumps(id)})", 5)
        except AssertionError:
            hidden.append(f"{page}#{id}")
    tab.resize(1280, 900)
    assert hidden == []


def test_element_behind_header_is_not_visible(address: str, tab: Tab) -> None:
    tab.open("about:blank")
    tab.open(f"{address}{PAGE}#E-nan")
    tab.wait_for(f"{IN_SIGHT}('E-nan')")
    tab.look("window.scrollBy(0, 60); true")
    assert not tab.look(f"{IN_SIGHT}('E-nan')")
    assert not tab.look(f"{IN_SIGHT}('E-flat-loss')")


SHOWN = "[...document.querySelectorAll('.spec-row')].filter((row) => !row.hidden).length"
FOCUS = "document.activeElement.id"


def press(tab: Tab, key: str, code: int, **text: str) -> None:
    tab.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
    tab.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)


def test_the_specs_filter_is_used_by_keyboard(address: str, tab: Tab) -> None:
    tab.open("about:blank")
    tab.open(address + "spec.html")
    everything = tab.look(SHOWN)
    # The first Tab stop of a page is the link that skips the navigation.
    tab.press("Tab")
    assert tab.look("document.activeElement.matches('.md-skip')")
    press(tab, "Enter", 13, text="\r")
    for _ in range(20):
        tab.press("Tab")
        if tab.look(FOCUS) == "spec-section":
            break
    assert tab.look(FOCUS) == "spec-section"
    # The focus is visible.
    look = "(({ outlineStyle, boxShadow }) => [outlineStyle, boxShadow])(getComputedStyle(document.activeElement))"
    assert tab.look(look) != ["none", "none"]
    press(tab, "ArrowDown", 40)
    of_section = tab.wait_for(f"(n => n < {everything} && n)({SHOWN})")
    tab.press("Tab")
    tab.press("Tab")
    assert tab.look(FOCUS) == "spec-words"
    tab.type("root")
    assert tab.wait_for(f"(n => n < {of_section} && n)({SHOWN})") > 0
    assert "words=root" in tab.look("location.search")
