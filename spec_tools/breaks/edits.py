"""A break of the package: a text of one function, its replacement, and what must notice the difference."""

from __future__ import annotations

import ast
import functools
import itertools
import pathlib
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from spec_tests.harness.accounting import ROOT

PACKAGES = [ROOT / "minifsdp", ROOT / "minifsdp_gloo", ROOT / "minifsdp_tools", ROOT / "spec_tools" / "gpu"]
CATALOGUE = pathlib.Path(__file__).with_name("catalogue")


@dataclass(frozen=True)
class Break:
    """One behavior that is removed from the package.

    Attributes:
        name: short, with dashes.
        what: one sentence about the broken behavior.
        place: the qualified name of a function or class in any file, or the path of a file.
        old: a text that occurs once in the place. Spaces and line breaks do not matter.
        new: its replacement.
        rows: the requirements whose tests must fail.
        device: where the tests or the program run, ``cpu`` or ``simulated``.
        program: the program that must notice the break; empty if only tests must.
        by: how the program must notice it, a key of `spec_tests.streams.engines.findings`.
        is_exact: whether no test of another requirement in the same files may fail.
    """

    name: str
    what: str
    place: str
    old: str
    new: str = "pass"
    rows: list[str] = field(default_factory=list)
    device: str = "cpu"
    program: str = ""
    by: str = ""
    is_exact: bool = False


@dataclass(frozen=True)
class Edited:
    """The text of a file before and after a break."""

    path: pathlib.Path
    before: str
    after: str

    @property
    def line(self) -> int:
        """The number of the first changed line."""
        lines = zip(self.before.splitlines(), self.after.splitlines(), strict=False)
        return next(number for number, (old, new) in enumerate(lines, 1) if old != new)


BREAKS = {
    name: Break(name, **fields)
    for path in sorted(CATALOGUE.glob("*.toml"))
    for name, fields in tomllib.loads(path.read_text(encoding="utf-8")).items()
}


def edited(one: Break) -> Edited:
    """Applies a break.

    Raises:
        ValueError: the text does not occur exactly once in the place.
    """
    words = map(re.escape, re.findall(r"\w+|[^\w\s]", one.old))
    pattern = re.compile(r"(?<![\w.])" + r"\s*".join(words) + r"(?!\w)")
    found = [
        (path, match)
        for path, start, end in definitions()[one.place]
        for match in pattern.finditer(_text(path), start, end)
    ]
    if len(found) != 1:
        raise ValueError(f"{one.name}: {len(found)} texts in {one.place}, not 1: {one.old}")
    [(path, match)] = found
    before = _text(path)
    line = before[before.rfind("\n", 0, match.start()) + 1 :]
    indent = line[: len(line) - len(line.lstrip(" "))]
    after = before[: match.start()] + one.new.replace("\n", "\n" + indent) + before[match.end() :]
    return Edited(path, before, after)


@functools.cache
def definitions() -> dict[str, list[tuple[pathlib.Path, int, int]]]:
    """Maps qualified names and paths to their texts: a file, and the first and last position in it."""
    found = defaultdict(list)
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        text = _text(path)
        starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
        found[path.relative_to(ROOT).as_posix()].append((path, 0, len(text)))
        for name, node in _named(ast.parse(text)):
            found[name].append((path, starts[node.lineno - 1], starts[node.end_lineno or 0]))
    return found


def _named(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name, child
            yield from _named(child, f"{prefix}{child.name}.")
        else:
            yield from _named(child, prefix)


@functools.cache
def _text(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8")
