"""Checks that each break applies and names existing requirements, and what an edit does. Runs no breaks."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from spec_tests.harness.accounting import read_rows, section_of
from spec_tools.breaks.edits import BREAKS, Break, edited
from spec_tools.breaks.runner import files_of

# The breaks that tests of requirements must notice. A program must notice the others, see `test_streams.py`.
MUTANTS = [one for one in BREAKS.values() if not one.program]
# Sections that are not about the package's code: recipes, their checkpoints after the failure of a rank, the kit for
# GPUs, published measurements, pages, and the simulation, which programs check.
ELSEWHERE = {"CHECKED", "COUNTERFACTUAL", "ENGINE", "FAULT", "KIT", "LAB", "OPTIMIZERS", "PROBLEMS", "PUBLISHED"}
ELSEWHERE |= {"SIM", "SLIDERS", "SOAK", "STATE", "TEACH", "TRAIN"}


@pytest.mark.needs("ruff")
def test_each_break_applies_and_its_result_uses_only_names_that_exist(tmp_path: pathlib.Path) -> None:
    for one in BREAKS.values():
        (tmp_path / f"{one.name}.py").write_text(edited(one).after)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--quiet", "--select", "F821", str(tmp_path)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.stdout == ""
    assert checked.returncode == 0


def test_requirements_of_each_mutant_exist_and_have_tests() -> None:
    assert [one.name for one in MUTANTS if not one.rows] == []
    rows = {row for one in MUTANTS for row in one.rows}
    assert rows - read_rows().keys() == set()
    assert [row for row in rows if not files_of([row])] == []


def test_each_section_of_the_spec_has_a_mutant() -> None:
    sections = {section_of(row) for row in read_rows()} - ELSEWHERE
    assert sections - {section_of(row) for one in MUTANTS for row in one.rows} == set()


@pytest.mark.parametrize(
    ("place", "old", "error"),
    [
        ("Unit.no_such_function", "self", r"gone: 0 texts in Unit\.no_such_function, not 1: self"),
        ("ReducePlan.mean", "num_ranks_of_no_mesh", "gone: 0 texts in ReducePlan"),
        ("ReducePlan.mean", "self", r"gone: \d+ texts in ReducePlan"),
    ],
)
def test_break_that_does_not_apply_raises_an_error_with_its_name(place: str, old: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        edited(Break("gone", "Nothing.", place, old))
