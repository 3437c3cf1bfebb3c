"""The exercises and the progress of a learner.

Each file in ``texts/`` is one exercise: the functions to write, the text of the learner's file, three hints, the checks
in order, and the texts of failed checks. ``places`` lists the functions of the package that the learner's functions
replace, for example ``engine.lifetime:RateLimiter.throttle``.

Worked example, a folder after two exercises and one hint of the third one::

    minifsdp-exercises/
        01_flatten.py   02_unit.py   03_pre_backward.py
        progress.json   {"solved": [1, 2], "hints": {"3": 1}}

*In torch:* no such tool.

Spec: LEARN-01, LEARN-02, LEARN-05.
"""

import json
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).parent / "texts"


@dataclass(frozen=True)
class Check:
    """One check of an exercise.

    Attributes:
        requirements: IDs of the requirements in the specification that it checks.
        what: the behaviour, in words.
        function: the function that checks it, as ``module:function`` inside ``minifsdp_tools.learn``.
    """

    requirements: str
    what: str
    function: str


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        number: its number, from 1.
        name: one word; a part of the file names.
        title: its title.
        num_ranks: the number of processes that the checks need.
        places: for each function of the learner, the function of the package that it replaces.
        stub: the text of the learner's file at the start.
        hints: three steps toward the solution.
        checks: the checks, in this order.
        feedback: the texts of failed checks, by entry.
    """

    number: int
    name: str
    title: str
    num_ranks: int
    places: dict[str, str]
    stub: str
    hints: list[str]
    checks: list[Check]
    feedback: dict[str, str]

    @property
    def file_name(self) -> str:
        """The name of the learner's file."""
        return f"{self.number:02}_{self.name}.py"

    @property
    def page(self) -> str:
        """The page of the documentation that explains the exercise."""
        return f"docs/learn/exercises/{self.number:02}-{self.name.replace('_', '-')}.md"

    def text_of(self, entry: str) -> str:
        """The text of a failed check, without its values."""
        return {**common_feedback(), **self.feedback}[entry].strip()


@cache
def common_feedback() -> dict[str, str]:
    """The texts that a check of any exercise can print, by entry."""
    return tomllib.loads((TEXTS / "common.toml").read_text(encoding="utf-8"))


@cache
def exercises() -> tuple[Exercise, ...]:
    """All exercises in the order of the reading."""
    return tuple(map(_exercise, sorted(TEXTS.glob("[0-9]*.toml"))))


def _exercise(path: Path) -> Exercise:
    text = tomllib.loads(path.read_text(encoding="utf-8"))
    number, _, name = path.stem.partition("-")
    return Exercise(
        int(number),
        name.replace("-", "_"),
        checks=[Check(**check) for check in text.pop("checks")],
        **text,
    )


class Progress:
    """The solved exercises and the number of printed hints, stored in the learner's folder.

    Args:
        folder: the learner's folder.

    Attributes:
        solved: the numbers of the exercises whose last check passed.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "progress.json"
        try:
            data: dict[str, Any] = json.loads(self._path.read_text())
        except (FileNotFoundError, ValueError):
            # Nothing is stored yet, or the file is damaged.
            data = {}
        self.solved: set[int] = set(data.get("solved", ()))
        self._hints: dict[str, int] = data.get("hints", {})

    def num_hints(self, exercise: Exercise) -> int:
        """The number of hints that were printed."""
        return self._hints.get(str(exercise.number), 0)

    def set_solved(self, exercise: Exercise, is_solved: bool) -> None:
        """Stores the result of a check."""
        (self.solved.add if is_solved else self.solved.discard)(exercise.number)
        self._save()

    def next_hints(self, exercise: Exercise) -> list[str]:
        """Returns the hints up to the next one, and stores that they were printed."""
        number = min(self.num_hints(exercise) + 1, len(exercise.hints))
        self._hints[str(exercise.number)] = number
        self._save()
        return exercise.hints[:number]

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(
            json.dumps({"solved": sorted(self.solved), "hints": self._hints}) + "\n"
        )
        new.replace(self._path)
