"""The page of myths: each wrong claim, the correct statement, and the tests that demonstrate it, with their code and
last result.
"""

import ast
from functools import cache
from itertools import chain
from typing import Any

from docs_build.pages.badges import outcomes
from docs_build.reading.markup import highlight_lines
from docs_build.reading.order import ROOT
from docs_build.reading.text import words_of
from docs_build.recording.results import SpecRow, all_rows
from docs_build.templates import PAGES


def page() -> str:
    """All requirements with an ID that begins with ``MYTH``, as HTML."""
    rows = [row for row in all_rows().values() if row.id.startswith("MYTH")]
    num_shown = sum(row.id in _demonstrations() for row in rows)
    others = len(rows) - num_shown
    rest = f" The other {others} follow from the requirements that they name." if others else ""
    which = f"For {num_shown} of them" if others else "For each of them"
    head = f"{len(rows)} claims. {which} a test shows the correct behaviour. Unfold it to read the test.{rest}"
    return PAGES.myths(head, [(row, [_test(*test, row) for test in _demonstrations().get(row.id, [])]) for row in rows])


def _test(name: str, code: str, row: SpecRow) -> tuple[Any, ...]:
    """The file of a test, its name as words, its badges and its code."""
    results = (result.items() for test, result in row.tests.items() if test.split("[")[0] == name)
    return *words_of(name), outcomes(sorted(set(chain.from_iterable(results)))), highlight_lines(code)


@cache
def _demonstrations() -> dict[str, list[tuple[str, str]]]:
    """The tests of each myth: name and source."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "spec_tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        tests = ast.parse(text).body if "MYTH-" in text else []
        for node in tests:
            for row in _carried(node) if isinstance(node, ast.FunctionDef) else []:
                name = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
                found.setdefault(row, []).append((name, ast.get_source_segment(text, node) or ""))
    return found


def _carried(node: ast.FunctionDef) -> list[str]:
    constants = [c.value for d in node.decorator_list for c in ast.walk(d) if isinstance(c, ast.Constant)]
    return [value for value in constants if isinstance(value, str) and value.startswith("MYTH-")]
