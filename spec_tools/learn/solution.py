"""The learner's file: its stub, and the package with the learner's function in place of its own.

Spec: LEARN-02, LEARN-03.
"""

from __future__ import annotations

import ast

from spec_tests.harness.edit import Definition, Edited, definitions, find
from spec_tools.learn.exercises import Exercise
from spec_tools.mutants.mutant import PACKAGE

__all__ = ["SolutionError", "stub", "with_solution"]


class SolutionError(Exception):
    """The learner's file cannot be checked. The text is the reason."""


def stub(exercise: Exercise) -> str:
    """The text of the file that the learner completes."""
    function = _function(exercise)
    function.decorator_list = []
    docstring = function.body[0]
    assert isinstance(docstring, ast.Expr)
    function.body = [docstring, ast.parse("raise NotImplementedError").body[0]]
    heading = f"Exercise {exercise.number}: {exercise.title}. Explanation: docs/{exercise.page}"
    path, _ = definitions(PACKAGE)[exercise.place][0]
    place = f"``{exercise.place}`` in ``{path.relative_to(PACKAGE.parent).as_posix()}``"
    lines = [
        f'"""{heading}',
        "",
        f"Your function replaces {place}. It can use all names of this module.",
        "You can add imports and functions of your own to this file.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "",
        ast.unparse(ast.fix_missing_locations(function)),
        "",
    ]
    return "\n".join(lines)


def with_solution(exercise: Exercise, text: str) -> Edited:
    """The module of the package with the function in ``text``, and with everything else that ``text`` defines.

    Raises:
        SolutionError: the text has a syntax error, or no complete function with this name and these arguments.
    """
    try:
        given = ast.parse(text)
    except SyntaxError as error:
        raise SolutionError(f"The file is not valid Python: line {error.lineno}: {error.msg}.") from error
    path, _ = definitions(PACKAGE)[exercise.place][0]
    module = ast.parse(path.read_text(encoding="utf-8"))
    function = find(module, exercise.place)[0]
    assert isinstance(function, ast.FunctionDef)
    found = [node for node in given.body if isinstance(node, ast.FunctionDef) and node.name == function.name]
    if not found:
        raise SolutionError(f"The file has no function {function.name}().")
    solution = found[-1]
    if names_of(solution) != names_of(function):
        expected, actual = ", ".join(names_of(function)), ", ".join(names_of(solution))
        raise SolutionError(f"{function.name}() must have the arguments ({expected}). It has ({actual}).")
    if any(isinstance(node, ast.Raise) and _is_stub(node) for node in solution.body):
        raise SolutionError(f"{function.name}() still raises NotImplementedError. Replace this line by your code.")
    function.body = solution.body
    # At the end, so that the module's own names exist.
    module.body += [node for node in given.body if node is not solution and not _is_heading(node)]
    return Edited(path, ast.unparse(ast.fix_missing_locations(module)) + "\n", function.lineno)


def names_of(function: ast.FunctionDef) -> list[str]:
    """The names of the arguments."""
    arguments = function.args
    return [argument.arg for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]


def _function(exercise: Exercise) -> ast.FunctionDef:
    path, _ = definitions(PACKAGE)[exercise.place][0]
    node: Definition = find(ast.parse(path.read_text(encoding="utf-8")), exercise.place)[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def _is_stub(node: ast.Raise) -> bool:
    return isinstance(node.exc, ast.Name) and node.exc.id == "NotImplementedError"


def _is_heading(node: ast.stmt) -> bool:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
