"""The definition of a mutant, and the search for its passage in the package.

The place of a mutant is a qualified name such as ``Reducer.reduce`` or ``node_groups``. All files of the package are
searched for it, so a function can move. If several functions have the name, the passage determines which one is meant.
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
    """One behavior that is removed from the package.

    Attributes:
        name: short, with dashes.
        place: qualified name of the function or class.
        old: a passage that occurs exactly once in the functions of that name.
        new: its replacement.
        what: one sentence about the broken behavior.
        rows: the requirements whose tests must fail, separated by spaces.
        device: the device of these tests, ``cpu`` or ``simulated``.
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
        """The requirements as a list."""
        return self.rows.split()


@dataclass(frozen=True)
class Broken:
    """A file of the package after the change of a mutant; ``path`` is relative to the repository."""

    path: pathlib.Path
    text: str


@functools.cache
def definitions(package: pathlib.Path = PACKAGE) -> dict[str, list[tuple[pathlib.Path, str]]]:
    """Maps each qualified name to the files that define it, each with the text of the definition."""
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
    """The file of the mutant with the change applied.

    Raises:
        ValueError: no function has that name, or the passage does not occur exactly once in it.
    """
    places = definitions().get(mutant.place, [])
    if not places:
        raise ValueError(f"{mutant.name}: nothing in the package is called {mutant.place!r} any more")
    where = f"{mutant.place} for {mutant.name!r}"
    # Count in all functions of the name, and then change the one that contains the passage.
    exchanged("\n".join(passage for _, passage in places), mutant.old, mutant.new, where)
    path, passage = next((path, passage) for path, passage in places if mutant.old in passage)
    text = exchanged(path.read_text(), passage, passage.replace(mutant.old, mutant.new), f"{path.name}, {where}")
    return Broken(path.relative_to(ROOT), text)
