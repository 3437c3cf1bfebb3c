"""All messages of the package: their texts from its catalogue, and where the source raises them.

``message(entry, ...)`` (``engine/messages.py``) creates every message. Its argument is the anchor of the message on the
page "Troubleshoot".
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from string import Formatter
from typing import TypeGuard

from docs_build.reading.order import all_modules, path_of
from minifsdp.engine.messages import texts


@dataclass(frozen=True)
class Message:
    """One message of the package.

    Attributes:
        id: its anchor on the page, ``E-...``.
        kind: the exception or warning.
        text: with dots for the variable parts.
        module: the module that raises it.
        place: the class or function that raises it.
    """

    id: str
    kind: str
    text: str
    module: str
    place: str


@cache
def messages() -> list[Message]:
    """All messages of the package, in the order of its files."""
    trees = {module: ast.parse(path_of(module).read_text(encoding="utf-8")) for module in all_modules()}
    found = [message for module, tree in trees.items() for message in _in(tree, module, "")]
    # Several places can raise the same error. The first one is listed.
    return list({message.id: message for message in reversed(found)}.values())[::-1]


def _in(node: ast.AST, module: str, place: str) -> Iterator[Message]:
    for child in ast.iter_child_nodes(node):
        inner = place
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{place}.{child.name}" if place else child.name
        if isinstance(child, ast.Call) and child.args and is_message(child.args[0]):
            entry = ast.literal_eval(child.args[0].args[0])
            yield Message(f"E-{entry}", _kind(child), _words(texts()["message"][entry]), module, place)
        yield from _in(child, module, inner)


def is_message(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether the node creates a message."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "message"


def _kind(call: ast.Call) -> str:
    """The exception that is raised, or the category of a warning."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name != "warn":
        return name
    return call.args[1].id if len(call.args) > 1 and isinstance(call.args[1], ast.Name) else "UserWarning"


def _words(text: str) -> str:
    parts = (words + ("" if field is None else "\u2026") for words, field, _, _ in Formatter().parse(text))
    return " ".join("".join(parts).split())
