"""Which rows of the spec are proven: the marker, the table at the end of a run, and the file that the docs show.

A test names the rows that it proves, ``@pytest.mark.spec("CTOR-03")``. The rows are those of ``docs/spec.md``; a name
that is not there stops the collection, so a misspelt row cannot pass for a proven one.

After a run ``build/spec-results.json`` holds for each row its statement, what the tests that carry it did last on each
backend, and what follows from that::

    {
      "SHARD-04": {
        "statement": "...",
        "results": {"cpu-gloo": "proven", "simulated": "proven", "cuda-nccl": "unproven"},
        "kinds": {"cpu-gloo": "behaviour", "simulated": "behaviour"},
        "tests": {"spec_tests/fsdp1/test_shard.py::test_...": {"cpu-gloo": "passed"}}
      },
      ...
    }

* A test ``passed``, ``failed``, was ``skipped``, or was ``not run``: one marked ``gpu`` without ``--device cuda``, or
  one that ``needs`` a package that is not installed.
* A row is ``proven`` on a backend if a test that carries it passed there, all of its variants, and none failed;
  ``failed`` if one failed; else ``unproven``.
* Proofs differ in kind. Most show the ``behaviour``. ``@pytest.mark.proof("order only")`` says that a test sees what is
  asked for, and in which order, and not that it happens; ``"arithmetic"`` that it computes, or asks torch, and no line
  of the package takes part; ``"text"`` that a page says so. Such a test has not ``passed`` but ``passed (text)``. The
  best kind that a row has counts.

A run of a part of the suite updates the tests that it ran and leaves the others as they were; what an earlier run on
the other backend said stays, too. A test that is gone (renamed, or it no longer names the row) is dropped once its
whole file has been collected again.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

__all__ = ["BACKENDS", "KINDS", "Accounting", "read_rows", "rows_of_accelerators", "section_of", "verdict"]

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| ((?:[A-Z0-9]+-)+\d+) \| (.*)")
# Of proofs, the best first.
KINDS = ("behaviour", "order only", "arithmetic", "text")
BACKENDS = {"cpu": "cpu-gloo", "simulated": "simulated", "cuda": "cuda-nccl"}


def read_rows(path: pathlib.Path = ROOT / "docs" / "spec.md") -> dict[str, str]:
    """Each row's ID and statement, in the order of the page.

    Raises:
        ValueError: an ID stands there twice.
    """
    matches = [match for match in map(ROW.match, path.read_text(encoding="utf-8").splitlines()) if match]
    twice = [row for row, number in Counter(match[1] for match in matches).items() if number > 1]
    if twice:
        raise ValueError(f"{path} has more than one row {', '.join(twice)}; an ID is never used again")
    return {match[1]: match[2].split(" | ")[0].strip() for match in matches}


def rows_of_accelerators(path: pathlib.Path = ROOT / "docs" / "spec.md") -> set[str]:
    """The rows that say ``[cuda]``: a CPU shows less of them than an accelerator, and all that is said of streams."""
    matches = [match for match in map(ROW.match, path.read_text(encoding="utf-8").splitlines()) if match]
    return {match[1] for match in matches if "[cuda]" in match[2] or section_of(match[1]) == "SIM"}


def section_of(row: str) -> str:
    """``OSD-LOAD`` of ``OSD-LOAD-04``."""
    return row.rsplit("-", 1)[0]


def verdict(outcomes: Mapping[str, str | None]) -> str:
    """What the outcomes of the tests that carry a row, by their names, say about it on one backend."""
    if "failed" in outcomes.values():
        return "failed"
    return "proven" if kind_of_proof(outcomes) else "unproven"


def kind_of_proof(outcomes: Mapping[str, str | None]) -> str | None:
    """The best kind among the tests of which all variants have passed; ``None`` if there is no such test."""
    variants: dict[str, set[str | None]] = {}
    for test, outcome in outcomes.items():
        variants.setdefault(test.partition("[")[0], set()).add(outcome)
    found = [kind for kind in KINDS if {_passed(kind)} in variants.values()]
    return found[0] if found else None


def _passed(kind: str) -> str:
    return "passed" if kind == KINDS[0] else f"passed ({kind})"


class Accounting:
    """Collects, while the tests run, which row was proven by what.

    Args:
        device: ``"cpu"``, ``"simulated"`` or ``"cuda"``.
        root: folder under which ``build/spec-results.json`` is kept and which test names are relative to.
    """

    def __init__(self, device: str, root: pathlib.Path = ROOT) -> None:
        self.backend = BACKENDS[device]
        self.root = root
        self.rows = read_rows()
        self.carried: dict[str, list[str]] = {}
        self.kinds: dict[str, str] = {}
        self.complete_files: set[str] = set()
        self.outcomes: dict[str, str] = {}
        self.num_not_run: dict[str, int] = {}
        self.in_need: set[str] = set()

    def collect(self, items: list[pytest.Item], whole_files: bool) -> None:
        """Reads the markers; ``whole_files`` says that no file was collected in part.

        Raises:
            pytest.UsageError: a marker names no row, or no kind of proof.
        """
        for item in items:
            for marker in item.iter_markers("proof"):
                if marker.args[0] not in KINDS:
                    raise pytest.UsageError(f"{item.nodeid} is a proof by {marker.args[0]!r}, not one of {KINDS}")
                self.kinds[item.nodeid] = marker.args[0]
            for marker in item.iter_markers("spec"):
                for row in marker.args or ("",):
                    if row not in self.rows:
                        raise pytest.UsageError(f"{item.nodeid} carries {row!r}, which is no row of docs/spec.md")
                    self.carried.setdefault(item.nodeid, []).append(row)
        if whole_files:
            self.complete_files = {_file_of(item.nodeid) for item in items}

    def not_run(self, tests: list[str], what: str, *, in_need: bool = False) -> None:
        """Takes tests that this machine cannot run.

        Args:
            tests: their names.
            what: which they are, and why, for the end of the table.
            in_need: of a package; then the table names the rows that miss them.
        """
        if in_need:
            self.in_need.update(tests)
        self.num_not_run[what] = self.num_not_run.get(what, 0) + len(tests)
        self.outcomes |= dict.fromkeys((test for test in tests if test in self.carried), "not run")

    def note(self, report: pytest.TestReport) -> None:
        """Takes one test's result; the worst of its set-up, call and tear-down counts."""
        if report.nodeid in self.carried and (report.when == "call" or report.outcome != "passed"):
            worst = "failed" in (report.outcome, self.outcomes.get(report.nodeid))
            outcome = _passed(self.kinds.get(report.nodeid, KINDS[0])) if report.passed else report.outcome
            self.outcomes[report.nodeid] = "failed" if worst else outcome

    def write(self) -> dict[str, Any]:
        """Merges this run into the file, and returns what the file says now."""
        path = self.root / "build" / "spec-results.json"
        earlier: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        results = {}
        for row, statement in self.rows.items():
            tests = self._without_gone(row, earlier.get(row, {}).get("tests", {}))
            for test, outcome in self.outcomes.items():
                if row in self.carried[test]:
                    tests.setdefault(test, {})[self.backend] = outcome
            by_backend = {
                name: {test: outcomes.get(name) for test, outcomes in tests.items()} for name in BACKENDS.values()
            }
            said = {name: verdict(outcomes) for name, outcomes in by_backend.items()}
            kinds = {name: kind_of_proof(by_backend[name]) for name, word in said.items() if word == "proven"}
            results[row] = {"statement": statement, "results": said, "kinds": kinds, "tests": tests}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1))
        return results

    def _without_gone(self, row: str, tests: Mapping[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        def is_gone(test: str) -> bool:
            if not (self.root / _file_of(test)).exists():
                return True
            known = test in self.carried or _file_of(test) in self.complete_files
            return known and row not in self.carried.get(test, [])

        return {test: dict(outcomes) for test, outcomes in tests.items() if not is_gone(test)}

    def summary(self) -> list[str]:
        """The table for the end of the run: what this run has proven."""
        outcomes_of: dict[str, dict[str, str]] = {}
        for test, outcome in self.outcomes.items():
            for row in self.carried[test]:
                outcomes_of.setdefault(row, {})[test] = outcome
        verdicts = {row: verdict(outcomes) for row, outcomes in outcomes_of.items()}
        proven = [row for row in self.rows if verdicts.get(row) == "proven"]
        total, done = Counter(map(section_of, self.rows)), Counter(map(section_of, proven))
        touched = {section_of(row) for row in verdicts}
        lines = [f"{section:12s} {done[section]:3d} / {total[section]:3d}" for section in total if section in touched]
        lines.append(
            f"{'all':12s} {len(proven):3d} / {len(self.rows):3d}  rows of docs/spec.md proven on {self.backend}"
        )
        kinds = Counter(kind_of_proof(outcomes_of[row]) for row in proven)
        lines.append(", ".join(f"{kinds[kind]} by {kind}" for kind in KINDS if kinds[kind]) or "none by anything")
        failed = [row for row in self.rows if verdicts.get(row) == "failed"]
        if failed:
            lines.append(f"not proven, because a test failed: {', '.join(failed)}")
        lines += [f"{number} {what}" for what, number in self.num_not_run.items() if number]
        lines += [f"so not proven here: {', '.join(rows)}" for rows in [self._only_in_need(verdicts)] if rows]
        return lines

    def _only_in_need(self, verdicts: Mapping[str, str]) -> list[str]:
        """The rows that would be proven if packages were there."""
        rows = {row for test in self.in_need for row in self.carried.get(test, [])}
        return [row for row in self.rows if row in rows and verdicts.get(row) == "unproven"]


def _file_of(test: str) -> str:
    return test.split("::", 1)[0]
