"""Each case can be removed: a list names its module, and its docstring has all that a reader needs."""

from __future__ import annotations

import ast
import re

import pytest

from spec_tests.harness.accounting import ROOT, read_rows
from spec_tools.breaks.cases import CASES, FOLDER, LISTS

PACKAGE = ROOT / "minifsdp"
# Code that several cases use, and the lists.
SHARED = {"__init__", "added_methods", "output_nodes", *LISTS}


def test_every_module_is_in_a_list_of_cases_or_a_front_end_names_it() -> None:
    lists = [FOLDER / f"{name}.py" for name in LISTS]
    modules = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if path not in lists]
    imports = [node for module in modules for node in ast.walk(module) if isinstance(node, ast.ImportFrom)]
    imported = [f"{node.module}.{alias.name}." for node in imports for alias in node.names]
    named = {name.split(".")[2] for name in imported if name.startswith("minifsdp.cases.")}
    assert {path.stem for path in FOLDER.glob("*.py")} - SHARED == set(CASES) | (named - SHARED)
    # Nothing uses the module of a case when its line in the list is removed.
    assert named.isdisjoint(CASES)


@pytest.mark.parametrize("case", CASES)
def test_docstring_shows_a_program_what_torch_does_and_requirements(case: str) -> None:
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{case}.py").read_text())) or ""
    assert re.search(r"::\n\n    \S", docstring)
    assert "Without this case, " in docstring
    assert "*In torch:* " in docstring
    assert CASES[case].rows
    assert set(CASES[case].rows) <= set(read_rows())
