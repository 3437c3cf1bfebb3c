"""Recorded runs. They are in the repository, so that every build shows the same runs.

``python -m docs_build.recording.record`` writes them. They are compressed, because most of the data is numbers.
"""

import gzip
import json
from functools import cache
from typing import Any

from docs_build.reading.order import ROOT

FILE = ROOT / "docs" / "data" / "recordings.json.gz"


@cache
def load() -> dict[str, Any]:
    """All recorded runs by key, and the date and machine of the recording."""
    data = json.loads(gzip.decompress(FILE.read_bytes()))
    return {**data, "runs": {run["key"]: run for run in data["runs"]}}


def find(key: str) -> dict[str, Any]:
    """One run.

    Raises:
        KeyError: there is no run with that key; the message lists all keys.
    """
    runs = load()["runs"]
    if key not in runs:
        raise KeyError(f"no recorded run {key!r}; there are {', '.join(sorted(runs))}")
    return dict(runs[key])
