"""``python -m minifsdp_tools.learn``: exercises that the requirements of the specification check.

::

    python -m minifsdp_tools.learn list        the exercises
    python -m minifsdp_tools.learn start 4     writes the file for exercise 4 to the folder minifsdp-exercises
    python -m minifsdp_tools.learn hint 4      prints a hint; each call prints one more, up to three
    python -m minifsdp_tools.learn check 4     checks the file, and reports the remaining errors
    python -m minifsdp_tools.learn progress    the solved exercises and the printed hints

*In torch:* no such tool.

Spec: LEARN-01 to LEARN-06.
"""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from minifsdp_tools.learn.exercises import (
    Exercise,
    Progress,
    common_feedback,
    exercises,
)
from minifsdp_tools.learn.grader import grade


def _say(entry: str, **values: object) -> None:
    print(common_feedback()[entry].strip().format(**values), flush=True)


def _check(exercise: Exercise, path: Path, progress: Progress, seconds: float) -> int:
    """Checks the learner's file, and prints each requirement with its result. Returns the status of `main`."""
    _say("checking", path=path, seconds=seconds)
    verdict = grade(exercise, path, seconds)
    print(f"Exercise {exercise.number}: {exercise.title}\n")
    for number, check in enumerate(exercise.checks):
        is_next = number == verdict.num_passed
        result = (
            "failed "
            if is_next
            else "passed "
            if number < verdict.num_passed
            else "not run"
        )
        print(f"{result}  {check.what} [{check.requirements}]")
        if is_next:
            print(
                "\n" + textwrap.indent(textwrap.fill(verdict.text, 100), "    ") + "\n"
            )
    is_solved = verdict.entry is None
    progress.set_solved(exercise, is_solved)
    _say(
        "solved" if is_solved else "go-on",
        number=exercise.number,
        names=", ".join(place.replace(":", ".") for place in exercise.places.values()),
        page=exercise.page,
    )
    return int(not is_solved)


def _start(exercise: Exercise, path: Path) -> int:
    """Writes the learner's file, unless it exists. Returns the status of `main`."""
    if path.exists():
        _say("exists", path=path)
        return 2
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(exercise.stub, encoding="utf-8")
    _say("started", path=path, page=exercise.page, number=exercise.number)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 0, or 1 if a check fails, or 2 if the file is missing or exists already."""
    parser = argparse.ArgumentParser(
        "python -m minifsdp_tools.learn", description="Write functions of minifsdp."
    )
    parser.add_argument(
        "command", choices=("list", "start", "hint", "check", "progress")
    )
    numbers = [exercise.number for exercise in exercises()]
    parser.add_argument(
        "number", type=int, nargs="?", choices=numbers, help="the exercise"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("minifsdp-exercises"),
        help="your files and your progress",
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="the time limit of a check"
    )
    options = parser.parse_args(arguments)
    progress = Progress(options.folder)
    if options.command in ("list", "progress"):
        for exercise in exercises():
            mark = "solved" if exercise.number in progress.solved else ""
            num_hints = progress.num_hints(exercise)
            hints = (
                f"{num_hints} of {len(exercise.hints)} hints"
                if num_hints and options.command == "progress"
                else ""
            )
            print(f"{exercise.number:2}  {exercise.title:36} {mark:7} {hints}".rstrip())
        return 0
    if options.seconds <= 0:
        parser.error(common_feedback()["no-seconds"].strip())
    if options.number is None:
        parser.error(
            common_feedback()["no-number"].strip().format(command=options.command)
        )
    exercise = exercises()[numbers.index(options.number)]
    path = options.folder / exercise.file_name
    if options.command == "start":
        return _start(exercise, path)
    if options.command == "hint":
        if progress.num_hints(exercise) == len(exercise.hints):
            _say("no-more-hints")
        for number, hint in enumerate(progress.next_hints(exercise), 1):
            print(
                f"Hint {number} of {len(exercise.hints)}:\n{textwrap.indent(hint.strip(), '    ')}\n"
            )
        return 0
    if not path.exists():
        _say("no-file", path=path, number=exercise.number)
        return 2
    return _check(exercise, path, progress, options.seconds)


if __name__ == "__main__":
    raise SystemExit(main())
