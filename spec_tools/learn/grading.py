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
from pathlib import Path

from minifsdp_tools.learn.exercises import Exercise, exercises

HERE = Path(__file__).parent
PACKAGE, STUB, SOLUTION = "package", "stub", "solution"


def wrong_solutions(exercise: Exercise) -> list[dict[str, str]]:
    return tomllib.loads((HERE / "wrong" / f"{exercise.name}.toml").read_text(encoding="utf-8"))["wrong"]


def cases(exercise: Exercise) -> Iterator[tuple[str, str | None, str | None]]:
    """Learner's files: what each is about, its text, and the entry that its verdict must have."""
    solution = (HERE / "solutions" / f"{exercise.name}.py").read_text(encoding="utf-8")
    yield PACKAGE, None, None
    yield STUB, exercise.stub, "not-written"
    yield SOLUTION, solution, None
    for wrong in wrong_solutions(exercise):
        assert solution.count(wrong["old"]) == 1, wrong["about"]
        yield wrong["about"], solution.replace(wrong["old"], wrong["new"]), wrong["entry"]


def main(numbers: list[int]) -> None:
    # Imported here, because tests only need the list of cases. Sharding a model imports the compiler, which takes
    # seconds, so this process imports it for all children.

    from minifsdp_tools.learn.grader import grade

    with tempfile.TemporaryDirectory() as folder:
        for exercise in exercises():
            for about, text, entry in cases(exercise) if exercise.number in numbers else ():
                path = Path(folder) / exercise.file_name
                path.write_text(text or "", encoding="utf-8")
                seconds = 3 if entry == "time-limit" else 60
                verdict = grade(exercise, None if text is None else path, seconds)
                facts = {"exercise": exercise.number, "about": about, "expected": entry}
                print(json.dumps({**facts, "entry": verdict.entry, "text": verdict.text}), flush=True)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
