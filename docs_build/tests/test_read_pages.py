"""The pages that show the code, in a browser: the address of a line, folded lines, keys, printing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs_build.reading.source import read_module
from docs_build.tests.browser import Tab

pytestmark = [pytest.mark.docs, pytest.mark.needs("mkdocs")]

PAGE, MODULE = "read/engine/unit.html", read_module("engine/unit.py")
LINES = MODULE.text.splitlines()
PLAIN = next(n for n, line in enumerate(LINES, 1) if "self.layout.all_gather(" in line)
FOLDED = next(n for n, line in enumerate(LINES, 1) if "all_gather_begins(self)" in line)
# No line between this one and the plain one is visible.
BEFORE = max(n for n in range(1, FOLDED) if n not in MODULE.recording)
# In the docstring of `wait`, which is shown on the left.
PROSE = next(n for n, line in enumerate(LINES, 1) if "`unshard` was not called." in line)


def number(line: int) -> str:
    return f"document.getElementById('L{line}')"


def open_at(tab: Tab, address: str, line: int) -> None:
    # Open another page first; otherwise only the address would change.
    tab.open("about:blank")
    tab.open(f"{address}{PAGE}#L{line}")


def in_sight(line: int) -> str:
    """Whether a line is on the screen, below the header, and not covered."""
    return f"""(() => {{
        const e = {number(line)}, b = e.getBoundingClientRect();
        if (!b.height || b.top < 60 || b.bottom > innerHeight) return false;
        return document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2) === e;
    }})()"""


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (820, 1180), (390, 844)])
@pytest.mark.parametrize("line", [PLAIN, FOLDED])
def test_address_of_a_line_shows_the_line(address: str, tab: Tab, line: int, width: int, height: int) -> None:
    tab.resize(width, height)
    open_at(tab, address, line)
    tab.wait_for(in_sight(line))
    assert tab.look(f"{number(line)}.matches(':target')")
    assert tab.problems() == []
    tab.resize(1280, 900)


def test_the_address_of_a_line_works_from_a_disk(site: Path, tab: Tab) -> None:
    tab.open((site / PAGE).as_uri() + f"#L{FOLDED}")
    tab.wait_for(in_sight(FOLDED))
    assert tab.problems() == []


def test_address_of_a_prose_line_shows_the_preceding_code(address: str, tab: Tab) -> None:
    before = max(n for row in MODULE.rows for n in row.lines if n < PROSE)
    assert LINES[before - 1].strip() == "def wait(self) -> None:"
    open_at(tab, address, PROSE)
    tab.wait_for(in_sight(before))


def test_recording_code_is_folded_and_opens_by_key(address: str, tab: Tab) -> None:
    tab.open(f"{address}{PAGE}")
    fold = f"{number(FOLDED)}.closest('details')"
    assert tab.look("[...document.querySelectorAll('.sbs-fold')].filter(e => e.open).length") == 0
    assert not tab.look(f"{number(FOLDED)}.checkVisibility()")
    tab.look(f"{fold}.querySelector('summary').focus()")
    tab.press(" ")
    tab.wait_for(f"{fold}.open && {number(FOLDED)}.checkVisibility()")
    tab.press(" ")
    tab.wait_for(f"!{fold}.open")


def test_arrow_keys_move_between_lines_and_tab_key_leaves_them(address: str, tab: Tab) -> None:
    assert MODULE.recording >= {*range(BEFORE + 1, PLAIN)}
    open_at(tab, address, BEFORE)
    stops = "[...document.querySelectorAll('.sbs-code a[data-n]')].filter(e => e.tabIndex === 0).map(e => e.id)"
    tab.wait_for(f"{stops}.join() === 'L{BEFORE}'")
    tab.look(f"{number(BEFORE)}.focus()")
    tab.press("ArrowDown")
    # The lines after it are folded.
    assert tab.look("document.activeElement.id") == f"L{PLAIN}"
    assert tab.look(stops) == [f"L{PLAIN}"]
    tab.press("ArrowUp")
    assert tab.look("document.activeElement.id") == f"L{BEFORE}"
    tab.press("Tab")
    assert not tab.look("document.activeElement.matches('a[data-n]')")


def test_a_click_on_a_number_copies_the_link(address: str, tab: Tab) -> None:
    tab.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    tab.open(f"{address}{PAGE}")
    tab.click(f"#L{PLAIN}")
    tab.wait_for(f"document.querySelector('[role=status].read-said').textContent.includes('line {PLAIN}')")
    assert tab.look("location.hash") == f"#L{PLAIN}"
    assert tab.problems() == []


def test_a_selection_of_code_has_no_numbers(address: str, tab: Tab) -> None:
    tab.open(f"{address}{PAGE}")
    block = f"{number(PLAIN)}.closest('code')"
    text = tab.look(f"(() => {{ const s = getSelection(); s.selectAllChildren({block}); return s.toString(); }})()")
    assert text.strip() == LINES[PLAIN - 1].strip()
    shown = tab.look(f"getComputedStyle({number(PLAIN)}, '::before').content")
    assert shown == f'"{PLAIN}"'
    assert tab.look(f"getComputedStyle({number(PLAIN)}).visibility") == "visible"


def test_printed_page_shows_all_code(address: str, tab: Tab) -> None:
    tab.open(f"{address}{PAGE}")
    tab.send("Emulation.setEmulatedMedia", media="print")
    try:
        cut = "[...document.querySelectorAll('.sbs-code code')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert tab.look(f"{number(FOLDED)}.getBoundingClientRect().height") > 0
        assert tab.look(cut) == 0
    finally:
        tab.send("Emulation.setEmulatedMedia", media="")


def test_no_page_of_code_has_an_id_twice(site: Path) -> None:
    for page in sorted((site / "read").rglob("*.html")):
        ids = re.findall(r' id="([^"]+)"', page.read_text(encoding="utf-8"))
        assert [one for one in set(ids) if ids.count(one) > 1] == [], page.name
