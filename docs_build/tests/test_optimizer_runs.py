"""The page "Which optimizers may I use?": its tables are those of a new training."""

from __future__ import annotations

import inspect
import re

import pytest

from docs_build.reading.order import ROOT
from docs_build.recording import optimizer_runs
from docs_build.recording.optimizer_runs import CASES, FORMS, OnUnsharded, verdict
from spec_tests.harness import ranks

PAGE = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
BY_NAME = {case.name: case for case in CASES}
# For each optimizer a cell for each form of shards, and for unsharded copies with both APIs: "close, 1.2%, warning".
MEASURED = PAGE.partition("| optimizer | flat |")[2].partition("\n\n")[0]
CELLS = {name: cells for name, *cells in (line.strip("| ").split(" | ") for line in MEASURED.splitlines()[2:])}


def any_size(text: str) -> str:
    """A text in which each 1-D size is replaced by the same word."""
    return re.sub(r"Size\(\[\d+\]\)", "Size([n])", text)


@pytest.mark.spec("OPTIMIZERS-04", "OPTIMIZERS-05")
@pytest.mark.cpu
@pytest.mark.parametrize("name", BY_NAME)
@ranks(2)
def test_new_training_has_the_results_of_the_page(name: str) -> None:
    found = optimizer_runs.compare(BY_NAME[name])
    for (form, run), cell in zip(found.items(), CELLS[name], strict=True):
        word, *more = cell.split(", ")
        assert verdict(run) == word, (form, run)
        assert run["warned"] == ("warning" in more)
        if word in ("close", "different"):
            assert 100 * run["deviation"] == pytest.approx(float(more[0].rstrip("%")), rel=0.2)
        if word == "error":
            # The ranks' shards have other sizes, and the first error of any rank is recorded.
            assert any_size(run["error"].replace("|", "\\|")) in any_size(PAGE)


@pytest.mark.spec("OPTIMIZERS-04")
@pytest.mark.cpu
@ranks(2)
def test_shards_have_the_shapes_of_the_page_and_some_are_empty() -> None:
    for form, shapes in optimizer_runs.all_shapes().items():
        first, second = (", ".join(f"`{tuple(shape)}`" for shape in of_rank) for of_rank in shapes)
        assert f"| {form} | {first} | {second} |" in PAGE
        assert form == "flat" or "0," in first + second


@pytest.mark.spec("OPTIMIZERS-01", "OPTIMIZERS-02")
@pytest.mark.parametrize("name", BY_NAME)
def test_optimizers_are_the_same_on_unsharded_copies_and_element_wise_ones_on_shards(name: str) -> None:
    assert CELLS[name][len(FORMS) :] == ["same"] * 2
    assert BY_NAME[name].needs != "element" or CELLS[name][: len(FORMS)] == ["same"] * 3


@pytest.mark.spec("OPTIMIZERS-03")
def test_sam_needs_the_norm_of_all_ranks() -> None:
    assert [re.match(r"\w+", cell)[0] for cell in CELLS["SAM"][:3]] == ["different", "different", "same"]  # type: ignore[index]
    assert CELLS["SAM with summed norm"][:3] == ["same"] * 3


@pytest.mark.spec("OPTIMIZERS-05")
def test_verdicts_follow_from_the_deviation_and_the_code_of_the_page_is_what_was_measured() -> None:
    for deviation, word in {1e-10: "same", 1e-8: "close", 0.04: "close", 0.06: "different"}.items():
        assert verdict({"deviation": deviation, "error": None}) == word
    assert f"```python\n{inspect.getsource(OnUnsharded)}```" in PAGE
