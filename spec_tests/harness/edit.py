"""Edits of the syntax tree of the package. Tests use them to break the package on purpose.

An edit names a function or class by its qualified name, and a pattern of code in it::

    replace("ReducePlan.mean", "$mesh.num_ranks", "$mesh.num_shards")
    remove("Reducer.finish", "self._complete($last)")           statements, replaced by `pass`
    never("Unit.wait", "$handle is not None")                   a condition that is always false
    always("Form.of", "$config.rank0_only")                     a condition that is always true

The pattern is an expression or a sequence of statements. It is compared as a syntax tree, so line breaks, comments and
quotes do not matter. ``$name`` matches any expression, or any name of an attribute, argument or definition; a second
``$name`` must match the same. ``...`` matches any number of statements, list elements or arguments, also of keyword
arguments. The replacement can contain the same placeholders. A condition is the test of an ``if``, ``while``,
conditional expression or comprehension.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import itertools
import pathlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Definition", "Edit", "Edited", "always", "definitions", "never", "remove", "replace"]

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
PLACEHOLDER = "PLACEHOLDER_"


@dataclass(frozen=True)
class Edit:
    """One change of the syntax tree of a function or class.

    Attributes:
        place: the qualified name.
        old: the pattern.
        new: its replacement.
        is_condition: whether only conditions are compared with the pattern.
        times: the number of places that the pattern must match.
    """

    place: str
    old: str
    new: str
    is_condition: bool = False
    times: int = 1

    def apply(self, *packages: pathlib.Path) -> Edited:
        """Applies the edit to the file of the packages that has a match.

        Raises:
            ValueError: nothing has the name, the pattern matches another number of places, or the replacement uses a
                name that the file does not have.
        """
        files = definitions(*packages).get(self.place, [])
        if not files:
            raise ValueError(f"nothing in the package is called {self.place!r}")
        pattern = Pattern(self.old, self.new, self.is_condition)
        found = [path for path, node in files for _ in pattern.matches(node)]
        if len(found) != self.times or len(set(found)) != 1:
            raise ValueError(f"the pattern matches {len(found)} places in {self.place}, not {self.times}: {self.old}")
        module = ast.parse(found[0].read_text(encoding="utf-8"))
        matches = [match for node in find(module, self.place) for match in pattern.matches(node)]
        lines = [*map(pattern.apply, matches)]
        known = {name for node in ast.walk(_tree(found[0])) for name in _names(node)} | set(vars(builtins))
        if unknown := {node.id for node in ast.walk(module) if isinstance(node, ast.Name)} - known - _stored(module):
            raise ValueError(f"no such name for the edit of {self.place}: {', '.join(sorted(unknown))}")
        return Edited(found[0], ast.unparse(ast.fix_missing_locations(module)) + "\n", lines[0])


@dataclass(frozen=True)
class Edited:
    """The text of a file after an edit, and the first line of the original file that the edit changes."""

    path: pathlib.Path
    text: str
    line: int


def replace(place: str, old: str, new: str, times: int = 1) -> Edit:
    """Replaces an expression or statements."""
    return Edit(place, old, new, times=times)


def remove(place: str, old: str, times: int = 1) -> Edit:
    """Replaces statements by ``pass``."""
    return Edit(place, old, "pass", times=times)


def never(place: str, condition: str, times: int = 1) -> Edit:
    """Replaces a condition by ``False``."""
    return Edit(place, condition, "False", is_condition=True, times=times)


def always(place: str, condition: str, times: int = 1) -> Edit:
    """Replaces a condition by ``True``."""
    return Edit(place, condition, "True", is_condition=True, times=times)


@functools.cache
def definitions(*packages: pathlib.Path) -> dict[str, list[tuple[pathlib.Path, Definition]]]:
    """Maps each qualified name to the files that define it, each with the definition."""
    found: dict[str, list[tuple[pathlib.Path, Definition]]] = {}
    for path in sorted(path for package in packages for path in package.rglob("*.py")):
        for name, node in _named(_tree(path)):
            found.setdefault(name, []).append((path, node))
    return found


def find(module: ast.Module, place: str) -> list[Definition]:
    """The definitions with a qualified name."""
    return [node for name, node in _named(module) if name == place]


def _named(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield prefix + child.name, child
            yield from _named(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _named(child, prefix)


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _names(node: ast.AST) -> Iterator[str]:
    for value in (getattr(node, field) for field in ("id", "name", "arg", "asname") if hasattr(node, field)):
        if isinstance(value, str):
            yield value.partition(".")[0]


def _stored(module: ast.Module) -> set[str]:
    return {n.id for n in ast.walk(module) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} | {
        n.arg for n in ast.walk(module) if isinstance(n, ast.arg)
    }


@dataclass
class Match:
    """A place that a pattern matches: a field of a node, the replaced part of a list, and the placeholders' values."""

    parent: ast.AST
    field: str
    index: int | None
    values: dict[str, Any]


class Pattern:
    """A pattern with its replacement, as syntax trees."""

    def __init__(self, old: str, new: str, is_condition: bool) -> None:
        self.old, self.new, self.is_condition = _parsed(old), _parsed(new), is_condition
        if unbound := set(re.findall(r"\$\w+", new)) - set(re.findall(r"\$\w+", old)):
            raise ValueError(f"the pattern has no {', '.join(sorted(unbound))}: {old}")
        both = [*self.old, *self.new]
        self.is_expression = len(both) == 2 and all(isinstance(statement, ast.Expr) for statement in both)

    def matches(self, node: ast.AST) -> Iterator[Match]:
        """The places inside of a node that match, in their order."""
        for parent in ast.walk(node):
            for field, value in ast.iter_fields(parent):
                if self.is_expression:
                    yield from self._expressions(parent, field, value)
                elif isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                    yield from self._statements(parent, field, value)

    def _expressions(self, parent: ast.AST, field: str, value: Any) -> Iterator[Match]:
        if self.is_condition and field not in ("test", "ifs"):
            return
        pattern = self.old[0].value  # type: ignore[attr-defined]
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            values: dict[str, Any] = {}
            if isinstance(child, ast.expr) and _fits(pattern, child, values):
                yield Match(parent, field, index, values)

    def _statements(self, parent: ast.AST, field: str, value: list[ast.stmt]) -> Iterator[Match]:
        for index in range(len(value) - len(self.old) + 1):
            values: dict[str, Any] = {}
            if all(_fits(old, new, values) for old, new in zip(self.old, value[index:], strict=False)):
                yield Match(parent, field, index, values)

    def apply(self, match: Match) -> int:
        """Changes the tree at the match, and returns the number of the first changed line."""
        value, runs = getattr(match.parent, match.field), Counter[str]()
        if self.is_expression:
            new = [_filled(self.new[0].value, match.values, runs)]  # type: ignore[attr-defined]
            old = [value if match.index is None else value[match.index]]
        else:
            new, old = _filled(self.new, match.values, runs), value[match.index :][: len(self.old)]
        line = _first_difference(old, new) or old[-1].lineno
        if match.index is None:
            setattr(match.parent, match.field, new[0])
        else:
            value[match.index : match.index + len(old)] = new
        return line


def _parsed(code: str) -> list[ast.stmt]:
    return ast.parse(re.sub(r"\$(\w+)", PLACEHOLDER + r"\1", code)).body


def _is_run(node: object) -> bool:
    value = node.value if isinstance(node, ast.Expr) else node
    return isinstance(value, ast.Constant) and value.value is ...


def _fits(pattern: Any, node: Any, values: dict[str, Any]) -> bool:
    name = pattern.id if isinstance(pattern, ast.Name) else pattern
    if isinstance(name, str) and name.startswith(PLACEHOLDER) and isinstance(node, ast.expr | str):
        found = node.id if isinstance(node, ast.Name) else node
        return _same(values.setdefault(name, found), found)
    if isinstance(pattern, list):
        return isinstance(node, list) and _list_fits(pattern, node, values)
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call) and any(map(_is_run, pattern.args)):
        pattern, node = copy.copy(pattern), copy.copy(node)
        names = {keyword.arg for keyword in pattern.keywords}
        values["keywords"] = [keyword for keyword in node.keywords if keyword.arg not in names]
        node.keywords = [keyword for keyword in node.keywords if keyword.arg in names]
    fields = [field for field in pattern._fields if field != "ctx"]
    return all(_fits(getattr(pattern, field), getattr(node, field), values) for field in fields)


def _list_fits(pattern: list[Any], node: list[Any], values: dict[str, Any]) -> bool:
    start = next((index for index, one in enumerate(pattern) if _is_run(one)), None)
    if start is None:
        return len(pattern) == len(node) and all(_fits(*pair, values) for pair in zip(pattern, node, strict=True))
    end = len(node) - (len(pattern) - start - 1)
    if end < start:
        return False
    kind = type(pattern[start]).__name__
    values[f"{kind} {sum(key.startswith(kind) for key in values)}"] = node[start:end]
    pairs = [*zip(pattern[:start], node[:start], strict=True), *zip(pattern[start + 1 :], node[end:], strict=True)]
    return all(_fits(*pair, values) for pair in pairs)


def _same(one: Any, other: Any) -> bool:
    texts = [ast.unparse(value) if isinstance(value, ast.AST) else value for value in (one, other)]
    return bool(texts[0] == texts[1])


def _filled(node: Any, values: dict[str, Any], runs: Counter[str]) -> Any:
    """A copy of a replacement with values in place of its placeholders."""
    if isinstance(node, list):
        parts = [_run(one, values, runs) if _is_run(one) else [_filled(one, values, runs)] for one in node]
        return list(itertools.chain(*parts))
    if isinstance(node, str) and node.startswith(PLACEHOLDER):
        return values[node]
    if isinstance(node, ast.Name) and node.id.startswith(PLACEHOLDER):
        value = values[node.id]
        return ast.Name(value, node.ctx) if isinstance(value, str) else copy.deepcopy(value)
    if not isinstance(node, ast.AST):
        return node
    made = type(node)(**{field: _filled(value, values, runs) for field, value in ast.iter_fields(node)})
    if isinstance(node, ast.Call) and any(map(_is_run, node.args)):
        made.keywords += values.get("keywords", [])  # type: ignore[attr-defined]
    return made


def _run(node: ast.AST, values: dict[str, Any], runs: Counter[str]) -> list[Any]:
    """The nodes that the next ``...`` of this kind has matched: statements, or list elements and arguments."""
    kind = type(node).__name__
    runs[kind] += 1
    return list(values[f"{kind} {runs[kind] - 1}"])


def _first_difference(old: Any, new: Any) -> int | None:
    """The line of the first node of ``old`` that differs in ``new``; ``None`` if there is no such node."""
    if isinstance(old, list) and isinstance(new, list):
        found = [*filter(None, (_first_difference(*pair) for pair in zip(old, new, strict=False)))]
        return found[0] if found else getattr(old[len(new)], "lineno", None) if len(old) > len(new) else None
    if not isinstance(old, ast.AST) or (isinstance(new, ast.AST) and ast.dump(old) == ast.dump(new)):
        return None
    inner: list[int | None] = []
    if type(old) is type(new):
        inner = [_first_difference(value, getattr(new, field)) for field, value in ast.iter_fields(old)]
    return next(filter(None, inner), getattr(old, "lineno", None))
