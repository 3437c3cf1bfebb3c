"""The records in ``docs/data``: measurements and outputs as JSON, with the date and the machine."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist

from docs_build.reading.order import ROOT

DATA = ROOT / "docs" / "data"
NONE = "No run is recorded."


def load(name: str) -> Any:
    """A record; ``None`` if nothing is recorded."""
    path = DATA / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def save(name: str, record: Any, sort_keys: bool = True) -> None:
    """Writes a record."""
    (DATA / f"{name}.json").write_text(json.dumps(record, indent=1, sort_keys=sort_keys) + "\n", encoding="utf-8")


def of_record(name: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Decorates a function whose first argument is a record. The decorated function loads the record, and returns
    `NONE` if there is none.
    """

    def decorate(make: Callable[..., str]) -> Callable[..., str]:
        @wraps(make)
        def made(*arguments: Any) -> str:
            record = load(name)
            return NONE if record is None else make(record, *arguments)

        return made

    return decorate


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


def save_on_ranks(name: str, make: Callable[[], dict[str, Any]]) -> None:
    """Calls a function on all ranks that torchrun has started, and writes its results on rank 0."""
    dist.init_process_group("gloo")
    found = make()
    if dist.get_rank() == 0:
        save(name, {**stamp(), **found}, sort_keys=False)
    dist.destroy_process_group()


def torchrun(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of this repository as a reader would, with one thread for each rank."""
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    reported = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, cwd=ROOT, env=reported, capture_output=True, text=True, check=False)
