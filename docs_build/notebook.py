"""Notes on the code, which stand beside it on a page and not in the file.

A comment in the code has to be worth its line to everybody who edits it; a note is for who reads it for the first time.
So notes have files of their own, ``docs_build/notes/engine/unit.md`` for ``engine/unit.py``::

    ## Unit.unshard

        self.limiter.admit(self.name)

    The CPU may stop here, until an older unit has given its memory back.

The headline is the function, the indented line is the text of the statement that the note is about, as it stands in the
file, and what follows is the note, in Markdown. A note is found by function and text and not by a number, so it follows
the code wherever that moves; one whose statement is gone, or stands there twice, ends the build.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from docs_build.order import ROOT

__all__ = ["NOTES", "notes_of", "place_notes"]

NOTES = ROOT / "docs_build" / "notes"
# Two blocks with the same headline and statement would be two notes on one line.
Note = tuple[str, str, str]


def notes_of(name: str, folder: Path = NOTES) -> list[Note]:
    """The notes on a module: of each the function, the text of a statement's first line, and what there is to say."""
    path = (folder / name).with_suffix(".md")
    return list(_read(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []


def _read(lines: list[str]) -> Iterator[Note]:
    function, statement, words = "", "", list[str]()
    for line in [*lines, "## "]:
        if line.startswith(("## ", "    ")):
            if statement:
                yield function, statement, "\n".join(words).strip()
            function = line[3:].strip() if line.startswith("## ") else function
            statement, words = line.strip() if line.startswith("    ") else "", []
        else:
            words.append(line)


def place_notes(text: str, tree: ast.Module, notes: list[Note]) -> dict[int, str]:
    """For each note the number of the line that it is about.

    Raises:
        KeyError: a function has no such statement, or more than one.
    """
    lines = text.splitlines()
    placed: dict[int, str] = {}
    for function, statement, words in notes:
        found = [line for line in _statements(tree, function) if lines[line - 1].strip() == statement]
        if len(found) != 1 or found[0] in placed:
            raise KeyError(
                f"{len(found)} statements of {function or 'the module'} begin with {statement!r}, for a note"
            )
        placed[found[0]] = words
    return placed


def _statements(tree: ast.Module, function: str) -> list[int]:
    """The lines on which a statement of that function begins."""
    node: ast.AST = tree
    for part in filter(None, function.split(".")):
        inside = [one for one in getattr(node, "body", []) if getattr(one, "name", None) == part]
        if not inside:
            return []
        node = inside[-1]
    return [one.lineno for one in ast.walk(node) if isinstance(one, ast.stmt) and one is not node]
