"""Which rows of the spec are proven: the marker, the table at the end of a run, and the file that the docs show.

A test names the rows that it proves, ``@pytest.mark.spec("CTOR-03")``. The rows are those of ``docs/spec.md``; a name
that is not there stops the collection, so a misspelt row cannot pass for a proven one.

After a run ``build/spec-results.json`` holds for each row::

    {"SHARD-04": {"statement": "...", "tests": {"spec_tests/...::test_...": {"cpu-gloo": "passed"}}}, ...}

A run of a part of the suite updates the tests that it ran and leaves the others as they were; what an earlier run on
the other backend said stays, too. A row is *proven* on a backend when a test that carries it passed there and none
failed. Tests marked ``gpu`` that were not run because there is no GPU are reported as not run; they prove nothing.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections import Counter
from typing import Any

import pytest

__all__ = ["Accounting", "read_rows", "section_of"]

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| ((?:[A-Z0-9]+-)+\d+) \| (.*)")
BACKENDS = {"cpu": "cpu-gloo", "cuda": "cuda-nccl"}


def read_rows(path: pathlib.Path = ROOT / "docs" / "spec.md") -> dict[str, str]:
    """Each row's ID and statement, in the order of the page."""
    matches = (ROW.match(line) for line in path.read_text().splitlines())
    return {match[1]: match[2].split(" | ")[0].strip() for match in matches if match}


def section_of(row: str) -> str:
    """``OSD-LOAD`` of ``OSD-LOAD-04``."""
    return row.rsplit("-", 1)[0]


class Accounting:
    """Collects, while the tests run, which row was proven by what."""

    def __init__(self, device: str) -> None:
        self.backend = BACKENDS[device]
        self.rows = read_rows()
        self.carried: dict[str, list[str]] = {}
        self.outcomes: dict[str, str] = {}
        self.num_gpu_not_run = 0

    def collect(self, items: list[pytest.Item]) -> None:
        """Reads the markers.

        Raises:
            pytest.UsageError: a marker names no row.
        """
        for item in items:
            for marker in item.iter_markers("spec"):
                for row in marker.args:
                    if row not in self.rows:
                        raise pytest.UsageError(f"{item.nodeid} carries {row!r}, which is no row of docs/spec.md")
                    self.carried.setdefault(item.nodeid, []).append(row)

    def note(self, report: pytest.TestReport) -> None:
        """Takes one test's result; the worst of its set-up, call and tear-down counts."""
        if report.nodeid in self.carried and (report.when == "call" or report.outcome != "passed"):
            worst = "failed" in (report.outcome, self.outcomes.get(report.nodeid))
            self.outcomes[report.nodeid] = "failed" if worst else report.outcome

    def write(self, path: pathlib.Path = ROOT / "build" / "spec-results.json") -> dict[str, Any]:
        """Merges this run into the file, and returns what the file says now."""
        results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        results = {row: results.get(row, {"tests": {}}) | {"statement": text} for row, text in self.rows.items()}
        for test, outcome in self.outcomes.items():
            for row in self.carried[test]:
                results[row]["tests"].setdefault(test, {})[self.backend] = outcome
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(results, indent=1))
        return results

    def summary(self) -> list[str]:
        """The table for the end of the run: what this run has proven."""
        good: set[str] = set()
        bad: set[str] = set()
        for test, outcome in self.outcomes.items():
            (good if outcome == "passed" else bad).update(self.carried[test])
        proven = good - bad
        total = Counter(map(section_of, self.rows))
        done = Counter(map(section_of, proven))
        lines = [f"{section:12s} {done[section]:3d} / {total[section]:3d}" for section in total if done[section]]
        lines.append(f"{'all':12s} {len(proven):3d} / {len(self.rows):3d}  rows of docs/spec.md proven on {self.backend}")
        if bad:
            lines.append(f"not proven, because a test failed: {', '.join(sorted(bad))}")
        if self.num_gpu_not_run:
            lines.append(f"{self.num_gpu_not_run} gpu tests not run (no --device cuda)")
        return lines
