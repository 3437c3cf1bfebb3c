"""The page "Which optimizers may I use?": its record, its tables, and a new run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from docs_build.recording import optimizer_runs, records, written_optimizers
from docs_build.recording.optimizer_runs import CASES, FORMS, NAME, Case
from spec_tests.harness import ranks

pytestmark = pytest.mark.needs("mkdocs")
UNSHARDED = ("original, unsharded", "fully_shard, unsharded")


def recorded(case: Case) -> dict[str, Any]:
    found: dict[str, Any] = records.load(NAME)["cases"][case.name]
    return found


@pytest.mark.spec("OPTIMIZERS-04")
@pytest.mark.cpu
@pytest.mark.parametrize("name", [case.name for case in CASES])
@ranks(2)
def test_new_training_has_the_recorded_results(name: str) -> None:
    from docs_build.pages.optimizer_runs import verdict

    case = next(case for case in CASES if case.name == name)
    found, expected = optimizer_runs.compare(case), recorded(case)
    assert list(found) == list(expected)
    for form, run in found.items():
        assert verdict(run) == verdict(expected[form]), (form, run)
        assert run["warned"] == expected[form]["warned"]
        if verdict(run) in ("close", "different"):
            assert run["deviation"] == pytest.approx(expected[form]["deviation"], rel=0.2)
        if run["error"]:
            assert run["error"].split(":")[0] == expected[form]["error"].split(":")[0]


@pytest.mark.spec("OPTIMIZERS-04")
@pytest.mark.cpu
@ranks(2)
def test_recorded_shards_are_uneven_and_some_are_empty() -> None:
    shapes = optimizer_runs.all_shapes()
    assert shapes == records.load(NAME)["shapes"]
    for form in ("original", "fully_shard"):
        first, second = shapes[form]
        assert all(one != other for one, other in zip(first, second, strict=True))
        assert any(0 in shape for shape in first + second)
    # The flat parameter of the root has 3 elements, and one of padding.
    assert shapes["flat"][0] == shapes["flat"][1] == [[2], [23]]


@pytest.mark.spec("OPTIMIZERS-01")
@pytest.mark.parametrize("case", [case for case in CASES if case.needs == "element"], ids=lambda case: case.name)
def test_element_wise_optimizers_are_the_same_on_each_kind_of_shards(case: Case) -> None:
    from docs_build.pages.optimizer_runs import verdict

    assert {form: verdict(recorded(case)[form]) for form in FORMS} == dict.fromkeys(FORMS, "same")


@pytest.mark.spec("OPTIMIZERS-02")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_optimizers_are_the_same_on_unsharded_copies(case: Case) -> None:
    from docs_build.pages.optimizer_runs import verdict

    assert {form: verdict(recorded(case)[form]) for form in UNSHARDED} == dict.fromkeys(UNSHARDED, "same")


@pytest.mark.spec("OPTIMIZERS-03")
def test_sam_needs_the_norm_of_all_ranks() -> None:
    from docs_build.pages.optimizer_runs import verdict

    cases = {case.name: recorded(case) for case in CASES}
    assert [verdict(cases["SAM"][form]) for form in FORMS] == ["different", "different", "same"]
    assert [verdict(cases["SAM with summed norm"][form]) for form in FORMS] == ["same", "same", "same"]


@pytest.mark.spec("OPTIMIZERS-05")
def test_verdict_follows_from_deviation() -> None:
    from docs_build.pages.optimizer_runs import verdict

    deviations = {0.0: "same", 1e-10: "same", 1e-8: "close", 0.04: "close", 0.06: "different"}
    for deviation, word in deviations.items():
        assert verdict({"deviation": deviation, "error": None}) == word
    assert verdict({"deviation": None, "error": "ValueError: no"}) == "error"


@pytest.mark.spec("OPTIMIZERS-05")
def test_tables_are_made_from_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    from docs_build.pages import optimizer_runs as pages

    record = records.load(NAME)
    monkeypatch.setattr(records, "load", lambda name: record)
    assert "| SGD | same | same | same | same | same |" in pages.deviations()
    record["cases"]["SGD"]["flat"] = {"deviation": 0.25, "error": None, "warned": True}
    record["cases"]["SGD"]["original"] = {"deviation": None, "error": "ValueError: a|b", "warned": False}
    assert "| SGD | different, 25.0%, warning | error | same | same | same |" in pages.deviations()
    element_wise = pages.kinds().splitlines()[2]
    assert " | different or same | error or same | same | Use it" in element_wise
    assert "| SGD | original | ValueError: a\\|b |" in pages.errors()


@pytest.mark.spec("OPTIMIZERS-05")
def test_page_shows_the_code_that_was_measured() -> None:
    from docs_build.pages import optimizer_runs as pages

    assert pages.copies().startswith("```python\nclass OnUnsharded:")
    assert {case.needs for case in CASES} == pages.NEEDS.keys()
    assert len({case.name for case in CASES}) == len(CASES) >= 12


@pytest.mark.spec("OPTIMIZERS-04")
def test_8_bit_values_are_rounded_with_the_scale_of_their_block() -> None:
    values = torch.tensor([1.0, -2.0, 0.5, 0.25, 100.0, 1.0], dtype=torch.float64)
    integers, scales = written_optimizers.quantized(values)
    assert integers.dtype == torch.int8
    assert torch.equal(scales.view(-1) * 127, torch.tensor([2.0, 100.0], dtype=torch.float64))
    restored = (integers * scales).view(-1)[:6]
    assert float((restored - values)[:4].abs().max()) <= 1 / 127
    assert float((restored - values).abs().max()) <= 50 / 127
