"""The report: one JSON record of the journal, and a readable text with the same name.

The text begins with the hardware and the stages: what passed, failed or did not run. Then it has the requirements by
kind of evidence, a table of the findings of each stage of tasks, and the output of everything that failed.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import minifsdp
from spec_tests.harness.accounting import KINDS
from spec_tools.gpu.code import ROOT, digest_of
from spec_tools.gpu.collectives import costs
from spec_tools.gpu.hardware import CAUTIONS
from spec_tools.gpu.journal import Journal
from spec_tools.gpu.journal import read as read_journal
from spec_tools.gpu.stages import STAGES
from spec_tools.gpu.suite import NO_DEVICE

FORMAT = 1  # also read by `minifsdp_tools.simulate`
# Columns that are only in the JSON file.
LONG = ("losses", "shared")
Facts = Mapping[str, Any]
Record = dict[str, Any]


def circumstances(device: str, num_devices: int) -> Record:
    """The facts that results depend on. If one of them changes, a run starts from the beginning."""
    versions = {"torch": torch.__version__, "minifsdp": minifsdp.__version__}
    code = {"commit": _commit(), "code": digest_of("conftest.py")}
    return {"device": device, "num_devices": num_devices, **versions, **code}


def _commit() -> str:
    """The commit of the checkout, with ``-dirty`` if files have changed; without a checkout, the variable `COMMIT`."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty"]
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return os.environ.get("COMMIT", "")


def compose(known: Journal) -> Record:
    """The record of the current state."""
    results: dict[str, Record] = json.loads(clean(json.dumps(known.results)))
    measured = list(table(results, "collectives"))
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "about": known.about,
        "hardware": next((one for one in results.values() if "devices" in one), {}),
        "start_up": {name: one for result in results.values() for name, one in result.get("start_up", {}).items()},
        "results": results,
        "requirements": requirements(results),
        "planned": known.planned,
        # For `python -m minifsdp_tools.simulate --costs`.
        "shared": any(one["shared"] for one in measured),
        "collectives": costs(measured),
    }


def table(results: Mapping[str, Facts], stage: str) -> Iterator[Record]:
    """All rows of the table of a stage."""
    for result in results.values():
        if result["stage"] == stage:
            yield from result.get("table", [])


def requirements(results: Mapping[str, Facts]) -> dict[str, Record]:
    """For each requirement the result that counts, with the name of its test: a failed one, or the strongest.

    Tests that passed without the device prove nothing about it, and are left out.
    """
    found: dict[str, Record] = {}
    for name, result in results.items():
        if result["outcome"] != "skipped" and result.get("evidence", NO_DEVICE) != NO_DEVICE:
            for row in result["rows"]:
                found[row] = max(found.get(row, {}), {"test": name, **result}, key=weight)
    return found


def weight(result: Facts) -> tuple[bool, int, bool, int]:
    """How much a result of a requirement counts: failures, the kind of proof, a GPU for each rank, more ranks."""
    if not result:
        return False, -len(KINDS), False, 0
    evidence = result["evidence"]
    is_bad = result["outcome"] != "passed"
    return is_bad, -KINDS.index(result["kind"]), " GPUs" in evidence, int(evidence.split()[0])


# ---- files ----------------------------------------------------------------------------------------------------------


def write(path: Path) -> Record:
    """Replaces the JSON file ``path`` and the text next to it by the state of the journal; returns the record."""
    record = compose(read_journal())
    for file, text in ((path, json.dumps(record, indent=1)), (path.with_suffix(".md"), "\n".join(_text(record)))):
        # A reader sees the old file or the new one, even if the command is killed meanwhile.
        new = file.with_name(file.name + ".new")
        new.write_text(text + "\n", encoding="utf-8")
        os.replace(new, file)
    return record


def read(path: Path) -> Record:
    """The record in a JSON file, or in the one next to a text.

    Raises:
        ValueError: the file is of another version.
    """
    record: Record = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if record.get("format") != FORMAT or "results" not in record:
        raise ValueError(f"{path} is not a report of this version of python -m spec_tools.gpu")
    return record


# ---- text -----------------------------------------------------------------------------------------------------------


def _text(record: Facts) -> Iterator[str]:
    about, results = record["about"], record["results"]
    yield f"# minifsdp {about['minifsdp']} on {about['device']}, {record['date']}"
    yield f"\n**{CAUTIONS[about['device']]}**" if CAUTIONS[about["device"]] else ""
    yield f"{record['hardware'].get('line', 'the hardware is not known')}, commit {about['commit'] or 'unknown'}"
    yield from _table("Stages", list(stages(record)))
    kinds = Counter((one["evidence"], one["outcome"]) for one in record["requirements"].values())
    rows = [{"evidence": one, "outcome": word, "number": number} for (one, word), number in sorted(kinds.items())]
    yield from _table("Requirements", rows)
    yield from _table("Seconds to start", [record["start_up"]])
    if record["shared"]:
        yield "\nRanks share a device, so no time of a collective has a meaning."
    for stage in STAGES:
        yield from _table(stage.capitalize(), list(table(results, stage)))
    for name, result in results.items():
        if result["outcome"] != "passed":
            output = "\n".join(f"    {line}" for line in result.get("text", "").splitlines())
            yield f"\n## {name}: {result['outcome']}\n\n{output}"


def stages(record: Facts) -> Iterator[Record]:
    """For each stage, the numbers of results, and the first one that did not pass."""
    for stage in STAGES:
        some = {name: one for name, one in record["results"].items() if one["stage"] == stage}
        bad = [f"{name}: {one['outcome']}" for name, one in some.items() if one["outcome"] != "passed"]
        yield {
            "stage": stage,
            "passed": len(some) - len(bad),
            "not passed": len(bad),
            "not run": max(0, record["planned"].get(stage, 0) - len(some)),
            "minutes": round(sum(one["seconds"] for one in some.values()) / 60, 1),
            "first": bad[0] if bad else "",
        }


def _table(title: str, rows: Sequence[Facts]) -> Iterator[str]:
    """A heading and a table; nothing without rows."""
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in LONG]
    if columns:
        yield f"\n## {title}\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|"
    for row in rows if columns else ():
        cells = [str(row.get(name, "")).partition("\n")[0].replace("|", "\\|")[:160] for name in columns]
        yield f"| {' | '.join(cells)} |"


def clean(text: str) -> str:
    """The text without names of this user and host, because reports are public."""
    words = {str(ROOT): ".", sys.prefix: "<python>", str(Path.home()): "~", socket.gethostname(): "<host>"}
    with suppress(KeyError, OSError):  # the user has no name, for example in a container
        words[getpass.getuser()] = "<user>"
    for name, word in words.items():
        if len(name) > 2 and name != "root":
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", word, text)
    return text
