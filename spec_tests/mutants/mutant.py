"""What a mutant is, and where in the package its passage stands.

The place is a qualified name, ``Reducer.reduce`` or ``node_groups``. All files of the package are searched for it, so
a function may move; where several have the name, the passage says which one is meant.
"""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

from spec_tests.harness.accounting import ROOT
from spec_tests.harness.passage import exchanged

__all__ = ["Broken", "Mutant", "broken", "definitions"]

PACKAGE = ROOT / "minifsdp"


@dataclass(frozen=True)
class Mutant:
    """One meaning that is taken away from the package.

    Attributes:
        name: short, with dashes.
        place: qualified name of the function or class.
        old: a passage that is exactly once in the functions of that name.
        new: what stands there instead.
        what: what is broken by that, one sentence.
        rows: those that must turn red, separated by spaces.
        device: where the tests of these rows are run, ``cpu`` or ``simulated``.
    """

    name: str
    place: str
    old: str
    new: str
    what: str
    rows: str
    device: str = "cpu"

    @property
    def row_list(self) -> list[str]:
        """The rows, one by one."""
        return self.rows.split()


@dataclass(frozen=True)
class Broken:
    """A file of the package as a mutant leaves it; ``path`` is relative to the repository."""

    path: pathlib.Path
    text: str


@functools.cache
def definitions(package: pathlib.Path = PACKAGE) -> dict[str, list[tuple[pathlib.Path, str]]]:
    """For each qualified name the files that define it, each with the text of the definition."""
    found: dict[str, list[tuple[pathlib.Path, str]]] = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text()
        for name, node in _named(ast.parse(text)):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            passage = "".join(text.splitlines(keepends=True)[start - 1 : node.end_lineno])
            found.setdefault(name, []).append((path, passage))
    return found


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _named(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield prefix + child.name, child
            yield from _named(child, f"{prefix}{child.name}.")


def broken(mutant: Mutant) -> Broken:
    """The file that the mutant changes, changed.

    Raises:
        ValueError: no function has that name, or the passage does not stand there exactly once.
    """
    places = definitions().get(mutant.place, [])
    if not places:
        raise ValueError(f"{mutant.name}: nothing in the package is called {mutant.place!r} any more")
    where = f"{mutant.place} for {mutant.name!r}"
    # Counted in all functions of the name, and then changed in the one that has it.
    exchanged("\n".join(passage for _, passage in places), mutant.old, mutant.new, where)
    path, passage = next((path, passage) for path, passage in places if mutant.old in passage)
    text = exchanged(path.read_text(), passage, passage.replace(mutant.old, mutant.new), f"{path.name}, {where}")
    return Broken(path.relative_to(ROOT), text)
