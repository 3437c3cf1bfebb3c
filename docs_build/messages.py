"""The messages of the package: read from the source, so that none is missing.

A message has an address on the page "Troubleshoot", made from the place that raises it, so that it stays when the
wording changes: ``E-`` and the function (``E-unit-wait``).
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache

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
    found: list[Message] = []
    taken: set[str] = set()
    for module in all_modules():
        tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
        for place, kind, text in _in(tree, ""):
            stem = module.rpartition("/")[2].removesuffix(".py")
            base = _slug(place if "." in place else f"{stem}-{place}")
            name, number = base, 2
            while name in taken:
                name, number = f"{base}-{number}", number + 1
            taken.add(name)
            found.append(Message(f"E-{name}", kind, text, module, place))
    return found


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _in(node: ast.AST, place: str) -> list[tuple[str, str, str]]:
    found = []
    for child in ast.iter_child_nodes(node):
        inner = place
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{place}.{child.name}" if place else child.name
        if isinstance(child, ast.Call):
            made = _message(child)
            if made:
                found.append((place, *made))
        found += _in(child, inner)
    return found


def _message(call: ast.Call) -> tuple[str, str] | None:
    """Kind and text, if ``call`` makes an exception or a warning with a text of its own."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    arguments = call.args
    if name == "_fail" and len(arguments) == 2 and isinstance(arguments[0], ast.Name):
        name, arguments = arguments[0].id, arguments[1:]
    elif name == "warn":
        category = arguments[1].id if len(arguments) > 1 and isinstance(arguments[1], ast.Name) else "UserWarning"
        name, arguments = category, arguments[:1]
    if not name.endswith(("Error", "Warning")) or not arguments:
        return None
    text = _template(arguments[0])
    text = re.sub(r"^rank \u2026: ", "", " ".join(text.split()))
    # A text that is only a variable belongs to whoever made the variable.
    return (name, text) if len(text.replace("\u2026", "").strip()) > 8 else None


def _template(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return "\u2026"
