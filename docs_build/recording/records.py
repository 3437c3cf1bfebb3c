"""The records in ``docs/data``: measurements and outputs as JSON, with the date and the machine."""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist

from docs_build.reading.order import ROOT

DATA = ROOT / "docs" / "data"


def load(name: str) -> Any:
    """A record."""
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def save(name: str, record: Any) -> None:
    """Writes a record."""
    (DATA / f"{name}.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def stamp() -> dict[str, str]:
    """Today's date, and this machine."""
    return {"date": datetime.now(UTC).date().isoformat(), "machine": machine()}


def machine() -> str:
    """The hardware and the versions of this process, in a line."""
    versions = f"Python {platform.python_version()}, torch {metadata.version('torch')}"
    return f"{_processor()}, {os.cpu_count()} cores, {platform.system()}, {versions}"


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def of_all_ranks(value: Any) -> list[Any]:
    """The values of all ranks. All ranks must call it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def torchrun(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of this repository as a reader would, with one thread for each rank."""
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    reported = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=ROOT, env=reported, capture_output=True, text=True, check=False)
