"""Recorded runs: they are in the repository, so that every build shows the same, however busy its machine is.

``python -m docs_build.record`` writes them. They are packed, for most of it are numbers that nobody reads.
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
    """All recorded runs by key, and when and where they were recorded."""
    data = json.loads(gzip.decompress(FILE.read_bytes()))
    return {**data, "runs": {run["key"]: run for run in data["runs"]}}


def write(data: dict[str, Any]) -> None:
    """The reverse, of runs in a list; the same data gives the same bytes."""
    FILE.write_bytes(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0))


def find(key: str) -> dict[str, Any]:
    """One run.

    Raises:
        KeyError: there is none of that key, with those that there are.
    """
    runs = load()["runs"]
    if key not in runs:
        raise KeyError(f"no recorded run {key!r}; there are {', '.join(sorted(runs))}")
    return dict(runs[key])


def player_scripts() -> dict[str, str]:
    """For the step player one script for each run, one with the names of all, and one with the functions that run."""
    from docs_build.player import script_of, source_script

    narrow = {key: run for key, run in load()["runs"].items() if run["run"]["width"] <= 64}
    names = f"window.minifsdpRuns = {json.dumps(sorted(narrow))};\n"
    return {
        "runs.js": names,
        "source.js": source_script(narrow.values()),
        **{f"{key}.js": script_of(run) for key, run in narrow.items()},
    }
