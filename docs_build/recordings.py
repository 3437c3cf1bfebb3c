"""Reads what was recorded; records it first if the package has changed since.

Recording takes most of a build's time. Who only works on the prose can set ``MINIFSDP_DOCS_RECORDINGS`` to a file with
earlier recordings, which is then used as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from docs_build.order import PACKAGE, ROOT

__all__ = ["find", "load", "player_scripts"]

FOLDER = ROOT / "build" / "docs"
KEEP = 3


def _fingerprint() -> str:
    digest = hashlib.sha256()
    rooms = [Path(__file__).with_name(name) for name in ("models.py", "record.py")]
    for path in [*sorted(PACKAGE.rglob("*.py")), *rooms]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def load() -> dict[str, Any]:
    """All recorded runs by key, and when and where they were recorded.

    Raises:
        subprocess.CalledProcessError: a recorded training failed.
    """
    given = os.environ.get("MINIFSDP_DOCS_RECORDINGS")
    path = Path(given) if given else FOLDER / f"recordings-{_fingerprint()}.json"
    if not path.exists():
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-m", "docs_build.record", str(path)], cwd=ROOT, env=environment, check=True)
        for old in sorted(FOLDER.glob("recordings-*.json"), key=os.path.getmtime)[:-KEEP]:
            old.unlink()
    data = json.loads(path.read_text())
    return {**data, "runs": {run["key"]: run for run in data["runs"]}}


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
    """For the step player one script for each run, and one with the names of all: name of the file to its text."""
    from docs_build.player import script_of

    narrow = {key: run for key, run in load()["runs"].items() if run["run"]["width"] <= 64}
    names = f"window.minifsdpRuns = {json.dumps(sorted(narrow))};\n"
    return {"runs.js": names, **{f"{key}.js": script_of(run) for key, run in narrow.items()}}
