"""Grades the solutions and the wrong solutions of all exercises in one process, which imports torch once.

``python -m spec_tools.learn.grading 1 4`` grades exercises 1 and 4, and prints a line of JSON for each grading: the
exercise, the case, the expected entry, and the entry and text of the verdict.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minifsdp_tools.learn.exercises import Exercise, exercises

HERE = Path(__file__).parent
PACKAGE, STUB, SOLUTION = "package", "stub", "solution"


@dataclass(frozen=True)
class Case:
    """A learner's file, and the entry that its verdict must have."""

    exercise: Exercise
    about: str
    text: str | None
    entry: str | None


def wrong_solutions(exercise: Exercise) -> list[dict[str, str]]:
    return tomllib.loads((HERE / "wrong" / f"{exercise.name}.toml").read_text(encoding="utf-8"))["wrong"]


def cases(exercise: Exercise) -> Iterator[Case]:
    solution = (HERE / "solutions" / f"{exercise.name}.py").read_text(encoding="utf-8")
    yield Case(exercise, PACKAGE, None, None)
    yield Case(exercise, STUB, exercise.stub, "not-written")
    yield Case(exercise, SOLUTION, solution, None)
    for wrong in wrong_solutions(exercise):
        assert solution.count(wrong["old"]) == 1, wrong["about"]
        yield Case(exercise, wrong["about"], solution.replace(wrong["old"], wrong["new"]), wrong["entry"])


def main(numbers: list[int]) -> None:
    # Imported here, because tests only need the list of cases. Sharding a model imports the compiler, which takes
    # seconds, so this process imports it for all children.

    from minifsdp_tools.learn.grader import grade

    with tempfile.TemporaryDirectory() as folder:
        for exercise in exercises():
            for case in cases(exercise) if exercise.number in numbers else ():
                path = Path(folder) / exercise.file_name
                path.write_text(case.text or "", encoding="utf-8")
                seconds = 3 if case.entry == "time-limit" else 60
                verdict = grade(exercise, None if case.text is None else path, seconds)
                facts = {"exercise": exercise.number, "about": case.about, "expected": case.entry}
                print(json.dumps({**facts, "entry": verdict.entry, "text": verdict.text}), flush=True)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
