"""``python -m spec_tools.benchmarks``: runs all benchmarks, and prints or records the results."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from spec_tools.benchmarks import page

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "build" / "benchmarks.json"


def main(arguments: list[str]) -> int:
    """Runs pytest; returns its exit status."""
    os.chdir(HERE.parents[1])
    # For the other ranks.
    os.environ["OMP_NUM_THREADS"] = "1"
    RESULTS.parent.mkdir(exist_ok=True)
    begin = time.monotonic()
    status = pytest.main(
        [
            str(HERE),
            # The options of pyproject.toml exclude this folder, and those of the suite's conftest are for requirements.
            "--override-ini=addopts=--strict-markers",
            f"--confcutdir={HERE}",
            "--benchmark-only",
            "--benchmark-disable-gc",
            "--benchmark-columns=median,iqr,rounds",
            "--benchmark-autosave",
            f"--benchmark-json={RESULTS}",
            *(argument for argument in arguments if argument != "--record"),
        ]
    )
    results = json.loads(RESULTS.read_text())
    print("\n".join(page.sections(results)))
    if "--record" in arguments and status == 0:
        page.record(results, time.monotonic() - begin)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
