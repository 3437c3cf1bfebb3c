"""The report: a Markdown file for people, and a JSON file with the same name for programs.

The Markdown file begins with a summary for an issue. The JSON file contains all of it. Neither contains names of hosts
or users, addresses, or paths, except with ``--with-names``.

    write(report, path)         writes both files
    read(path)                  reads a report from either of them, for example from an attachment to an issue
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import minifsdp
from spec_tests.harness.accounting import KINDS, kind_of_proof, read_rows, verdict
from spec_tools.gpu import control
from spec_tools.gpu.beside import write_beside
from spec_tools.gpu.chunks import ROOT, Outcome
from spec_tools.gpu.names import without_names
from spec_tools.gpu.platforms import Platform
from spec_tools.gpu.text import markdown

__all__ = ["compose", "read", "write"]

FORMAT = 1
# The end of earlier reports, which were one file.
BEGIN, END = "\n## All of it, for programs\n\n```json\n", "\n```\n"
Report = dict[str, Any]


def compose(
    platform: Platform,
    outcomes: Mapping[str, Outcome],
    chosen: Sequence[str],
    planned: int,
    with_names: bool = False,
) -> Report:
    """The report for the current state of the run.

    Args:
        platform: the platform of the run.
        outcomes: outcomes of all chunks that have begun, by name.
        chosen: the stages of this run.
        planned: number of chunks that have not run yet.
        with_names: whether names of hosts and users, addresses and paths stay in the texts.
    """

    def findings(stage: str) -> list[dict[str, Any]]:
        return [line for name, one in outcomes.items() if name.split("/")[0] == stage for line in one.findings]

    suite = findings("suite")
    report = {
        "format": FORMAT,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": platform.name,
        "caution": platform.caution,
        "minifsdp": minifsdp.__version__,
        "commit": commit(),
        "hardware": _hardware(findings("hardware")),
        "stages_chosen": list(chosen),
        "chunks_not_run": planned,
        "chunks": {name: _without_findings(outcome) for name, outcome in outcomes.items()},
        "failed_tests": [line for line in suite if line.get("outcome") == "failed"],
        "tests": _counts(suite),
        "outcomes": {name: _outcome(test) for name, test in _tests(suite).items()},
        "control": control.compare(outcomes),
        "benchmarks": [line["measured"] for line in findings("benchmarks") if line.get("measured")],
        **_requirements(suite),
        **{stage: findings(stage) for stage in ("links", "collectives", "smoke", "bandwidth", "races", "steps")},
    }
    return report if with_names else without_names(report)


def _hardware(findings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The versions and devices, the ranks, and the facts of the machine, with the lines that the kit has printed.

    Empty if the versions are not known.
    """
    if not findings or "versions" not in findings[0]:
        return {}
    lines = [line for finding in findings for line in finding.get("lines", ())]
    return {name: value for finding in findings for name, value in finding.items()} | {"lines": lines}


def commit() -> str:
    """The commit of the checkout, with a plus sign if files have changed; empty outside a git checkout."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except OSError:  # git is not installed
        return ""


def _without_findings(outcome: Outcome) -> dict[str, Any]:
    return {name: value for name, value in outcome.as_json().items() if name != "findings"}


def _tests(findings: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last finding of each test; if one of them failed, that one."""
    tests: dict[str, dict[str, Any]] = {}
    for line in findings:
        if "test" in line and tests.get(line["test"], {}).get("outcome") != "failed":
            tests[line["test"]] = line
    return tests


def _counts(findings: Sequence[dict[str, Any]]) -> dict[str, int]:
    outcomes = [test["outcome"] for test in _tests(findings).values()]
    return {word: outcomes.count(word) for word in ("passed", "failed", "skipped")}


def _requirements(findings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``rows``: the requirements whose tests passed, and those with a failed test; ``kinds`` of evidence by ID."""
    outcomes: dict[str, dict[str, str | None]] = {}
    for name, test in _tests(findings).items():
        for row in test["rows"]:
            outcomes.setdefault(row, {})[name] = _outcome(test)
    verdicts = {row: verdict(outcomes[row]) for row in read_rows() if row in outcomes}
    rows = {word: [row for row, said in verdicts.items() if said == word] for word in ("proven", "failed")}
    return {"rows": rows, "kinds": {row: kind_of_proof(outcomes[row]) for row in rows["proven"]}}


def _outcome(test: Mapping[str, Any]) -> str:
    """The outcome of a test in the form of the accounting: with the kind of evidence, unless it is the behaviour."""
    kind = test.get("kind", KINDS[0])
    return test["outcome"] if kind == KINDS[0] or test["outcome"] != "passed" else f"passed ({kind})"


# ---- writing and reading --------------------------------------------------------------------------------------------


def write(report: Report, path: Path) -> None:
    """Replaces the Markdown file ``path``, the JSON file with the same name, and the files of ``beside.py``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path.with_suffix(".json"), json.dumps(report, indent=1) + "\n")
    _replace(path, "\n".join(markdown(report, path.with_suffix(".json").name)) + "\n")
    write_beside(report, path)


def _replace(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, even if the kit is killed meanwhile."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def read(path: Path) -> Report:
    """The report in a JSON file, or the one that belongs to a Markdown file.

    Raises:
        ValueError: the file is not a report, its JSON file is missing, or its version is too new.
    """
    _, begin, rest = path.read_text(encoding="utf-8").rpartition(BEGIN)
    beside = path.with_suffix(".json")
    if not begin and not beside.exists():
        raise ValueError(f"{path} is not a report of python -m spec_tools.gpu: there is no {beside.name} next to it")
    try:
        report: Report = json.loads(rest.removesuffix(END) if begin else beside.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{beside} is not a report of python -m spec_tools.gpu: {error}") from None
    if report.get("format") != FORMAT:
        raise ValueError(f"{path} has format {report.get('format')}; this version reads format {FORMAT}")
    return report
