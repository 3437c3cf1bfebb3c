"""The command of the exercises, which ``python -m minifsdp.learn`` starts. See ``docs/exercises/index.md``.

Spec: LEARN-01 to LEARN-05.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_tools.learn.exercises import EXERCISES, Exercise
from spec_tools.learn.grade import LIMIT, grade
from spec_tools.learn.solution import stub

__all__ = ["main"]

PROGRESS = "progress.json"


class Progress:
    """The hints, checks and solved exercises of a learner, in a file of the learner's folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PROGRESS
        self._entries: dict[str, dict[str, Any]] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def of(self, exercise: Exercise) -> dict[str, Any]:
        """The number of hints and checks, and whether the exercise is solved."""
        return {"hints": 0, "checks": 0, "solved": False, **self._entries.get(str(exercise.number), {})}

    def update(self, exercise: Exercise, **changes: Any) -> None:
        """Changes the entry of an exercise, and writes the file."""
        self._entries[str(exercise.number)] = {**self.of(exercise), **changes}
        self._path.write_text(json.dumps(self._entries, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 1 if a check found an error."""
    parser = argparse.ArgumentParser("python -m minifsdp.learn", description="Exercises, graded by the specification.")
    parser.add_argument("command", choices=("list", "start", "hint", "check"))
    parser.add_argument("number", type=int, nargs="?", choices=[*EXERCISES], help="the number of an exercise")
    parser.add_argument("--folder", type=Path, default=Path(), help="your folder; default: the current one")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for a check")
    given = parser.parse_args(arguments)
    if (given.number is None) != (given.command == "list"):
        parser.error("list takes no number" if given.command == "list" else f"{given.command} needs a number")
    if not given.folder.is_dir():
        parser.error(f"the folder {given.folder} does not exist")
    progress = Progress(given.folder)
    if given.command == "list":
        for exercise in EXERCISES.values():
            print(_line(exercise, progress))
        return 0
    exercise = EXERCISES[given.number]
    path = given.folder / exercise.file_name
    if given.command == "start":
        return _start(exercise, path)
    if given.command == "hint":
        return _hint(exercise, progress)
    if not path.exists():
        print(f"{path} does not exist. Create it: python -m minifsdp.learn start {exercise.number}", file=sys.stderr)
        return 1
    result = grade(exercise, path.read_text(encoding="utf-8"), given.limit)
    entry = progress.of(exercise)
    progress.update(exercise, checks=entry["checks"] + 1, solved=entry["solved"] or result.is_solved)
    print(result.text)
    if result.is_solved:
        print(f"Exercise {exercise.number} is solved. Compare your function with {exercise.place} in the package.")
    else:
        print(f"Hints: python -m minifsdp.learn hint {exercise.number}")
    return 0 if result.is_solved else 1


def _line(exercise: Exercise, progress: Progress) -> str:
    entry = progress.of(exercise)
    state = "solved" if entry["solved"] else "started" if entry["checks"] else ""
    return f"{exercise.number:2}  {exercise.title:28} {exercise.place:32} {state}".rstrip()


def _start(exercise: Exercise, path: Path) -> int:
    if path.exists():
        print(f"{path} exists, and is not changed.", file=sys.stderr)
        return 1
    path.write_text(stub(exercise), encoding="utf-8")
    print(f"Created {path}. Read docs/{exercise.page}, write the function, then run:")
    print(f"python -m minifsdp.learn check {exercise.number}")
    return 0


def _hint(exercise: Exercise, progress: Progress) -> int:
    num_hints = min(progress.of(exercise)["hints"] + 1, len(exercise.hints))
    for number, hint in enumerate(exercise.hints[:num_hints], 1):
        print(f"Hint {number} of {len(exercise.hints)}: {hint}")
    progress.update(exercise, hints=num_hints)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
