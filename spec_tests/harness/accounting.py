"""Records which requirements are tested: the marker, the table at the end of a run, and the file for the docs.

A test names the requirements that it checks: ``@pytest.mark.spec("CTOR-03")``. The requirements are in
``docs/spec.md``. An unknown ID stops the collection, so a misspelt ID cannot count as tested.

After a run, ``build/spec-results.json`` contains for each requirement its statement, the last result of its tests on
each backend, and the conclusion from these results::

    {
      "SHARD-04": {
        "statement": "...",
        "results": {"cpu-gloo": "proven", "simulated": "proven", "cuda-nccl": "unproven"},
        "kinds": {"cpu-gloo": "behaviour", "simulated": "behaviour"},
        "tests": {"spec_tests/sharding/test_strategies.py::test_...": {"cpu-gloo": "passed"}}
      },
      ...
    }

* A test ``passed``, ``failed``, was ``skipped``, or was ``not run``. The last is for a test marked ``gpu`` without
  ``--device cuda``, and for a test that ``needs`` a package that is not installed.
* A requirement is ``proven`` on a backend if all variants of one of its tests passed there and no test of it failed.
  It is ``failed`` if a test failed, and otherwise ``unproven``.
* Tests give different kinds of evidence. Most tests observe the ``behaviour``. ``@pytest.mark.proof("order only")``
  marks a test that observes the calls and their order, but not their effect. ``"arithmetic"`` marks a test of a formula
  or of torch that runs no code of the package. ``"text"`` marks a test of a statement in the docs. The result of such a
  test is not ``passed`` but, for example, ``passed (text)``. The best kind of a requirement counts.

A partial run updates only the tests that it ran, and keeps the earlier results of the other backends. A test that no
longer exists, or no longer names the requirement, is removed when its whole file has been collected again.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

__all__ = [
    "BACKENDS",
    "KINDS",
    "TEST_FOLDERS",
    "Accounting",
    "read_rows",
    "rows_of_accelerators",
    "rows_proven_by",
    "section_of",
    "test_files",
    "verdict",
]

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The specification, the tests of the tools, and the tests of the documentation.
TEST_FOLDERS = ("spec_tests", "spec_tools", "docs_build/tests")
ROW = re.compile(r"^\| ((?:[A-Z0-9]+-)+\d+) \| (.*)")
# Kinds of evidence, best first.
KINDS = ("behaviour", "order only", "arithmetic", "text")
BACKENDS = {"cpu": "cpu-gloo", "simulated": "simulated", "cuda": "cuda-nccl"}


def test_files() -> list[pathlib.Path]:
    """All test files of the repository, without the benchmarks."""
    found = [path for folder in TEST_FOLDERS for path in (ROOT / folder).rglob("test_*.py")]
    return sorted(path for path in found if "benchmarks" not in path.parts)


def read_rows(path: pathlib.Path = ROOT / "docs" / "spec.md") -> dict[str, str]:
    """The ID and statement of each requirement, in the order of the page.

    Raises:
        ValueError: an ID occurs twice.
    """
    matches = [match for match in map(ROW.match, path.read_text(encoding="utf-8").splitlines()) if match]
    twice = [row for row, number in Counter(match[1] for match in matches).items() if number > 1]
    if twice:
        raise ValueError(f"{path} has more than one row {', '.join(twice)}; an ID is never used again")
    return {match[1]: match[2].split(" | ")[0].strip() for match in matches}


def rows_of_accelerators(path: pathlib.Path = ROOT / "docs" / "spec.md") -> set[str]:
    """The requirements marked ``[cuda]``, which a CPU does not test fully, and the section SIM on streams."""
    matches = [match for match in map(ROW.match, path.read_text(encoding="utf-8").splitlines()) if match]
    return {match[1] for match in matches if "[cuda]" in match[2] or section_of(match[1]) == "SIM"}


def rows_proven_by(item: pytest.Item) -> list[str]:
    """The requirements that a test checks."""
    return [row for marker in item.iter_markers("spec") for row in marker.args]


def section_of(row: str) -> str:
    """``OSD-LOAD`` of ``OSD-LOAD-04``."""
    return row.rsplit("-", 1)[0]


def verdict(outcomes: Mapping[str, str | None]) -> str:
    """The result of a requirement on one backend, from the outcomes of its tests by test name."""
    if "failed" in outcomes.values():
        return "failed"
    return "proven" if kind_of_proof(outcomes) else "unproven"


def kind_of_proof(outcomes: Mapping[str, str | None]) -> str | None:
    """The best kind among the tests whose variants have all passed; ``None`` if there is no such test."""
    variants: dict[str, set[str | None]] = {}
    for test, outcome in outcomes.items():
        variants.setdefault(test.partition("[")[0], set()).add(outcome)
    found = [kind for kind in KINDS if {_passed(kind)} in variants.values()]
    return found[0] if found else None


def _passed(kind: str) -> str:
    return "passed" if kind == KINDS[0] else f"passed ({kind})"


class Accounting:
    """Collects, while the tests run, which tests check which requirement.

    Args:
        device: ``"cpu"``, ``"simulated"`` or ``"cuda"``.
        root: the folder that contains ``build/spec-results.json``. Test names are relative to it.
        engine: the implementation that is tested. The results of another engine than minifsdp are in a file of their
            own, such as ``build/spec-results-torch.json``, and the errors of its failed tests in
            ``build/spec-errors-torch.json``.
    """

    def __init__(self, device: str, root: pathlib.Path = ROOT, engine: str = "minifsdp") -> None:
        self.engine = engine
        self.errors: dict[str, str] = {}
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
        """Reads the markers. ``whole_files`` means that no file was collected in part.

        Raises:
            pytest.UsageError: a marker names an unknown requirement or kind of evidence.
        """
        for item in items:
            for marker in item.iter_markers("proof"):
                if marker.args[0] not in KINDS:
                    raise pytest.UsageError(f"{item.nodeid} is a proof by {marker.args[0]!r}, not one of {KINDS}")
                self.kinds[item.nodeid] = marker.args[0]
            for marker in item.iter_markers("spec"):
                for row in marker.args or ("",):
                    if row not in self.rows:
                        raise pytest.UsageError(f"{item.nodeid} has the marker {row!r}, not a row of docs/spec.md")
                    self.carried.setdefault(item.nodeid, []).append(row)
        if whole_files:
            self.complete_files = {_file_of(item.nodeid) for item in items}

    def not_run(self, tests: list[str], what: str, *, in_need: bool = False, counts: bool = True) -> None:
        """Records tests that do not run.

        Args:
            tests: their names.
            what: a description with the reason, for the end of the table.
            in_need: whether they need a missing package. If so, the table lists the requirements that they would test.
            counts: whether a requirement stays unproven because of them. Other variants of a test can prove it.
        """
        if in_need:
            self.in_need.update(tests)
        self.num_not_run[what] = self.num_not_run.get(what, 0) + len(tests)
        if counts:
            self.outcomes |= dict.fromkeys((test for test in tests if test in self.carried), "not run")

    def note(self, report: pytest.TestReport) -> None:
        """Records the result of one test: the worst of its set-up, call and tear-down."""
        if report.nodeid in self.carried and (report.when == "call" or report.outcome != "passed"):
            worst = "failed" in (report.outcome, self.outcomes.get(report.nodeid))
            outcome = _passed(self.kinds.get(report.nodeid, KINDS[0])) if report.passed else report.outcome
            self.outcomes[report.nodeid] = "failed" if worst else outcome
            if report.failed:
                self.errors[report.nodeid] = last_error(report.longreprtext)

    def write(self) -> dict[str, Any]:
        """Merges this run into the file, and returns the new contents of the file."""
        suffix = "" if self.engine == "minifsdp" else f"-{self.engine}"
        path = self.root / "build" / f"spec-results{suffix}.json"
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
        if suffix:
            # A partial run updates only the tests that it ran.
            errors = self.root / "build" / f"spec-errors{suffix}.json"
            known = json.loads(errors.read_text()) if errors.exists() else {}
            known = {test: error for test, error in known.items() if test not in self.outcomes} | self.errors
            errors.write_text(json.dumps(known, indent=1))
        return results

    def _without_gone(self, row: str, tests: Mapping[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        def is_gone(test: str) -> bool:
            if not (self.root / _file_of(test)).exists():
                return True
            known = test in self.carried or _file_of(test) in self.complete_files
            return known and row not in self.carried.get(test, [])

        return {test: dict(outcomes) for test, outcomes in tests.items() if not is_gone(test)}

    def summary(self) -> list[str]:
        """The table for the end of the run: the requirements that this run has tested."""
        outcomes_of: dict[str, dict[str, str]] = {}
        for test, outcome in self.outcomes.items():
            for row in self.carried[test]:
                outcomes_of.setdefault(row, {})[test] = outcome
        verdicts = {row: verdict(outcomes) for row, outcomes in outcomes_of.items()}
        proven = [row for row in self.rows if verdicts.get(row) == "proven"]
        total, done = Counter(map(section_of, self.rows)), Counter(map(section_of, proven))
        touched = {section_of(row) for row in verdicts}
        lines = [f"{section:12s} {done[section]:3d} / {total[section]:3d}" for section in total if section in touched]
        where = self.backend if self.engine == "minifsdp" else f"{self.backend} with the engine {self.engine}"
        lines.append(f"{'all':12s} {len(proven):3d} / {len(self.rows):3d}  rows of docs/spec.md proven on {where}")
        kinds = Counter(kind_of_proof(outcomes_of[row]) for row in proven)
        lines.append(", ".join(f"{kinds[kind]} by {kind}" for kind in KINDS if kinds[kind]) or "none by anything")
        failed = [row for row in self.rows if verdicts.get(row) == "failed"]
        if failed:
            lines.append(f"not proven, because a test failed: {', '.join(failed)}")
        lines += [f"{number} {what}" for what, number in self.num_not_run.items() if number]
        elsewhere = set(self.rows) - {row for rows in self.carried.values() for row in rows}
        # A run of a few files has no tests of most rows, and needs no list of them.
        if 0 < len(elsewhere) < len(self.rows) / 2:
            sections = ", ".join(dict.fromkeys(section_of(row) for row in self.rows if row in elsewhere))
            where = "other folders (pytest spec_tools docs_build/tests)"
            lines.append(f"{len(elsewhere)} rows have their tests in {where}: {sections}")
        lines += [f"so not proven here: {', '.join(rows)}" for rows in [self._only_in_need(verdicts)] if rows]
        return lines

    def _only_in_need(self, verdicts: Mapping[str, str]) -> list[str]:
        """The requirements that would be tested if the missing packages were installed."""
        rows = {row for test in self.in_need for row in self.carried.get(test, [])}
        return [row for row in self.rows if row in rows and verdicts.get(row) == "unproven"]


def last_error(text: str) -> str:
    """The error of a failed test in one line: the last line that pytest marks with ``E``, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith("E ")]
    return (marked or lines or [""])[0 if marked else -1].removeprefix("E").strip()[:300]


def _file_of(test: str) -> str:
    return test.split("::", 1)[0]
