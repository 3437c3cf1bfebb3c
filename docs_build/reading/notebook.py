"""Notes on the code, which appear next to it on a page, but are not in its file.

A comment in the code must be useful to everyone who edits it; a note is for first-time readers. So notes have files of
their own, ``docs_build/notes/engine/unit.md`` for ``engine/unit.py``::

    ## Unit.unshard

        self.root.limiter.throttle(self.name)

    The CPU may wait here until an older unit has freed its memory.

The heading is the function. The indented line is the text of the annotated statement, exactly as in the file. The rest
is the note, in Markdown. A note is found by function and text instead of a line number, so it follows the code. If its
statement is missing or occurs twice in the function, the build fails.
"""

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from docs_build.reading.definitions import find
from docs_build.reading.order import ROOT

NOTES = ROOT / "docs_build" / "notes"
# Two blocks with the same heading and statement would be two notes on one line.
Note = tuple[str, str, str]


def notes_of(name: str, folder: Path = NOTES) -> list[Note]:
    """The notes on a module: function, text of a statement's first line, and text of the note."""
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
    """Maps the line number of each annotated statement to the note.

    Raises:
        KeyError: a function has no such statement, or more than one.
    """
    lines = text.splitlines()
    placed: dict[int, str] = {}
    for function, statement, words in notes:
        head = _head_of(statement)
        found = [
            node.lineno
            for node in _statements(tree, function)
            if statement == lines[node.lineno - 1].strip() or head == ast.unparse(node).splitlines()[0]
        ]
        if len(found) != 1 or found[0] in placed:
            raise KeyError(
                f"{len(found)} statements of {function or 'the module'} begin with {statement!r}, for a note"
            )
        placed[found[0]] = words
    return placed


def _statements(tree: ast.Module, function: str) -> list[ast.stmt]:
    """The statements of that function."""
    node = find(tree, function)
    inside = ast.walk(node) if node else ()
    return [one for one in inside if isinstance(one, ast.stmt) and one is not node]


def _head_of(statement: str) -> str:
    """The first line of a statement, independent of its line breaks. Empty if the text is only a part of it."""
    for text in (statement, f"{statement}\n    pass"):
        with suppress(SyntaxError):
            return ast.unparse(ast.parse(text)).splitlines()[0]
    return ""
