"""The journal of a run: a file of JSON lines. Every process of the run appends to it, and nothing is ever removed.

The first line has the circumstances of the run (`report.circumstances`). Then, for each task and each test::

    {"name": "spec_tests/prefetch/test_counts.py::test_it[None]", "stage": "requirements", "started": 1785312000.1}
    {"name": "spec_tests/prefetch/test_counts.py::test_it[None]", "stage": "requirements", "outcome": "passed", ...}

A line is complete as soon as its task or test is over, so a run that is cut off loses only what was running. This runs
again, after the other tests of its stage, because it can be what ended the run.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JOURNAL = "MINIFSDP_GPU_JOURNAL"  # environment variable: the path of the journal
AGAIN = ("stopped", "interrupted")  # outcomes of what runs again

Result = dict[str, Any]


@dataclass
class Journal:
    """The contents of a journal.

    Attributes:
        about: the circumstances of the run.
        planned: the number of tasks or tests of each stage.
        results: the last result of each name.
        started: the names that were started.
        running: what was started last, if nothing was written about it since.
    """

    about: Result = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    running: Result = field(default_factory=dict)

    def is_complete(self, stages: Iterable[str]) -> bool:
        """Whether all that was planned for these stages has a result."""
        done = Counter(result["stage"] for result in self.results.values())
        return all(stage in self.planned and done[stage] >= self.planned[stage] for stage in stages)


def leave(line: Result) -> None:
    """Appends a line. A process that is killed leaves the whole line or nothing."""
    with open(os.environ[JOURNAL], "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def read() -> Journal:
    """Reads the journal; it is empty if there is no file."""
    found = Journal()
    for line in _lines(Path(os.environ[JOURNAL])):
        found.about = line.get("about", found.about)
        found.planned |= line.get("planned", {})
        found.running = line if "started" in line else {}
        if "started" in line:
            found.started.add(line["name"])
        elif line.get("outcome", AGAIN[0]) not in AGAIN:
            found.results[line["name"]] = line
    return found


def _lines(path: Path) -> Iterator[Result]:
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError):  # the machine was switched off in the middle of a line
            yield json.loads(line)


def open_for(path: Path, about: Result) -> None:
    """Begins a journal, or continues the one that is there. It is kept under another name if circumstances differ."""
    os.environ[JOURNAL] = str(path)
    if read().about == about:
        with path.open("ab") as file:
            file.write(b"\n")  # after a line that is not complete; an empty line has no meaning
        return
    if path.exists():
        os.replace(path, path.with_suffix(".earlier.jsonl"))
    leave({"about": about})
