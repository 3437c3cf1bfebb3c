"""Recorded runs. They are in the repository, so that every build shows the same runs.

``python -m docs_build.record`` writes them. They are compressed, because most of the data is numbers.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any

from docs_build.order import ROOT

__all__ = ["FILE", "find", "load", "player_scripts", "write"]

FILE = ROOT / "docs" / "data" / "recordings.json.gz"


@cache
def load() -> dict[str, Any]:
    """All recorded runs by key, and the date and machine of the recording."""
    data = json.loads(gzip.decompress(FILE.read_bytes()))
    return {**data, "runs": {run["key"]: run for run in data["runs"]}}


def write(data: dict[str, Any]) -> None:
    """Writes runs from a list; the same data results in the same bytes."""
    FILE.write_bytes(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0))


def find(key: str) -> dict[str, Any]:
    """One run.

    Raises:
        KeyError: there is no run with that key; the message lists all keys.
    """
    runs = load()["runs"]
    if key not in runs:
        raise KeyError(f"no recorded run {key!r}; there are {', '.join(sorted(runs))}")
    return dict(runs[key])


def player_scripts() -> dict[str, str]:
    """The scripts for the step player: one for each run, one with the names of all, and one with their functions."""
    from docs_build.player import script_of, source_script

    narrow = {key: run for key, run in load()["runs"].items() if run["run"]["width"] <= 64}
    names = f"window.minifsdpRuns = {json.dumps(sorted(narrow))};\n"
    return {
        "runs.js": names,
        "source.js": source_script(narrow.values()),
        **{f"{key}.js": script_of(run) for key, run in narrow.items()},
    }
