"""The page "Which optimizers may I use?": its record, its tables, and a new run."""

from __future__ import annotations

import pytest

from docs_build.pages import optimizer_runs as pages
from docs_build.pages.optimizer_runs import verdict
from docs_build.recording import optimizer_runs, records
from docs_build.recording.optimizer_runs import CASES, FORMS, NAME
from spec_tests.harness import ranks

BY_NAME = {case.name: case for case in CASES}


def verdicts(name: str, forms: tuple[str, ...]) -> list[str]:
    """The recorded verdicts of an optimizer."""
    of_case = records.load(NAME)["cases"][name]
    return [verdict(of_case[form]) for form in forms]


@pytest.mark.spec("OPTIMIZERS-04")
@pytest.mark.cpu
@pytest.mark.parametrize("name", BY_NAME)
@ranks(2)
def test_new_training_has_the_recorded_results(name: str) -> None:
    found, expected = optimizer_runs.compare(BY_NAME[name]), records.load(NAME)["cases"][name]
    assert list(found) == list(expected)
    for form, run in found.items():
        assert verdict(run) == verdict(expected[form]), (form, run)
        assert run["warned"] == expected[form]["warned"]
        if verdict(run) in ("close", "different"):
            assert run["deviation"] == pytest.approx(expected[form]["deviation"], rel=0.2)


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


@pytest.mark.spec("OPTIMIZERS-01", "OPTIMIZERS-02")
@pytest.mark.parametrize("name", BY_NAME)
def test_optimizers_are_the_same_on_unsharded_copies_and_element_wise_ones_on_shards(name: str) -> None:
    assert verdicts(name, ("original, unsharded", "fully_shard, unsharded")) == ["same"] * 2
    assert BY_NAME[name].needs != "element" or verdicts(name, FORMS) == ["same"] * 3


@pytest.mark.spec("OPTIMIZERS-03")
def test_sam_needs_the_norm_of_all_ranks() -> None:
    assert verdicts("SAM", FORMS) == ["different", "different", "same"]
    assert verdicts("SAM with summed norm", FORMS) == ["same"] * 3


@pytest.mark.spec("OPTIMIZERS-05")
def test_tables_and_verdicts_are_made_from_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    for deviation, word in {1e-10: "same", 1e-8: "close", 0.04: "close", 0.06: "different"}.items():
        assert verdict({"deviation": deviation, "error": None}) == word
    record = records.load(NAME)
    monkeypatch.setattr(records, "load", lambda name: record)
    record["cases"]["SGD"]["flat"] = {"deviation": 0.25, "error": None, "warned": True}
    record["cases"]["SGD"]["original"] = {"deviation": None, "error": "ValueError: a|b", "warned": False}
    assert "| SGD | different, 25.0%, warning | error | same | same | same |" in pages.deviations()
    assert " | different or same | error or same | same | Use it" in pages.kinds().splitlines()[2]
    assert "| SGD | original | ValueError: a\\|b |" in pages.errors()
