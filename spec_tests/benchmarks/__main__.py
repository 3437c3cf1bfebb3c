"""``python -m spec_tests.benchmarks``: all of it, with the settings that the benchmarks want from pytest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def main() -> int:
    """The exit status of pytest."""
    os.chdir(HERE.parents[1])
    return pytest.main(
        [
            str(HERE),
            # Those of pyproject.toml leave this folder out, and those of the suite's conftest are for spec rows.
            "--override-ini=addopts=--strict-markers",
            f"--confcutdir={HERE}",
            "-Wdefault::pytest_benchmark.logger.PytestBenchmarkWarning",
            # The ratios of the table at the end are worth more than a ranking of medians.
            "--benchmark-quiet",
            "--benchmark-autosave",
            "--benchmark-save-data",
            *sys.argv[1:],
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
