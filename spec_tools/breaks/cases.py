"""Breaks that remove a case of ``minifsdp/cases`` from its list: exactly the tests of the case must fail.

A case is a module with its line in ``all_cases.py`` or ``of_fully_shard.py``. The last line of its docstring names its
requirements. The result is right if

* a test of each of these requirements fails: the case is needed, and its tests show it;
* no other test of the same files fails: nothing else depends on the case.

The module itself stays, but nothing uses it: ``test_cases.py`` checks that no other module imports it. A case that a
front end calls by name is in neither list, and cannot be removed in this way.

*In torch:* no such list.
"""

from __future__ import annotations

import ast
import re

from spec_tests.harness.accounting import ROOT
from spec_tools.breaks.edits import Break

FOLDER = ROOT / "minifsdp" / "cases"
LISTS = ["all_cases", "of_fully_shard"]


def _removed(case: str, list_of_cases: str, name: str) -> Break:
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{case}.py").read_text())) or ""
    return Break(
        name=f"without-{case}",
        what=f"The case {case} is removed.",
        place=f"minifsdp/cases/{list_of_cases}.py",
        old=f"{name},",
        new="",
        rows=re.findall(r"[A-Z0-9]+(?:-[A-Z]+)*-\d+", docstring.rpartition("Spec:")[2]),
        is_exact=True,
    )


CASES = {
    case: _removed(case, list_of_cases, name)
    for list_of_cases in LISTS
    for case, name in re.findall(
        r"^from minifsdp\.cases\.(\w+) import (\w+)$", (FOLDER / f"{list_of_cases}.py").read_text(), re.M
    )
}
