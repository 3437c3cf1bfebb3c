"""The page "What minifsdp relies on" lists exactly the private names of torch that the code uses.

A private name is an import from a module of torch, or an attribute of an object, with a leading underscore. Attributes
that the package defines itself are not counted, nor are those of Python.
"""

from __future__ import annotations

import ast

import pytest

from docs_build.reading.order import ROOT, all_modules, path_of

pytestmark = [pytest.mark.pure, pytest.mark.spec("START-10"), pytest.mark.proof("text")]

# Attributes of Python's modules and classes, and the module whose attributes are counted.
NOT_OF_TORCH = {"_exit", "_getframe", "_current_frames", "_replace", "_C"}
# The numbers may only become smaller: of names that training uses, and of those that only the tools use.
MOST, MOST_OF_TOOLS = 49, 10


def own_names(node: ast.AST) -> set[str]:
    """The names that a statement defines: a function, a class, variables and attributes."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.attr if isinstance(node, ast.Attribute) else node.id}
    return set()


def used_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        return [f"{node.module}.{one.name}" for one in node.names]
    return [node.attr] if isinstance(node, ast.Attribute) else []


def private_names() -> dict[str, list[str]]:
    """The modules that use each private name of torch, sorted."""
    nodes = {name: list(ast.walk(ast.parse(path_of(name).read_text(encoding="utf-8")))) for name in all_modules()}
    ours = NOT_OF_TORCH.union(*(own_names(node) for of_module in nodes.values() for node in of_module))
    found: dict[str, set[str]] = {}
    for module, of_module in nodes.items():
        for name in (name for node in of_module for name in used_names(node) if name not in ours):
            if any(part.startswith("_") and not part.startswith("__") for part in name.split(".")):
                found.setdefault(name, set()).add(module)
    return {name: sorted(modules) for name, modules in sorted(found.items(), key=lambda one: one[0].lower())}


def test_the_page_lists_the_private_names_of_the_code() -> None:
    rows = [f"| `{name}` | {', '.join(f'`{one}`' for one in modules)} |" for name, modules in private_names().items()]
    page = (ROOT / "docs" / "relies.md").read_text(encoding="utf-8")
    assert page.partition("| name | used in |\n|---|---|\n")[2].splitlines() == rows


def test_the_number_of_private_names_does_not_grow() -> None:
    users = private_names().values()
    of_tools = sum(all(module.startswith("minifsdp_tools/") for module in modules) for modules in users)
    assert of_tools <= MOST_OF_TOOLS
    assert len(users) - of_tools <= MOST
