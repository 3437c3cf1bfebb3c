"""The calculator in a browser: its results, its error messages and their places, and the inputs kept in its address."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs_build.tests.browser import Tab

PAGE = "tools/calculator.html"


def value(tab: Tab, field: str) -> str:
    return str(tab.look(f"document.getElementById('calc-{field}').value"))


def errors(tab: Tab) -> dict[str, str]:
    """The error messages next to the fields, by field."""
    return {name: text for name, text in tab.each(".calc-error", "[e.id.slice(5, -6), e.textContent]") if text}


def row(tab: Tab, name: str) -> dict[str, str]:
    """A row of the table, by strategy."""
    heads = [head.removeprefix("▸ ") for head in tab.each(".calc-table thead th")]
    rows = tab.each(".calc-table tbody tr", "[...e.children].map(e => e.textContent)")
    cells = next(cells for first, *cells in rows if first == name)
    return dict(zip(heads[-len(cells) :], cells, strict=True))


def test_calculator_page_reacts_to_mouse_and_keys(address: str, tab: Tab) -> None:
    tab.open(address + PAGE)
    before = tab.text(".calc-bar b")
    tab.click("#calc-ranks")
    tab.look("document.getElementById('calc-ranks').select()")
    tab.type("16")
    assert float(tab.text(".calc-bar b").split()[0]) == pytest.approx(float(before.split()[0]) / 2, rel=1e-2)
    tab.click("#calc-offload")
    assert tab.text(".calc-bar b") == "0 B"
    tab.choose("#calc-preset", "four equal units")
    assert "4,000 parameters in 4 units" in tab.text(".calc-facts")
    assert tab.problems() == []


def test_between_machines_a_hybrid_strategy_sends_less(address: str, tab: Tab) -> None:
    tab.open(address + PAGE + "#preset=Llama-3+70B&ranks=64&machines=8")
    in_all, between = row(tab, "sent in all"), row(tab, "sent to other machines")
    assert (in_all["FULL_SHARD"], in_all["HYBRID_SHARD"]) == ("413 GB", "398 GB")
    assert (between["FULL_SHARD"], between["HYBRID_SHARD"]) == ("51.6 GB", "30.9 GB")


def test_calculator_shows_if_peak_fits_the_chosen_or_typed_memory(address: str, tab: Tab) -> None:
    tab.open(address + PAGE)
    for memory, says in {"24": "does not fit in 24 GiB", "40": "fits in 40 GiB"}.items():
        tab.choose("#calc-memory", memory)
        assert says in tab.text(".calc-verdict")
    tab.choose("#calc-memory", "typed")
    tab.choose("#calc-gib", "28")
    assert "fits in 28 GiB, tightly" in tab.text(".calc-verdict")
    assert row(tab, "fits in 28 GiB")["FULL_SHARD"].startswith("tight, ")
    tab.choose("#calc-kept", "typed")
    tab.choose("#calc-activations", "3")
    assert row(tab, "activations")["FULL_SHARD"] == "3 GB"


@pytest.mark.parametrize(
    ("field", "wrong", "says"),
    [
        ("ranks", "-8", "a whole number is needed, 1 or more"),
        ("machines", "3", "8 ranks do not divide over 3 machines"),
        ("between", "-1", "a number is needed, more than 0"),
        ("lines", "5\n\nnonsense", 'line 3: write shapes as 4096x1024, 4096; "nonsense" is not of this form'),
    ],
)
def test_error_is_shown_at_its_field_instead_of_results(
    address: str, tab: Tab, field: str, wrong: str, says: str
) -> None:
    tab.open(address + PAGE)
    tab.choose(f"#calc-{field}", wrong)
    assert errors(tab) == {field: says}
    assert tab.each("[aria-invalid=true]", "e.id") == [f"calc-{field}"]
    assert tab.text(".calc-result") == ""
    tab.choose(f"#calc-{field}", {"lines": "4 * 1000"}.get(field, "1"))
    assert errors(tab) == {}
    assert "at least" in tab.text(".calc-verdict")


def test_address_keeps_all_inputs_for_other_users_and_from_a_disk(site: Path, address: str, tab: Tab) -> None:
    tab.open(address + PAGE)
    for field, chosen in {"preset": "Llama-3 70B", "ranks": "64", "machines": "8", "strategy": "HYBRID_SHARD"}.items():
        tab.choose(f"#calc-{field}", chosen)
    said, verdict = tab.look("location.hash"), tab.text(".calc-verdict")
    assert tab.look("document.querySelector('.calc-link a').hash") == said
    for where in (address, site.as_uri() + "/"):
        tab.open(where + PAGE + said)
        assert tab.text(".calc-verdict") == verdict
        # Follow a link to other inputs while the page is open.
        tab.look("location.hash = '#ranks=2'")
        tab.wait_for(f"document.getElementById('calc-preset').value === {json.dumps('Llama-3 8B')}")
        assert value(tab, "ranks") == "2"
        assert tab.problems() == []
    tab.open(address + PAGE + "#ranks=-8&length=abc&strategy=nonsense&lines=7x")
    assert list(errors(tab)) == ["lines", "ranks", "length"]
    assert value(tab, "strategy") == "FULL_SHARD"


def test_model_name_follows_its_lines(address: str, tab: Tab) -> None:
    tab.open(address + PAGE)
    lines = value(tab, "lines")
    tab.choose("#calc-lines", lines.replace("32 *", "31 *"))
    assert value(tab, "preset") == ""
    tab.choose("#calc-lines", lines)
    assert value(tab, "preset") == "Llama-3 8B"
