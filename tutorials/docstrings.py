"""Training texts that every Python installation contains: the docstrings of the standard library.

There are about 10,000 docstrings, each with the name of its package. Two tutorials use them. One predicts the package
of a docstring. The other generates its first line from the rest. The library differs a little between Python releases,
so the texts and all losses also differ, even with the same seed.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Docstring", "read_docstrings"]

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Docstring:
    """A docstring, without indentation.

    Attributes:
        package: the top-level package or module that it comes from, such as ``"email"``.
        text: the whole docstring.
    """

    package: str
    text: str

    @property
    def summary(self) -> str:
        """The first paragraph, on one line."""
        return " ".join(self.text.split("\n\n")[0].split())

    @property
    def body(self) -> str:
        """The text after the first paragraph; ``""`` if there is none."""
        return " ".join(self.text.partition("\n\n")[2].split())


def read_docstrings(packages: tuple[str, ...] | None = None, root: Path | None = None) -> list[Docstring]:
    """The docstrings of all functions, classes and modules, in the order of their files, without duplicates.

    Args:
        packages: top-level packages and modules; ``None`` for all of them.
        root: folder of the library; by default that of the running Python.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, Docstring] = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        package = inside.parts[0].removesuffix(".py")
        if SKIPPED.isdisjoint(inside.parts) and (packages is None or package in packages):
            for text in _docstrings_in(path):
                found.setdefault(text, Docstring(package, text))
    return list(found.values())


def _docstrings_in(path: Path) -> Iterator[str]:
    source = path.read_text(encoding="utf-8", errors="replace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and text.isascii():
                yield text
