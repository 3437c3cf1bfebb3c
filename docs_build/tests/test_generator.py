"""The site generator can be replaced: only one module imports it."""

from __future__ import annotations

import ast

import pytest

from docs_build.reading.order import ROOT

THEIRS = {"mkdocs", "mkdocstrings", "material", "zensical"}


def imported(text: str) -> set[str]:
    """The packages that a module imports, including imports inside functions."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def test_one_module_imports_the_generator_and_no_other() -> None:
    files = [path for path in (ROOT / "docs_build").rglob("*.py") if "tests" not in path.parts[len(ROOT.parts) :]]
    modules = {path.name: imported(path.read_text(encoding="utf-8")) for path in files}
    assert [name for name, packages in modules.items() if packages & THEIRS] == ["generator.py"]


@pytest.mark.parametrize(
    "text", ["import mkdocs.utils", "def f():\n    from mkdocs.utils import x", "import material as m"]
)
def test_import_is_found_in_any_position(text: str) -> None:
    assert imported(text) & THEIRS


@pytest.mark.needs("mkdocs")
def test_addresses_are_relative_and_heads_of_pages_are_read() -> None:
    from docs_build.generator import front_matter, relative

    assert relative("spec.html", "read/engine/unit.html") == "../../spec.html"
    assert front_matter("---\ntitle: A\n---\n# B\n") == ("# B\n", {"title": "A"})
