"""``python -m spec_tools.benchmarks``: runs all benchmarks, with the pytest settings that they need."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Runs pytest; returns its exit status."""
    os.chdir(HERE.parents[1])
    return pytest.main(
        [
            str(HERE),
            # The options of pyproject.toml exclude this folder, and those of the suite's conftest are for requirements.
            "--override-ini=addopts=--strict-markers",
            f"--confcutdir={HERE}",
            "-Wdefault::pytest_benchmark.logger.PytestBenchmarkWarning",
            # The ratios in the table at the end are more reliable than a ranking of medians.
            "--benchmark-quiet",
            "--benchmark-autosave",
            "--benchmark-save-data",
            *sys.argv[1:],
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
