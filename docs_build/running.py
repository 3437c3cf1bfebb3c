"""Which line of the package runs at a recorded moment, and the functions around such lines, for the step player.

A moment was noted by a line that only records, and beside it stands what was done::

    if trace.recorder is not None:
        self._event = trace.recorder.begin("AG", ...)    noted here
    self._promise = self.layout.gather(self.lanes)       this is what begins

What begins is the first line behind it that does not only record; what has ended, the last one before it.
"""

from __future__ import annotations

import ast
from functools import cache

from docs_build.order import PACKAGE
from docs_build.source import read_module

__all__ = ["function_lines", "line_of", "lines_of", "only_records"]


@cache
def _function(name: str, qualified: str) -> ast.FunctionDef | None:
    """The function in which a recorded one was, or which it was itself; ``None`` if it is there no more."""
    if not (PACKAGE / name).exists():
        return None
    place: ast.AST = ast.parse(read_module(name).text)
    for part in qualified.split(".<locals>")[0].split("."):
        known = [n for n in ast.iter_child_nodes(place) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        found = [node for node in known if node.name == part]
        if not found:
            return None
        place = found[-1]
    return place if isinstance(place, ast.FunctionDef) else None


def lines_of(name: str, qualified: str) -> list[int]:
    """The numbers of a function's lines of code, without its docstring."""
    node = _function(name, qualified)
    if node is None:
        return []
    numbers = set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    if ast.get_docstring(node):
        said = node.body[0]
        numbers -= set(range(said.lineno, (said.end_lineno or said.lineno) + 1))
    return sorted(numbers)


def only_records(name: str, qualified: str) -> bool:
    """Whether the whole function is there for the recorder alone."""
    lines = lines_of(name, qualified)
    return bool(lines) and read_module(name).recording.issuperset(lines)


def line_of(name: str, qualified: str, text: str, *, has_ended: bool) -> int:
    """The number of the line that begins, or has ended, where the line ``text`` was running; 0 if it is not there."""
    texts, lines = read_module(name).text.splitlines(), lines_of(name, qualified)
    here = next((number for number in lines if texts[number - 1].strip() == text), 0)
    recording = read_module(name).recording
    if not here or here not in recording:
        return here
    acting = [n for n in lines[1:] if n not in recording and texts[n - 1].strip()[:1] not in ("", "#")]
    # What asks whether to do something has not done it.
    before = [number for number in acting if number < here and not texts[number - 1].endswith(":")]
    behind = [number for number in acting if number > here]
    chosen = before[-1:] or behind[:1] if has_ended else behind[:1] or before[-1:]
    return chosen[0] if chosen else here


@cache
def _highlighted(name: str) -> list[str]:
    # Needed for pages alone, not by who records.
    from docs_build.markup import highlight_lines

    return highlight_lines(read_module(name).text)


def function_lines(name: str, qualified: str) -> list[tuple[int, str]]:
    """A function as the player shows it: numbers of its lines, and the lines as HTML."""
    return [(number, _highlighted(name)[number - 1]) for number in lines_of(name, qualified)]
