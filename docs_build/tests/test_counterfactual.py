"""The section "Remove one line": its texts, and its pictures in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from docs_build.tests.browser import Tab
from docs_build.tests.contrast import contrasts

pytestmark = pytest.mark.needs("mkdocs")

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "docs" / "assets"
RECORD: dict[str, Any] = json.loads((ROOT / "docs" / "data" / "counterfactual.json").read_text(encoding="utf-8"))
ENTRIES = {entry["name"]: entry for entry in RECORD["entries"]}
SIZES = {"phone": (390, 844), "desk": (1280, 900)}
NOW = "document.querySelector('.counterfactual-now').textContent"
COLUMN = "Number(document.getElementById('counterfactual-column').value)"
CHOICE, INTACT = "#counterfactual-choice", "#counterfactual-intact"
VISIBLE = (
    "[...document.querySelectorAll('.counterfactual section')].filter((e) => e.offsetParent).map((e) => e.dataset.name)"
)


@pytest.mark.spec("COUNTERFACTUAL-04")
def test_each_removed_line_has_code_result_and_a_check_that_detects_it() -> None:
    from docs_build.pages import counterfactual

    html = counterfactual.section("streams.html")
    sections = dict(re.findall(r'<section data-name="([^"]+)" id="[^"]+">(.*?)</section>', html, re.DOTALL))
    assert list(sections) == list(ENTRIES)
    for name, section in sections.items():
        assert ENTRIES[name]["lesson"] in section
        assert section.count("Detected by ") >= 1
        assert ("are wrong." in section) is bool(ENTRIES[name]["race"])
        assert f'href="read/{ENTRIES[name]["file"].replace(".py", ".html")}' in section
    assert (
        "F0 (mm) reads bytes 0 to 256 before AG0 (all_gather_single) writes them." in sections["forward-does-not-wait"]
    )
    assert "RACE: read of bytes" in sections["forward-does-not-wait"]
    assert "LIM-02" in sections["unlimited-gathers"]


@pytest.mark.spec("COUNTERFACTUAL-04")
def test_a_check_must_be_recorded_for_each_line() -> None:
    from docs_build.pages import counterfactual

    with pytest.raises(KeyError):
        counterfactual.notices("no-such-break")


@pytest.mark.spec("COUNTERFACTUAL-04")
def test_both_pages_contain_the_section_and_its_style() -> None:
    for page in ("streams.md", "tools/player.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert "{{ counterfactual }}" in text
        assert "assets/css/counterfactual.css" in text


# --- in a browser ---


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The section alone as a file, with its styles and scripts; the address of the file."""
    from docs_build.pages import counterfactual

    styles = "".join((ASSETS / "css" / f"{name}.css").read_text() for name in ("site", "counterfactual", "print"))
    colours = ":root { --md-default-fg-color: #1d2733; --md-default-bg-color: #fff; --md-accent-fg-color: #234f9b; }"
    colours += "[data-md-color-scheme=slate] { --md-default-fg-color: #e4e8ee; --md-default-bg-color: #14181d;"
    colours += "--md-accent-fg-color: #9cc0f8; color: #e4e8ee; background: #14181d; }"
    colours += "a { color: var(--md-accent-fg-color); }"
    script = (ASSETS / "js" / "counterfactual.js").read_text()
    section = counterfactual.section("streams.html")
    html = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Test</title><style>{styles}{colours}</style>
    <body data-md-color-scheme="default"><article class="md-typeset">{section}</article>
    <script>{counterfactual.script()}</script><script>{script}</script></body></html>"""
    file = tmp_path_factory.mktemp("counterfactual") / "page.html"
    file.write_text(html, encoding="utf-8")
    return file.as_uri()


def at(tab: Tab, page: str, name: str = "", size: str = "desk") -> Tab:
    tab.resize(*SIZES[size])
    tab.open(page)
    if name:
        tab.choose(CHOICE, name)
    return tab


@pytest.mark.docs
@pytest.mark.spec("COUNTERFACTUAL-04")
def test_each_choice_shows_its_text_and_draws_all_boxes(page: str, tab: Tab) -> None:
    at(tab, page)
    for name, entry in ENTRIES.items():
        tab.choose(CHOICE, name)
        assert tab.look(VISIBLE) == [name]
        assert tab.look("document.querySelectorAll('.cf-box').length") == len(entry["boxes"])
        assert tab.look("document.querySelectorAll('.cf-missing').length") == bool(entry["race"])
        if entry["race"]:
            new = entry["boxes"][entry["race"]["new"][0]]
            assert tab.look(COLUMN) == new[2]
            assert "Too early: " in tab.look(NOW)
        tab.press("End")
    assert tab.problems() == []
    # The file needs nothing else.
    assert tab.requests() == [page]


@pytest.mark.docs
@pytest.mark.spec("COUNTERFACTUAL-04")
def test_replay_is_operated_with_the_keyboard(page: str, tab: Tab) -> None:
    at(tab, page)
    tab.look("document.getElementById('counterfactual-column').focus(); true")
    tab.press("Home")
    assert tab.look(COLUMN) == 1
    # No later box is shown as wrong.
    assert tab.look("document.querySelectorAll('.cf-wrong').length") == 0
    tab.press("ArrowRight")
    assert tab.look(COLUMN) == 2
    assert "48 of 48 elements that F0 writes are wrong." in tab.look(NOW)
    tab.press("ArrowRight")
    assert "Too late: AG0" in tab.look(NOW)
    tab.press("End")
    wrong = sum(box[3] > 0 for box in ENTRIES["forward-does-not-wait"]["boxes"])
    assert tab.look("document.querySelectorAll('.cf-wrong').length") == wrong
    assert tab.look("[...document.querySelectorAll('button')].map((e) => e.disabled)") == [False, True]
    tab.press("Tab")
    tab.press(" ")
    assert tab.look(COLUMN) == int(tab.look("document.getElementById('counterfactual-column').max")) - 1


@pytest.mark.docs
@pytest.mark.spec("COUNTERFACTUAL-04")
def test_the_kept_line_shows_the_intact_step(page: str, tab: Tab) -> None:
    at(tab, page, "unlimited-gathers")
    assert tab.look(NOW).endswith(f"the peak is {ENTRIES['unlimited-gathers']['peak']:,}.")
    tab.click(INTACT)
    intact = RECORD["intact"]["flat, 5 blocks"]
    assert tab.look(NOW).endswith(f"the peak is {intact['peak']:,}.")
    assert tab.look("document.querySelectorAll('.cf-box').length") == len(intact["boxes"])
    assert tab.look("document.querySelectorAll('.cf-wrong, .cf-missing').length") == 0


@pytest.mark.docs
@pytest.mark.spec("COUNTERFACTUAL-04")
@pytest.mark.parametrize("scheme", ["default", "slate"])
@pytest.mark.parametrize("size", SIZES)
def test_section_fits_the_window_and_its_texts_can_be_read(page: str, tab: Tab, size: str, scheme: str) -> None:
    at(tab, page, "reduces-before-backward", size)
    tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}'); true")
    for column in ("1", "9", "99"):
        tab.choose("#counterfactual-column", column)
        found = contrasts(tab, ".counterfactual *")
        assert len(found) > 10
        assert {name: round(ratio, 2) for ratio, name in found if ratio < 4.5} == {}
    assert tab.look("document.documentElement.scrollWidth <= innerWidth")
    # The picture scrolls inside of its frame, and the current column is visible.
    box = "document.querySelector('.cf-now').getBoundingClientRect()"
    frame = "document.querySelector('.counterfactual .recorded-scroll').getBoundingClientRect()"
    assert tab.look(f"{box}.left >= {frame}.left - 1 && {box}.right <= {frame}.right + 1")
    tab.resize(*SIZES["desk"])


@pytest.mark.docs
@pytest.mark.spec("COUNTERFACTUAL-04")
def test_printed_picture_is_as_wide_as_the_paper(page: str, tab: Tab) -> None:
    at(tab, page, "inputs-are-not-watched")
    tab.send("Emulation.setEmulatedMedia", media="print")
    tab.resize(680, 1000)
    try:
        assert tab.look("document.documentElement.scrollWidth <= 681")
        assert tab.look("document.querySelector('.counterfactual svg').getBoundingClientRect().right <= 681")
        assert tab.look(VISIBLE) == list(ENTRIES)
    finally:
        tab.send("Emulation.setEmulatedMedia", media="")
        tab.resize(*SIZES["desk"])


@pytest.mark.docs
@pytest.mark.spec("COUNTERFACTUAL-04")
@pytest.mark.parametrize("name", ["streams.html", "tools/player.html"])
def test_pages_of_the_site_show_the_replay_without_errors(site: Path, tab: Tab, name: str) -> None:
    tab.open((site / name).as_uri())
    tab.wait_for("document.querySelectorAll('.counterfactual .cf-box').length > 10")
    assert len(tab.look(VISIBLE)) == 1
    assert tab.problems() == []
