"""The report: one JSON record with all findings, and a readable text with the same name.

The text begins with the hardware and the stages: what passed, failed or did not run. Then it has a table of the
findings of each stage, and the last lines of output of everything that failed.

The record is also the state of the run: a later command with the same circumstances continues it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import minifsdp
from spec_tools.gpu.collectives import costs
from spec_tools.gpu.hardware import CAUTIONS
from spec_tools.gpu.process import ROOT, Job, Outcome
from spec_tools.gpu.stages import STAGES

FORMAT = 1
# The columns of the tables. A finding that is a failure has a text.
COLUMNS = {
    "collectives": ("collective", "ranks", "bytes", "us", "busbw"),
    "steps": ("size", "ranks", "contender", "ms", "host ms", "tokens/s", "peak GiB", "syncs", "mallocs", "result"),
    "races": ("configuration", "ranks", "seeds", "delays", "text"),
}
Facts = Mapping[str, Any]


def circumstances(device: str, num_devices: int, quick: bool) -> dict[str, Any]:
    """The facts that outcomes depend on. If one of them changes, a run starts from the beginning."""
    versions = {"torch": torch.__version__, "minifsdp": minifsdp.__version__, "commit": _commit()}
    return {"device": device, "num_devices": num_devices, "quick": quick, **versions}


def _commit() -> str:
    """The commit of the checkout, with ``-dirty`` if files have changed; empty outside a git checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    with suppress(OSError):  # git is not installed
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def compose(about: Facts, outcomes: Mapping[str, Outcome], jobs: Sequence[Job]) -> dict[str, Any]:
    """The record of the current state: the circumstances, the outcomes by the name of the job, and all jobs."""
    record: dict[str, Any] = {
        "format": FORMAT,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "about": about,
        "jobs": {name: asdict(outcome) for name, outcome in outcomes.items()},
        "not_run": [job.name for job in jobs if job.name not in outcomes],
    }
    measured = list(findings(record, "collectives"))
    record["hardware"] = next(findings(record, "hardware"), {})
    # For `python -m minifsdp_tools.simulate --costs`.
    record["shared"] = any(one["shared"] for one in measured)
    record["collectives"] = costs(measured)
    return record


def findings(record: Facts, *stages: str) -> Iterator[dict[str, Any]]:
    """All findings of these stages."""
    for name, job in record["jobs"].items():
        if name.split("/")[0] in stages:
            yield from job["findings"]


def tests(record: Facts) -> dict[str, dict[str, Any]]:
    """The last finding of each test: a failed teardown comes after the test."""
    return {one["test"]: one for one in findings(record, "smoke", "suite") if "test" in one}


# ---- files ----------------------------------------------------------------------------------------------------------


def write(record: Facts, path: Path) -> None:
    """Replaces the JSON file ``path`` and the text next to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, text in ((path, json.dumps(record, indent=1)), (path.with_suffix(".md"), "\n".join(_text(record)))):
        # A reader sees the old file or the new one, even if the command is killed meanwhile.
        new = file.with_name(file.name + ".new")
        new.write_text(text + "\n", encoding="utf-8")
        os.replace(new, file)


def read(path: Path) -> dict[str, Any]:
    """The record in a JSON file, or in the one next to a text.

    Raises:
        ValueError: the file is of another version.
    """
    record: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if record.get("format") != FORMAT:
        raise ValueError(f"{path} is not a report of this version of python -m spec_tools.gpu")
    return record


def earlier_outcomes(path: Path, about: Facts) -> dict[str, Outcome]:
    """The outcomes of an earlier command with the same circumstances, without jobs that were stopped."""
    record = read(path) if path.exists() else {}
    if record.get("about") != about:
        return {}
    return {name: Outcome(**one) for name, one in record["jobs"].items() if one["word"] != "stopped"}


# ---- text -----------------------------------------------------------------------------------------------------------


def _text(record: Facts) -> Iterator[str]:
    about = record["about"]
    yield f"# minifsdp {about['minifsdp']} on {about['device']}, {record['date']}"
    yield f"\n**{CAUTIONS[about['device']]}**" if CAUTIONS[about["device"]] else ""
    yield f"{record['hardware'].get('line', 'the hardware is not known')}, commit {about['commit'] or 'unknown'}"
    yield from _table("Stages", ("stage", "passed", "not passed", "not run", "minutes", "first"), _stages(record))
    if record["shared"]:
        yield "\nRanks share a device, so no time of a collective has a meaning."
    for stage, columns in COLUMNS.items():
        yield from _table(stage.capitalize(), columns, findings(record, stage))
    counts = Counter(test["outcome"] for test in tests(record).values())
    yield f"\n## Tests\n\n{', '.join(f'{number} {word}' for word, number in counts.items()) or 'none has run'}"
    for name, job in record["jobs"].items():
        if job["word"] != "passed":
            output = "\n".join(f"    {line}" for line in job["last_lines"].splitlines())
            yield f"\n## {name}: {job['word']}\n\n{job['reason']}\n\n{output}"


def _stages(record: Facts) -> Iterator[Facts]:
    """For each stage, the numbers of jobs and the first one that did not pass."""
    for stage in STAGES:
        jobs = {name: job for name, job in record["jobs"].items() if name.split("/")[0] == stage}
        bad = [f"{name}: {job['word']}, {job['reason']}" for name, job in jobs.items() if job["word"] != "passed"]
        yield {
            "stage": stage,
            "passed": len(jobs) - len(bad),
            "not passed": len(bad),
            "not run": sum(name.split("/")[0] == stage for name in record["not_run"]),
            "minutes": round(sum(job["seconds"] for job in jobs.values()) / 60, 1),
            "first": bad[0] if bad else "",
        }


def _table(title: str, columns: Sequence[str], rows: Iterable[Facts]) -> Iterator[str]:
    """A heading and a table."""
    yield f"\n## {title}\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
    for row in rows:
        cells = [str(row.get(name, "")).partition("\n")[0].replace("|", "\\|")[:160] for name in columns]
        yield f"| {' | '.join(cells)} |"
