"""Each case can be removed: a list names its module, and its docstring has all that a reader needs."""

from __future__ import annotations

import ast
import re

import pytest

from spec_tests.harness.accounting import ROOT
from spec_tools import without

MODULES = sorted(path.stem for path in without.FOLDER.glob("*.py"))
# Code that several cases use, and the lists.
SHARED = {"__init__", "all_cases", "of_fully_shard", "output_nodes"}
PACKAGE = ROOT / "minifsdp"
SPEC = (ROOT / "docs" / "spec.md").read_text()


def test_every_module_is_in_a_list_of_cases_or_a_front_end_names_it() -> None:
    callers = [path for path in PACKAGE.rglob("*.py") if path.parent != without.FOLDER]
    nodes = [node for path in callers for node in ast.walk(ast.parse(path.read_text()))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    imported = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    named = {name for name in MODULES if any(f"{one}.".startswith(f"minifsdp.cases.{name}.") for one in imported)}
    assert set(MODULES) - SHARED == set(without.CASES) | (named - SHARED)
    assert named.isdisjoint(without.CASES)


@pytest.mark.parametrize("case", without.CASES)
def test_docstring_shows_a_program_what_torch_does_and_requirements(case: str) -> None:
    docstring = ast.get_docstring(ast.parse((without.FOLDER / f"{case}.py").read_text())) or ""
    assert re.search(r"::\n\n    \S", docstring)
    assert "Without this case, " in docstring
    assert "*In torch:* " in docstring
    assert without.requirements_of(case)
    assert all(f"| {row} |" in SPEC for row in without.requirements_of(case))


def test_a_case_is_removed_from_a_copy_only() -> None:
    before = (without.FOLDER / "all_cases.py").read_text()
    with without._copy_without("newest_node") as folder:
        copied = folder / "minifsdp" / "cases"
        assert not (copied / "newest_node.py").exists()
        text = (copied / "all_cases.py").read_text()
        assert "NewestNode" not in text
        assert len(text.splitlines()) == len(before.splitlines()) - 2
    assert (without.FOLDER / "newest_node.py").exists()
    assert (without.FOLDER / "all_cases.py").read_text() == before


def test_names_of_failed_tests_and_their_requirements_are_read() -> None:
    assert without.requirements_of("requested_parameters") == ["PROG-20", "PROG-21", "PROG-22"]
