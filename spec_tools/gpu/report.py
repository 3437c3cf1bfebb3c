"""The report: one file for people and programs.

It is Markdown, and its end contains the same data as JSON, so that a single file is complete. It contains no user name,
no host name and no path outside the checkout.

    write(report, path)         writes the text and the JSON
    read(path)                  reads the JSON of a file, for example of an attachment to an issue
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import minifsdp
from spec_tests.harness.accounting import read_rows, verdict
from spec_tools.gpu import bandwidth_table, steps_table
from spec_tools.gpu.beside import write_beside
from spec_tools.gpu.chunks import ROOT, Outcome
from spec_tools.gpu.platforms import Platform
from spec_tools.gpu.stages import STAGES

__all__ = ["compose", "read", "write"]

FORMAT = 1
BEGIN, END = "\n## All of it, for programs\n\n```json\n", "\n```\n"
Report = dict[str, Any]


def compose(platform: Platform, outcomes: Mapping[str, Outcome], chosen: Sequence[str], planned: int) -> Report:
    """The report for the current state of the run.

    Args:
        platform: the platform of the run.
        outcomes: outcomes of all finished chunks, by name.
        chosen: the stages of this run.
        planned: number of chunks that have not run yet.
    """
    findings = {
        stage.name: [line for name, one in outcomes.items() if _stage_of(name) == stage.name for line in one.findings]
        for stage in STAGES
    }
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": platform.name,
        "caution": platform.caution,
        "minifsdp": minifsdp.__version__,
        "commit": commit(),
        "hardware": next(iter(findings["hardware"]), {}),
        "stages_chosen": list(chosen),
        "chunks_not_run": planned,
        "chunks": {name: _without_findings(outcome) for name, outcome in outcomes.items()},
        "failed_tests": [line for line in findings["suite"] if line.get("outcome") == "failed"],
        "tests": _counts(findings["suite"]),
        "rows": _rows(findings["suite"]),
        "benchmarks": [line["measured"] for line in findings["benchmarks"] if line.get("measured")],
        "races": findings["races"],
        "bandwidth": findings["bandwidth"],
        "steps": findings["steps"],
    }


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


def _stage_of(chunk: str) -> str:
    return chunk.split("/")[0]


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


def _rows(findings: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The requirements whose tests passed, and those with a failed test."""
    outcomes: dict[str, dict[str, str | None]] = {}
    for name, test in _tests(findings).items():
        for row in test["rows"]:
            outcomes.setdefault(row, {})[name] = test["outcome"]
    verdicts = {row: verdict(outcomes[row]) for row in read_rows() if row in outcomes}
    return {word: [row for row, said in verdicts.items() if said == word] for word in ("proven", "failed")}


# ---- writing and reading --------------------------------------------------------------------------------------------


def write(report: Report, path: Path) -> None:
    """Replaces the file, and those next to it (``beside.py``)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(_text(report)) + "\n" + BEGIN + json.dumps(report, indent=1) + END, encoding="utf-8")
    write_beside(report, path)


def read(path: Path) -> Report:
    """The report in a file.

    Raises:
        ValueError: the file is not a report, or its version is too new.
    """
    _, begin, rest = path.read_text(encoding="utf-8").rpartition(BEGIN)
    if not begin:
        raise ValueError(f"{path} is no report of python -m spec_tools.gpu: it does not end in JSON")
    report: Report = json.loads(rest.removesuffix(END))
    if report.get("format") != FORMAT:
        raise ValueError(f"{path} has format {report.get('format')}; this version reads format {FORMAT}")
    return report


# ---- as text --------------------------------------------------------------------------------------------------------


def _text(report: Report) -> Iterator[str]:
    yield f"# minifsdp {report['minifsdp']} on {report['device']}, {report['date']}"
    if report["caution"]:
        yield f"\n**{report['caution']}**"
    yield from ("", f"* commit {report['commit'] or 'unknown'}", *_hardware(report["hardware"]))
    if report["chunks_not_run"]:
        yield f"* **not complete**: {report['chunks_not_run']} chunks were not run"
    yield from ("", "## Stages", "", *_stages(report))
    if report["bandwidth"]:
        yield from ("", "## Bandwidth", "", *bandwidth_table.table(report["bandwidth"]))
    if report["steps"]:
        yield from ("", "## Training steps", "", *steps_table.table(report["steps"]))
    yield from _suite(report)
    if report["benchmarks"]:
        yield from ("", "## Benchmarks", "", *_benchmarks(report))
    if report["races"]:
        yield from ("", "## Race hunt", "", *_races(report))
    yield from _failures(report)


def _hardware(hardware: Mapping[str, Any]) -> Iterator[str]:
    if not hardware:
        yield "* the hardware was not looked at"
        return
    yield "* " + ", ".join(f"{name} {version}" for name, version in hardware["versions"].items())
    yield f"* {hardware['system']}, {hardware['processors']} processors"
    for index, device in enumerate(hardware["devices"]):
        more = ", ".join(f"{name} {value}" for name, value in device.items() if name != "name")
        yield f"* device {index}: {device['name']}{', ' + more if more else ''}"


def _stages(report: Report) -> Iterator[str]:
    yield from ("| stage | passed | failed | crashed | hung | minutes |", "|---|---|---|---|---|---|")
    for stage in STAGES:
        chunks = [chunk for name, chunk in report["chunks"].items() if _stage_of(name) == stage.name]
        words = [chunk["word"] for chunk in chunks]
        if not words:
            yield f"| {stage.name} | not run | | | | |"
            continue
        counts = " | ".join(str(words.count(word)) for word in ("passed", "failed", "crashed", "hung"))
        yield f"| {stage.name} | {counts} | {sum(chunk['seconds'] for chunk in chunks) / 60:.1f} |"


def _suite(report: Report) -> Iterator[str]:
    counts, rows = report["tests"], report["rows"]
    if any(counts.values()):
        yield from ("", "## Suite", "")
        yield f"{', '.join(f'{number} {word}' for word, number in counts.items())}."
        yield f"\nRows of the spec: {len(rows['proven'])} proven, {len(rows['failed'])} failed."
        for word in ("failed", "proven"):
            yield f"\n{word.capitalize()}: {', '.join(rows[word]) or 'none'}"


def _benchmarks(report: Report) -> Iterator[str]:
    yield "Measured on the CPUs of this machine, with gloo: the benchmarks know no other device.\n"
    yield "Time of a step, divided by that of the faster FSDP of torch in the same round: median and quartiles."
    yield from ("", "| workload | trainer | ratio | the faster of torch |", "|---|---|---|---|")
    for line in report["benchmarks"]:
        ratio = line["ratio_to_best_torch"]
        quartiles = f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"
        yield f"| {line['workload']} | {line['contender']} | {quartiles} | {line['best_torch']} |"


def _races(report: Report) -> Iterator[str]:
    yield "Bit by bit against a reference in which the device is synchronised after every operator."
    yield from ("", "| configuration | ranks | seeds | delays | different |", "|---|---|---|---|---|")
    by_chunk: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for finding in report["races"]:
        by_chunk.setdefault((finding["configuration"], finding["ranks"]), []).append(finding)
    for (configuration, ranks), findings in by_chunk.items():
        seeds = [finding for finding in findings if finding.get("seed", -1) >= 0]
        different = [finding["text"] for finding in findings if finding["outcome"] == "failed"]
        delays = sum(finding["delays"] for finding in seeds)
        first = different[0].splitlines()[0] if different else "none"
        yield f"| {configuration} | {ranks} | {len(seeds)} | {delays} | {first} |"


def _failures(report: Report) -> Iterator[str]:
    failures = {name: chunk for name, chunk in report["chunks"].items() if chunk["word"] != "passed"}
    if failures:
        yield "\n## What went wrong"
    for name, chunk in failures.items():
        yield from (f"\n### {name}: {chunk['word']}", "", f"{chunk['reason']}", "")
        yield from ("    " + line for line in chunk["last_lines"].splitlines())
