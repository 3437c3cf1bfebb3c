"""The line of the package that runs at a recorded moment, and the functions of such lines, for the step player.

A line that only records writes a moment. The recorded action is next to it::

    if events.recorder is not None:
        events.recorder.all_gather_begins(self)                    the moment
    self._handle = self.layout.all_gather(self.root.comm_streams)       the action

An action that begins is the first later line that does not only record; one that has ended is the last one before.
"""

import ast
import re
from functools import cache

from docs_build.reading.definitions import docstring_lines, find
from docs_build.reading.order import path_of
from docs_build.reading.source import read_module


@cache
def lines_of(name: str, qualified: str) -> list[int]:
    """The line numbers of a function's code, without its docstring; none if it does not exist any more."""
    if not path_of(name).exists():
        return []
    node = find(ast.parse(read_module(name).text), qualified.split(".<locals>")[0])
    if not isinstance(node, ast.FunctionDef):
        return []
    return [n for n in range(node.lineno, (node.end_lineno or node.lineno) + 1) if n not in docstring_lines(node)]


def only_records(name: str, qualified: str) -> bool:
    """Whether the whole function only records."""
    lines = lines_of(name, qualified)
    return bool(lines) and read_module(name).recording.issuperset(lines)


def line_of(name: str, qualified: str, text: str, *, has_ended: bool) -> int:
    """The line that begins or has ended at the moment when the line ``text`` ran; 0 if there is none."""
    texts, lines = read_module(name).text.splitlines(), lines_of(name, qualified)
    here = next((number for number in lines if statement_at(name, number) == text), 0)
    recording = read_module(name).recording
    if not here or here not in recording:
        return here
    acting = [n for n in lines[1:] if n not in recording and texts[n - 1].strip()[:1] not in ("", "#")]
    # Conditions do not perform the action.
    before = [number for number in acting if number < here and not texts[number - 1].endswith(":")]
    behind = [number for number in acting if number > here]
    chosen = before[-1:] or behind[:1] if has_ended else behind[:1] or before[-1:]
    return chosen[0] if chosen else here


@cache
def statement_at(name: str, number: int) -> str:
    """The statement at a line of a module, in one line; only the head of a block; empty if there is none."""
    module = read_module(name)
    lines = module.text.splitlines()
    nodes = [node for node in ast.walk(ast.parse(module.text)) if isinstance(node, ast.stmt)]
    inner = max(
        (node for node in nodes if node.lineno <= number <= (node.end_lineno or 0)),
        key=lambda node: node.lineno,
        default=None,
    )
    if inner is None:
        return ""
    last = inner.body[0].lineno - 1 if hasattr(inner, "body") else inner.end_lineno
    text = " ".join(line.strip() for line in lines[inner.lineno - 1 : last])
    return re.sub(r",? ([)\]}])", r"\1", re.sub(r"([(\[{]) ", r"\1", text))
