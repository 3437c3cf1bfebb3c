"""The page of myths: each wrong claim, the correct statement, and the tests that demonstrate it, with their code and
last result.
"""

from __future__ import annotations

import ast
from functools import cache
from html import escape

from docs_build import directives
from docs_build.markup import highlight_lines, to_html
from docs_build.order import ROOT
from docs_build.results import WHERE, SpecRow, all_rows, css_class

__all__ = ["page"]


def page(start: str) -> str:
    """All requirements with an ID that begins with ``MYTH``."""
    rows = [row for row in all_rows().values() if row.id.startswith("MYTH")]
    shown = [row for row in rows if _demonstrations().get(row.id)]
    others = len(rows) - len(shown)
    rest = f" The other {others} follow from the requirements that they name." if others else ""
    which = f"For {len(shown)} of them" if others else "For each of them"
    head = to_html(
        f"{len(rows)} claims. {which} a test shows the correct behaviour. Unfold it to read the test.{rest}",
        is_markdown=True,
    )
    return directives._raw(head + "".join(_entry(row) for row in rows))


def _entry(row: SpecRow) -> str:
    claim, truth = (_inline(cell) for cell in row.cells[:2])
    tests = "".join(_test(name, code, row) for name, code in _demonstrations().get(row.id, []))
    how = "" if tests else f'<p class="myth-claim"><small>To verify: {_inline(row.cells[2])}</small></p>'
    return (
        f'<section class="myth" id="{row.id}">'
        f'<p class="myth-claim"><a href="#{row.id}">{row.id}</a> &ldquo;{claim}&rdquo;</p>'
        f"<p>{truth}</p>{how}{tests}</section>"
    )


def _inline(text: str) -> str:
    return to_html(text, is_markdown=True).removeprefix("<p>").removesuffix("</p>")


def _test(name: str, code: str, row: SpecRow) -> str:
    file, _, function = name.partition("::")
    outcomes = {test: result for test, result in row.tests.items() if test.split("[")[0] == name}
    results = sorted({(backend, outcome) for result in outcomes.values() for backend, outcome in result.items()})
    badges = " ".join(f'<span class="badge badge-{css_class(o)}">{o}<i>{WHERE[b]}</i></span>' for b, o in results)
    words = escape(function.removeprefix("test_").replace("_", " "))
    lines = "\n".join(highlight_lines(code))
    return (
        f"<details><summary>{words} {badges}</summary><p><small>{escape(file)}</small></p>"
        f'<div class="highlight"><pre><code>{lines}\n</code></pre></div></details>'
    )


@cache
def _demonstrations() -> dict[str, list[tuple[str, str]]]:
    """The tests of each myth: name and source."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "spec_tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "MYTH-" not in text:
            continue
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for row in _carried(node):
                name = f"{path.relative_to(ROOT).as_posix()}::{node.name}"
                found.setdefault(row, []).append((name, ast.get_source_segment(text, node) or ""))
    return found


def _carried(node: ast.FunctionDef) -> list[str]:
    constants = [c.value for d in node.decorator_list for c in ast.walk(d) if isinstance(c, ast.Constant)]
    return [value for value in constants if isinstance(value, str) and value.startswith("MYTH-")]
