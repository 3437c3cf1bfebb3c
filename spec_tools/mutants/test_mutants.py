"""Checks that each mutant applies and names existing requirements, and that the record is correct. Runs no mutants."""

from __future__ import annotations

import ast
import pathlib
from collections import Counter
from dataclasses import replace

import pytest

from spec_tests.harness.accounting import ROOT, read_rows, section_of
from spec_tests.harness.edit import never, remove
from spec_tools.mutants import record
from spec_tools.mutants.catalogue import EVERY, MUTANTS
from spec_tools.mutants.mutant import PACKAGES, Mutant, broken
from spec_tools.mutants.runner import Result, files_of
from spec_tools.size import size_of

# Sections that are not about the package's code: recipes, their checkpoints after the failure of a rank, the kit for
# GPUs, published measurements, pages, and the simulation, which has broken engines of its own, in
# spec_tools/stream_breaks.
ELSEWHERE = {
    "CHECKED",
    "COUNTERFACTUAL",
    "ENGINE",
    "FAULT",
    "KIT",
    "LAB",
    "OPTIMIZERS",
    "PROBLEMS",
    "PUBLISHED",
    "SIM",
    "SLIDERS",
    "SOAK",
    "STATE",
    "TEACH",
    "TRAIN",
}


def test_each_mutant_applies_and_its_result_compiles() -> None:
    for mutant in EVERY:
        edited = broken(mutant)
        assert edited.text != ast.unparse(ast.parse(edited.path.read_text())) + "\n", mutant.name
        compile(edited.text, edited.path, "exec")


def test_mutants_are_spread_over_the_modules_by_their_size() -> None:
    found = Counter(broken(mutant).path.relative_to(ROOT).as_posix() for mutant in EVERY)
    files = [path for package in PACKAGES for path in package.rglob("*.py")]
    sizes = {path.relative_to(ROOT).as_posix(): size_of([path]).statements for path in files}
    few = [module for module, size in sizes.items() if size > 60 and found[module] < max(1, size // 100)]
    many = [module for module, size in sizes.items() if found[module] > 1 + size // 20]
    assert (few, many) == ([], [])


def test_requirements_of_each_mutant_exist_and_have_tests() -> None:
    known = read_rows()
    wanted = {mutant.name: mutant.row_list for mutant in EVERY}
    assert [name for name, rows in wanted.items() if not rows] == []
    assert [(n, row) for n, rows in wanted.items() for row in rows if row not in known or not files_of([row])] == []


def test_mutants_have_unique_names_and_unique_changes() -> None:
    assert [name for name, number in Counter(mutant.name for mutant in EVERY).items() if number > 1] == []
    texts = Counter((broken(mutant).path, broken(mutant).text) for mutant in EVERY)
    assert [path for (path, _), number in texts.items() if number > 1] == []


def test_each_section_of_the_spec_has_a_mutant() -> None:
    sections = {section_of(row) for row in read_rows()} - ELSEWHERE
    assert sections - {section_of(row) for mutant in EVERY for row in mutant.row_list} == set()


def test_mutant_that_does_not_apply_raises_an_error_with_its_name() -> None:
    gone = Mutant("gone", "SHARD-02", "Nothing.", never("FlatSharding.slice", "index"))
    with pytest.raises(ValueError, match=r"gone: nothing in the package is called 'FlatSharding\.slice'"):
        broken(gone)


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
    changed = replace(mutant, edit=remove("Scaling.prepare", "$whole.div_(self.before)"))
    assert record.read_lines({mutant.name: changed}, path) == {}
