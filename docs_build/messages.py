"""The messages of the package: read from the source, so that none is missing.

Every message is made by ``trouble(entry, text)`` (``engine/trouble.py``), so its address on the page "Troubleshoot" is
found beside its text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeGuard

from docs_build.order import PACKAGE, all_modules

__all__ = ["Message", "messages"]


@dataclass(frozen=True)
class Message:
    """One message of the package.

    Attributes:
        id: its address on the page, ``E-...``.
        kind: the exception or warning.
        text: with dots for what differs.
        module: where it is raised.
        place: in which class or function.
    """

    id: str
    kind: str
    text: str
    module: str
    place: str


@cache
def messages() -> list[Message]:
    """All messages of the package, in the order of its files."""
    return [message for module in all_modules() for message in _of_module(module)]


def _of_module(module: str) -> Iterator[Message]:
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    yield from _in(tree, module, "")


def _in(node: ast.AST, module: str, place: str) -> Iterator[Message]:
    for child in ast.iter_child_nodes(node):
        inner = place
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{place}.{child.name}" if place else child.name
        if isinstance(child, ast.Call) and child.args and _is_trouble(child.args[0]):
            entry, text = child.args[0].args
            yield Message(f"E-{ast.literal_eval(entry)}", _kind(child), _words(text), module, place)
        yield from _in(child, module, inner)


def _is_trouble(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "trouble"


def _kind(call: ast.Call) -> str:
    """The exception that is made; the category of a warning."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name != "warn":
        return name
    return call.args[1].id if len(call.args) > 1 and isinstance(call.args[1], ast.Name) else "UserWarning"


def _words(text: ast.AST) -> str:
    return " ".join(_template(text).split())


def _template(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return "\u2026"
