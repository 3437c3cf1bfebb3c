"""The tests that fail when a line is broken, from the record of ``spec_tools/breaks``.

For each *mutant* (an edit of the package that removes a behaviour) the record has the requirements whose tests failed,
and the tests. The catalogue has the edit. This module combines the two: a break belongs to the first line that it
changes.
"""

import json
from dataclasses import dataclass
from functools import cache

from docs_build.reading.order import ROOT, name_of
from spec_tools.breaks import edits

RECORD = ROOT / "docs" / "data" / "mutants.json"


@dataclass(frozen=True)
class Break:
    """One way to break a line.

    Attributes:
        what: the broken behaviour, a sentence.
        red: the requirements whose tests failed, each with the first failed test.
    """

    what: str
    red: dict[str, str]


@cache
def breaks_of(name: str) -> dict[int, list[Break]]:
    """The breaks of a module by line; empty for a module outside of the package."""
    return _by_module().get(name, {})


@cache
def _by_module() -> dict[str, dict[int, list[Break]]]:
    found: dict[str, dict[int, list[Break]]] = {}
    for known_as, entry in json.loads(RECORD.read_text(encoding="utf-8"))["mutants"].items():
        if known_as in edits.BREAKS and entry["red"]:
            name, line = first_changed_line(edits.BREAKS[known_as])
            found.setdefault(name, {}).setdefault(line, []).append(Break(entry["what"], entry["red"]))
    return found


def first_changed_line(mutant: edits.Break) -> tuple[str, int]:
    """The module that a mutant changes, and the number of the first changed line."""
    edited = edits.edited(mutant)
    return name_of(edited.path), edited.line
