"""Finds definitions in the syntax tree of a module."""

import ast


def find(tree: ast.AST, qualified: str) -> ast.AST | None:
    """The last definition of a name, as in ``Unit.wait``; the module for an empty name, ``None`` if there is none."""
    node: ast.AST | None = tree
    for part in filter(None, qualified.split(".")):
        inside = [one for one in getattr(node, "body", []) if getattr(one, "name", None) == part]
        node = inside[-1] if inside else None
    return node


def first_line(node: ast.stmt) -> int:
    """The line at which a statement begins, decorators included."""
    return min([one.lineno for one in getattr(node, "decorator_list", [])], default=node.lineno)


def docstring_lines(node: ast.AST) -> range:
    """The line numbers of the docstring."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
        return range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    return range(0)
