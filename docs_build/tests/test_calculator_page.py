"""The calculator in a browser: its results, its error messages and their places, and the inputs kept in its address."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_build.tests.browser import Tab

PAGE = "tools/calculator.html"


def errors(tab: Tab) -> dict[str, str]:
    """The error messages next to the fields, by field."""
    return {name: text for name, text in tab.each(".calc-error", "[e.id.slice(5, -6), e.textContent]") if text}


def test_calculator_page_reacts_to_mouse_and_keys(address: str, tab: Tab) -> None:
    tab.open(address + PAGE)
    for memory, says in {"24": "does not fit in 24 GiB", "40": "fits in 40 GiB"}.items():
        tab.choose("#calc-memory", memory)
        assert says in tab.text(".calc-verdict")
    before = tab.text(".calc-bar b")
    tab.page.fill("#calc-ranks", "16")
    assert float(tab.text(".calc-bar b").split()[0]) == pytest.approx(float(before.split()[0]) / 2, rel=1e-2)
    tab.click("#calc-offload")
    assert tab.text(".calc-bar b") == "0 B"
    assert tab.problems() == []


WRONG = {
    ("ranks", "-8"): "a whole number is needed, 1 or more",
    ("machines", "3"): "8 ranks do not divide over 3 machines",
    ("lines", "5\n\nnonsense"): 'line 3: write shapes as 4096x1024, 4096; "nonsense" is not of this form',
}


def test_error_is_shown_at_its_field_instead_of_results(address: str, tab: Tab) -> None:
    tab.open(address + PAGE)
    for (field, wrong), says in WRONG.items():
        tab.choose(f"#calc-{field}", wrong)
        assert errors(tab) == {field: says}
        assert tab.each("[aria-invalid=true]", "e.id") == [f"calc-{field}"]
        assert tab.text(".calc-result") == ""
        tab.choose(f"#calc-{field}", {"lines": "4 * 1000", "ranks": "8"}.get(field, "1"))
        assert errors(tab) == {}
        assert "at least" in tab.text(".calc-verdict")


def test_address_keeps_all_inputs_for_other_users_and_from_a_disk(site: Path, tab: Tab) -> None:
    page = (site / PAGE).as_uri()
    tab.open(page)
    for field, chosen in {"preset": "Llama-3 70B", "ranks": "64", "machines": "8", "strategy": "HYBRID_SHARD"}.items():
        tab.choose(f"#calc-{field}", chosen)
    said, verdict = tab.look("location.hash"), tab.text(".calc-verdict")
    tab.open(page + said)
    assert tab.text(".calc-verdict") == verdict
    assert tab.problems() == []
    tab.open(page + "#ranks=-8&length=abc&strategy=nonsense&lines=7x")
    assert list(errors(tab)) == ["lines", "ranks", "length"]
