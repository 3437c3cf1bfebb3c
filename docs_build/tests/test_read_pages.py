"""The pages that show the code, in a browser: the address of a line, folded lines, keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_build.reading.source import read_module
from docs_build.tests.browser import Tab

PAGE, MODULE = "read/engine/unit.html", read_module("engine/unit.py")
LINES = MODULE.text.splitlines()
PLAIN = next(n for n, line in enumerate(LINES, 1) if "self.layout.all_gather(" in line)
FOLDED = next(n for n, line in enumerate(LINES, 1) if "all_gather_begins(self)" in line)
# No line between this one and the plain one is visible.
BEFORE = max(n for n in range(1, FOLDED) if n not in MODULE.recording)
# In the docstring of `wait`, which is shown on the left, and the code before it.
PROSE = next(n for n, line in enumerate(LINES, 1) if "`unshard` was not called." in line)
HEAD = max(n for row in MODULE.rows for n in row.lines if n < PROSE)


def number(line: int) -> str:
    return f"document.getElementById('L{line}')"


def in_sight(line: int) -> str:
    """Whether a line is on the screen, below the header, and not covered."""
    return f"""(() => {{
        const e = {number(line)}, b = e.getBoundingClientRect();
        if (!b.height || b.top < 60 || b.bottom > innerHeight) return false;
        return document.elementFromPoint(b.x + b.width / 2, b.y + b.height / 2) === e;
    }})()"""


@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
@pytest.mark.parametrize(("asked", "shown"), [(PLAIN, PLAIN), (FOLDED, FOLDED), (PROSE, HEAD)])
def test_address_of_a_line_shows_the_line(site: Path, tab: Tab, asked: int, shown: int, size: tuple[int, int]) -> None:
    tab.resize(*size)
    try:
        tab.open((site / PAGE).as_uri() + f"#L{asked}")
        tab.wait_for(in_sight(shown))
        assert tab.problems() == []
    finally:
        tab.resize()


def test_recording_code_is_folded_and_opens_by_key(address: str, tab: Tab) -> None:
    tab.open(address + PAGE)
    fold = f"{number(FOLDED)}.closest('details')"
    assert not tab.look(f"{number(FOLDED)}.checkVisibility()")
    tab.look(f"{fold}.querySelector('summary').focus()")
    tab.press(" ")
    tab.wait_for(f"{fold}.open && {number(FOLDED)}.checkVisibility()")


def test_arrow_keys_move_between_lines_and_tab_key_leaves_them(address: str, tab: Tab) -> None:
    tab.open(f"{address}{PAGE}#L{BEFORE}")
    tab.wait_for(f"{number(BEFORE)}.tabIndex === 0")
    tab.focus(f"#L{BEFORE}")
    tab.press("ArrowDown")
    # The lines after it are folded.
    assert tab.look("document.activeElement.id") == f"L{PLAIN}"
    tab.press("ArrowUp")
    assert tab.look("document.activeElement.id") == f"L{BEFORE}"
    tab.press("Tab")
    assert not tab.look("document.activeElement.matches('a[data-n]')")


def test_a_click_on_a_number_copies_the_link_and_a_selection_has_no_numbers(address: str, tab: Tab) -> None:
    tab.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    tab.open(address + PAGE)
    tab.click(f"#L{PLAIN}")
    tab.wait_for(f"document.querySelector('[role=status].read-said').textContent.includes('line {PLAIN}')")
    assert tab.look("location.hash") == f"#L{PLAIN}"
    select = f"(s => {{ s.selectAllChildren({number(PLAIN)}.closest('code')); return s.toString(); }})(getSelection())"
    assert tab.look(select).strip() == LINES[PLAIN - 1].strip()
