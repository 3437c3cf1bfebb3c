"""Grades a solution: runs the tests of the exercise's requirements, and explains those that fail.

Spec: LEARN-03, LEARN-04.
"""

from __future__ import annotations

from dataclasses import dataclass

from spec_tools.learn.exercises import Exercise, statement_of
from spec_tools.learn.solution import SolutionError, with_solution
from spec_tools.mutants import runner

__all__ = ["LIMIT", "Grade", "grade"]

LIMIT = 300.0  # seconds


@dataclass(frozen=True)
class Grade:
    """The result of a check.

    Attributes:
        text: for the learner.
        failed: the requirements whose tests failed.
        is_solved: whether all tests passed.
    """

    text: str
    failed: tuple[str, ...] = ()
    is_solved: bool = False


def grade(exercise: Exercise, text: str, limit: float = LIMIT) -> Grade:
    """Checks the solution in ``text``. The tests run on two and four ranks of this machine."""
    try:
        change = with_solution(exercise, text)
    except SolutionError as error:
        return Grade(str(error))
    rows = [*exercise.lessons]
    outcome = runner.run_rows(change, rows, "cpu", limit)
    failed = tuple(row for row in rows if row in outcome.red)
    lines = []
    for row in failed:
        test = outcome.red[row]
        lines += [f"{row} is not met: {statement_of(row)}", f"  {exercise.lessons[row]}", f"  Test: {test}"]
        lines += [f"  {line}" for line in _cause(outcome.errors.get(test, ""))]
    if outcome.end and not outcome.red:
        lines += ["The tests did not finish. The last lines of their output:", outcome.end]
        if outcome.end.startswith("not over"):
            lines.append("A function that waits for a collective that not all ranks issue does not return.")
    if lines:
        return Grade("\n".join(lines), failed)
    return Grade(f"All {len(outcome.green)} tests of {', '.join(rows)} pass.", is_solved=True)


def _cause(report: str) -> list[str]:
    """The lines of a failed test's report that state its error."""
    stated = [line[1:].strip() for line in report.splitlines() if line.startswith("E ")]
    return stated[:3] or report.strip().splitlines()[-3:]
