"""What turns red when a line is broken, line by line, from the record of ``spec_tests/mutants``.

The record says for each *mutant* (a passage of the package, exchanged for one that takes a behaviour away) which rows
of the spec noticed, and by which test. The catalogue knows the passage. Here the two meet: a break belongs to the first
line that it changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from docs_build.order import PACKAGE, ROOT
from spec_tests.mutants.catalogue import MUTANTS
from spec_tests.mutants.mutant import Mutant, definitions

__all__ = ["RECORD", "Break", "breaks_of", "first_changed_line"]

RECORD = ROOT / "docs" / "data" / "mutants.json"


@dataclass(frozen=True)
class Break:
    """One way to break a line.

    Attributes:
        what: what is broken by it, a sentence.
        red: the rows of the spec that turned red, each with the test that failed first.
    """

    what: str
    red: dict[str, str]


@cache
def breaks_of(name: str) -> dict[int, list[Break]]:
    """The breaks of a module by line; none for one that is not of the package."""
    return _by_module().get(name, {})


@cache
def _by_module() -> dict[str, dict[int, list[Break]]]:
    found: dict[str, dict[int, list[Break]]] = {}
    for known_as, entry in json.loads(RECORD.read_text(encoding="utf-8"))["mutants"].items():
        if known_as in MUTANTS and entry["red"]:
            name, line = first_changed_line(MUTANTS[known_as])
            found.setdefault(name, {}).setdefault(line, []).append(Break(entry["what"], entry["red"]))
    return found


def first_changed_line(mutant: Mutant) -> tuple[str, int]:
    """The module that a mutant changes, and the number of the first line that is different in it."""
    path, passage = next((path, text) for path, text in definitions()[mutant.place] if mutant.old in text)
    text = path.read_text(encoding="utf-8")
    pairs = enumerate(zip(mutant.old, mutant.new, strict=False))
    same = next((n for n, (old, new) in pairs if old != new), min(len(mutant.old), len(mutant.new)))
    # Where lines are only added, their place is behind the last one that stays.
    same = min(same, len(mutant.old.rstrip()) - 1)
    at = text.index(passage) + passage.index(mutant.old) + same
    # The passage may differ first in the blanks before a line.
    at += len(text[at:]) - len(text[at:].lstrip())
    return path.relative_to(PACKAGE).as_posix(), text.count("\n", 0, at) + 1
