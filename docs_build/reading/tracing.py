"""Finds the statements of a module that only record, for a timeline or the collective log, and compute nothing.

A reader who wants to know how an all-gather works can skip its recording. A statement only records if it is

1. an ``if`` on ``trace.recorder`` without an ``else``;
2. a call of a method of ``trace.recorder``, whose result is not used;
3. an assignment to an attribute of the events, ``events.last_event = ...``;
4. a statement about an attribute that is annotated with a class of ``trace``, such as ``self._event``;
5. a call of a function of the module that is annotated to return an event of ``trace``, or that function itself;
6. a loop that only contains such statements.
"""

import ast

LOOKED_AT = {"events.last_event"}


def recording_lines(tree: ast.Module) -> set[int]:
    """The line numbers of all statements that only record."""
    judge = _Judge(tree)
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and judge.only_records(node)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


class _Judge:
    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        # 4. and 5. The target is a name for a field of a dataclass, and an attribute if a method sets it.
        self.attributes = {
            node.target.attr if isinstance(node.target, ast.Attribute) else node.target.id
            for node in nodes
            if isinstance(node, ast.AnnAssign)
            and "trace." in ast.unparse(node.annotation)
            and isinstance(node.target, ast.Attribute | ast.Name)
        }
        self.functions = {
            node.name
            for node in nodes
            if isinstance(node, ast.FunctionDef) and node.returns and "trace." in ast.unparse(node.returns)
        }

    def only_records(self, node: ast.stmt) -> bool:
        """Whether the statement could be removed without changing any computation."""
        match node:
            case ast.If(test=test, orelse=[]):
                return "trace.recorder is not None" in ast.unparse(test)
            case ast.For(body=body, orelse=[]):
                return all(map(self.only_records, body))
            case ast.FunctionDef(name=name):
                return name in self.functions
            case ast.Expr(value=ast.Call(func=called)):
                return self._is_recorder(ast.unparse(called))
            case ast.AnnAssign(target=target, annotation=annotation):
                return "trace." in ast.unparse(annotation) and isinstance(target, ast.Attribute | ast.Name)
            case ast.Assign(targets=targets, value=value):
                return any(map(self._is_kept_for_it, targets)) or self._makes_an_event(value)
        return False

    def _is_recorder(self, called: str) -> bool:
        parts = called.split(".")
        return called.startswith("trace.recorder.") or not self.attributes.isdisjoint(parts[1:])

    def _is_kept_for_it(self, target: ast.expr) -> bool:
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        places = [part for part in parts if isinstance(part, ast.Attribute)]
        return any(ast.unparse(place) in LOOKED_AT or place.attr in self.attributes for place in places)

    def _makes_an_event(self, value: ast.expr) -> bool:
        if isinstance(value, ast.IfExp):
            return self._makes_an_event(value.body)
        if not isinstance(value, ast.Call):
            return False
        called = ast.unparse(value.func)
        return called in self.functions or called.startswith("trace.recorder.")
