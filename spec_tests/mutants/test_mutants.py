"""Checks that each mutant applies and names existing requirements, and that the record is correct. Runs no mutants."""

from __future__ import annotations

import ast
import pathlib
from collections import Counter

import pytest

from spec_tests.harness.accounting import ROOT, read_rows, section_of
from spec_tests.mutants import record
from spec_tests.mutants.catalogue import EVERY, MUTANTS
from spec_tests.mutants.mutant import Mutant, broken
from spec_tests.mutants.runner import Result, files_of

# Sections that are not about the package's code: recipes, their checkpoints after the failure of a rank, the kit for
# GPUs, and the simulation, which has broken engines of its own in spec_tests/streams.
ELSEWHERE = {"FAULT", "KIT", "LAB", "SIM", "SOAK", "TRAIN"}


def test_each_mutant_applies_exactly_once_and_is_a_program() -> None:
    changes = {mutant.name: broken(mutant) for mutant in EVERY}
    assert [name for name, change in changes.items() if (ROOT / change.path).read_text() == change.text] == []
    for change in changes.values():
        ast.parse(change.text)


def test_requirements_of_each_mutant_exist_and_have_tests() -> None:
    known = read_rows()
    wanted = {mutant.name: mutant.row_list for mutant in EVERY}
    assert [name for name, rows in wanted.items() if not rows] == []
    assert [(n, row) for n, rows in wanted.items() for row in rows if row not in known or not files_of([row])] == []


def test_mutants_have_unique_names_and_unique_changes() -> None:
    assert [name for name, number in Counter(mutant.name for mutant in EVERY).items() if number > 1] == []
    passages = Counter((mutant.place, mutant.old, mutant.new) for mutant in EVERY)
    assert [passage for passage, number in passages.items() if number > 1] == []


def test_each_section_of_the_spec_has_a_mutant() -> None:
    sections = {section_of(row) for row in read_rows()} - ELSEWHERE
    assert sections - {section_of(row) for mutant in EVERY for row in mutant.row_list} == set()


def test_mutant_with_missing_passage_raises_error() -> None:
    gone = Mutant("gone", "FlatSharding.shard_range", "no such passage", "", "Nothing.", "SHARD-02")
    with pytest.raises(ValueError, match=r"0 times in FlatSharding\.shard_range for 'gone'"):
        broken(gone)
    with pytest.raises(ValueError, match=r"nothing in the package is called 'FlatSharding\.slice'"):
        broken(Mutant("gone", "FlatSharding.slice", "index", "", "Nothing.", "SHARD-02"))


def test_record_names_failing_tests_and_drops_missing_mutants(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mutants.json"
    two = {name: MUTANTS[name] for name in ("sum-instead-of-mean", "hybrid-divides-by-the-shards-only")}
    seen = Result("sum-instead-of-mean", {"SHARD-06": "a.py::test", "HYB-05": "b.py::test"})
    half = Result("hybrid-divides-by-the-shards-only", {"HYB-05": "b.py::test"}, ["SHARD-12"])
    said = record.write(two, [seen, half], path)
    assert said["rows"] == {"HYB-05": [half.name, seen.name], "SHARD-06": [seen.name]}
    assert said["functions"]["ReducePlan.mean"] == ["HYB-05"]
    assert record.noticed_before(path) == [seen.name]
    del two[half.name]
    assert [*record.write(two, [], path)["mutants"]] == [seen.name]


def test_interrupted_run_continues_unless_mutant_changed(tmp_path: pathlib.Path) -> None:
    path, mutant = tmp_path / "lines.jsonl", MUTANTS["sum-instead-of-mean"]
    result = Result(mutant.name, {"SHARD-06": "a.py::test"}, ["HYB-05"])
    record.append(mutant, result, path)
    assert record.read_lines({mutant.name: mutant}, path) == {mutant.name: result}
    changed = Mutant(mutant.name, mutant.place, mutant.old, "piece.mul_(1.0)", mutant.what, mutant.rows)
    assert record.read_lines({mutant.name: changed}, path) == {}
