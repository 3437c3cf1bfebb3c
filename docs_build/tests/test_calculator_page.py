"""The calculator in a browser: its results, its error messages and their places, and the inputs kept in its address."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs_build.tests.browser import Tab
from docs_build.tests.contrast import contrasts

pytestmark = [pytest.mark.docs, pytest.mark.needs("mkdocs")]

PAGE = "tools/calculator.html"
SIZES = {"phone": (390, 844), "tablet": (820, 1180), "desk": (1440, 900)}
STORED = "document.querySelector('.calc-bar b').textContent"
VERDICT = "document.querySelector('.calc-verdict').textContent"


@pytest.fixture
def page(address: str, tab: Tab) -> Tab:
    """The page in its initial state."""
    tab.resize(*SIZES["desk"])
    return at(tab, address, "")


def at(tab: Tab, address: str, hash_: str) -> Tab:
    # Open another page first: a browser does not reload a page if only the anchor changes.
    tab.open("about:blank")
    tab.open(address + PAGE + hash_)
    return tab


def value(tab: Tab, field: str) -> Any:
    return tab.look(f"document.getElementById('calc-{field}').value")


def errors(tab: Tab) -> dict[str, str]:
    """The error messages next to the fields, by field."""
    code = """Object.fromEntries([...document.querySelectorAll('.calc-error')].filter(e => e.textContent)
        .map(e => [e.id.slice(5, -6), e.textContent]))"""
    return dict(tab.look(code))


def column(tab: Tab, row: str) -> dict[str, str]:
    """A row of the table, by strategy."""
    table = "document.querySelector('.calc-table')"
    names = f"[...{table}.querySelectorAll('thead th')].map(e => e.textContent.replace('▸ ', ''))"
    found = f"[...{table}.querySelectorAll('tbody tr')].find(e => e.firstChild.textContent === {json.dumps(row)})"
    cells = f"[...{found}.querySelectorAll('td')].map(e => e.textContent)"
    return dict(zip(tab.look(names), tab.look(cells), strict=True))


def test_calculator_page_reacts_to_mouse_and_keys(page: Tab) -> None:
    before = page.look(STORED)
    page.click("#calc-ranks")
    page.look("document.getElementById('calc-ranks').select()")
    page.type("16")
    half = page.look(STORED)
    assert float(half.split()[0]) == pytest.approx(float(before.split()[0]) / 2, rel=1e-2)
    page.click("#calc-offload")
    assert page.look(STORED) == "0 B"
    page.choose("#calc-preset", "four equal units")
    assert "4,000 parameters in 4 units" in page.look("document.querySelector('.calc-facts').textContent")
    assert page.problems() == []


def test_between_machines_a_hybrid_strategy_sends_less(address: str, tab: Tab) -> None:
    at(tab, address, "#preset=Llama-3+70B&ranks=64&machines=8")
    in_all, between = column(tab, "sent in all"), column(tab, "sent to other machines")
    assert (in_all["FULL_SHARD"], in_all["HYBRID_SHARD"]) == ("413 GB", "398 GB")
    assert (between["FULL_SHARD"], between["HYBRID_SHARD"]) == ("51.6 GB", "30.9 GB")
    assert column(tab, "sent within a machine")["FULL_SHARD"] == "361 GB"
    titles = "[...document.querySelectorAll('.calc-chart figcaption')].map(e => e.textContent)"
    assert "Of these, sent to other machines" in tab.look(titles)
    tab.choose("#calc-machines", "1")
    assert "Of these, sent to other machines" not in tab.look(titles)


@pytest.mark.parametrize(
    ("memory", "says"), [("24", "does not fit in 24 GiB"), ("40", "fits in 40 GiB"), ("141", "fits in 141 GiB")]
)
def test_calculator_shows_if_peak_fits(page: Tab, memory: str, says: str) -> None:
    page.choose("#calc-memory", memory)
    assert says in page.look(VERDICT)
    word = column(page, f"fits in {memory} GiB")["FULL_SHARD"].split(",")[0]
    assert word == ("no" if "not" in says else "yes")


def test_calculator_accepts_typed_memory_and_marks_tight_fit(page: Tab) -> None:
    assert page.look("document.getElementById('calc-gib').offsetParent === null")
    page.choose("#calc-memory", "typed")
    page.choose("#calc-gib", "28")
    assert "fits in 28 GiB, tightly" in page.look(VERDICT)
    assert column(page, "fits in 28 GiB")["FULL_SHARD"].startswith("tight, ")


def test_activations_are_estimated_or_typed(page: Tab) -> None:
    checkpointed = column(page, "activations")["FULL_SHARD"]
    page.choose("#calc-kept", "all")
    assert float(column(page, "activations")["FULL_SHARD"].split()[0]) > 2 * float(checkpointed.split()[0])
    page.choose("#calc-kept", "typed")
    page.choose("#calc-activations", "3")
    assert column(page, "activations")["FULL_SHARD"] == "3 GB"


def test_model_name_disappears_when_a_number_changes_and_returns_with_the_old_number(page: Tab) -> None:
    lines = value(page, "lines")
    page.choose("#calc-lines", lines.replace("32 *", "31 *"))
    assert value(page, "preset") == ""
    assert page.look("document.getElementById('calc-preset').selectedOptions[0].textContent") == "your own lines"
    assert "lines=" in page.look("location.hash")
    page.choose("#calc-lines", lines)
    assert value(page, "preset") == "Llama-3 8B"
    assert page.look("location.hash") == ""


@pytest.mark.parametrize(
    ("field", "wrong", "says"),
    [
        ("ranks", "-8", "a whole number is needed, 1 or more"),
        ("ranks", "", "a whole number is needed, 1 or more"),
        ("machines", "3", "8 ranks do not divide over 3 machines"),
        ("length", "0", "a whole number is needed, 1 or more"),
        ("between", "-1", "a number is needed, more than 0"),
        ("lines", "5\n\nnonsense", 'line 3: write shapes as 4096x1024, 4096; "nonsense" is not of this form'),
    ],
)
def test_error_is_shown_at_its_field_and_linked_to_it(page: Tab, field: str, wrong: str, says: str) -> None:
    page.choose(f"#calc-{field}", wrong)
    assert errors(page) == {field: says}
    code = f"""(() => {{ const e = document.getElementById('calc-{field}');
        const ids = e.getAttribute('aria-describedby').split(' ');
        return [e.getAttribute('aria-invalid'), ids.map(id => document.getElementById(id).textContent),
            e.closest('.calc-field').contains(document.getElementById('calc-{field}-error'))]; }})()"""
    invalid, described, beside = page.look(code)
    assert (invalid, described[-1], beside) == ("true", says, True)
    # Earlier results are removed.
    assert page.look("document.querySelector('.calc-result').childElementCount") == 0
    assert page.look("document.querySelectorAll('[aria-invalid=true]').length") == 1
    page.choose(f"#calc-{field}", {"lines": "4 * 1000"}.get(field, "1"))
    assert errors(page) == {}
    assert "at least" in page.look(VERDICT)
    assert page.problems() == []


def test_calculator_address_keeps_all_inputs_after_a_reload_and_for_other_users(
    page: Tab, address: str, site: Path
) -> None:
    page.choose("#calc-preset", "Llama-3 70B")
    page.choose("#calc-ranks", "64")
    page.choose("#calc-machines", "8")
    page.choose("#calc-strategy", "HYBRID_SHARD")
    page.click("#calc-offload")
    said, verdict = page.look("location.hash"), page.look(VERDICT)
    assert page.look("document.querySelector('.calc-link a').hash") == said
    page.browser.events.clear()
    page.send("Page.reload")
    page.wait_for(f"!!document.querySelector('.calc-verdict') && {VERDICT} === {json.dumps(verdict)}")
    for where in (address, site.as_uri() + "/"):
        at(page, where, said)
        assert page.look(VERDICT) == verdict
        assert page.look("document.getElementById('calc-offload').checked") is True
        assert page.look("location.hash") == said
        # Follow a link to other inputs while the page is open.
        page.look("location.hash = '#ranks=2'")
        page.wait_for("document.getElementById('calc-ranks').value === '2'")
        assert value(page, "preset") == "Llama-3 8B"
        assert page.problems() == []


def test_a_broken_address_is_refused_field_by_field(address: str, tab: Tab) -> None:
    at(tab, address, "#ranks=-8&length=abc&strategy=nonsense&lines=7x")
    assert list(errors(tab)) == ["lines", "ranks", "length"]
    assert value(tab, "strategy") == "FULL_SHARD"
    assert tab.problems() == []


def test_address_of_a_heading_is_not_changed(address: str, tab: Tab) -> None:
    at(tab, address, "#an-example")
    assert tab.look("location.hash") == "#an-example"
    assert "at least" in tab.look(VERDICT)


def test_every_field_is_reached_by_the_keyboard_in_its_order(page: Tab) -> None:
    fields = "[...document.querySelectorAll('.calc :is(input, select, textarea)')]"
    shown = page.look(f"{fields}.filter(e => e.offsetParent).map(e => e.id)")
    assert len(shown) > 15
    page.look(f"document.getElementById({json.dumps(shown[0])}).focus()")
    reached = [page.look("document.activeElement.id")]
    for _ in shown[1:]:
        page.press("Tab")
        reached.append(page.look("document.activeElement.id"))
    assert reached == shown
    assert page.look("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    # After the fields: the link, the scrollable table, the sums.
    behind = []
    for _ in range(3):
        page.press("Tab")
        behind.append(page.look("document.activeElement.textContent.slice(0, 8) || document.activeElement.tagName"))
    assert behind[0] == "Link to "
    assert behind[2] == "The sums"
    page.press(" ")
    assert page.look("document.querySelector('.calc details').open") is True
    assert "max(compute" in page.look("document.querySelector('.calc details code').textContent")


def test_every_field_has_a_name(page: Tab) -> None:
    nameless = """[...document.querySelectorAll('.calc :is(input, select, textarea)')]
        .filter(e => !e.labels.length || !e.labels[0].textContent).map(e => e.id)"""
    assert page.look(nameless) == []
    assert page.look("[...document.querySelectorAll('.calc fieldset')].every(e => e.firstChild.tagName === 'LEGEND')")


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_every_text_can_be_read(address: str, tab: Tab, scheme: str) -> None:
    for hash_ in ("", "#ranks=-1"):
        at(tab, address, hash_)
        tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
        found = contrasts(tab, ".calc *")
        assert len(found) > 30
        assert [(ratio, name) for ratio, name in found if ratio < 4.5] == []


def test_the_parts_of_a_bar_differ_without_colour(page: Tab) -> None:
    code = """[0, 1, 2].map((i) => getComputedStyle(document.querySelector('.calc-bar .calc-part-' + i)).backgroundImage
        .replace(/rgba?\\([^)]*\\)/g, 'colour'))"""
    assert len(set(page.look(code))) == 3
    # The chosen strategy is also marked by a symbol.
    assert page.look("document.querySelector('.calc-chart .is-chosen .calc-name').textContent").startswith("▸ ")


@pytest.mark.parametrize("size", SIZES)
def test_calculator_page_is_not_wider_than_the_screen(address: str, tab: Tab, size: str) -> None:
    tab.resize(*SIZES[size])
    at(tab, address, "#preset=Llama-3+70B&ranks=64&machines=8&memory=typed&kept=typed")
    assert tab.look("document.documentElement.scrollWidth") <= SIZES[size][0]
    right = "getBoundingClientRect().right"
    inside = (
        "[...document.querySelectorAll('.calc *')].filter(e => !e.closest('.calc-scroll, details') && e.offsetParent)"
    )
    out = f"{inside}.filter(e => e.{right} > document.querySelector('.calc').{right}).map(e => e.className)"
    assert tab.look(out) == []
    tab.resize(1280, 900)
