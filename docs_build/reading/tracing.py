"""Finds the statements of a module that only record, for a timeline or the watchdog, and compute nothing.

A reader who wants to know how an all-gather works can skip its recording. A statement only records if it is

1. an ``if`` on ``events.recorder`` without an ``else``;
2. an assignment to ``events.last_event``.
"""

import ast


def recording_lines(tree: ast.Module) -> set[int]:
    """The line numbers of all statements that only record."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and _only_records(node)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _only_records(node: ast.stmt) -> bool:
    """Whether the statement could be removed without changing any computation."""
    match node:
        case ast.If(test=test, orelse=[]):
            return ast.unparse(test) == "events.recorder is not None"
        case ast.Assign(targets=[target]):
            return ast.unparse(target) == "events.last_event"
    return False
