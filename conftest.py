"""The suite's options.

They stand here, since ``python -m pytest --device simulated`` names no folder whose conftest could be read in time.
"""

from __future__ import annotations

import os

# Before torch is imported anywhere: one thread for each rank, or two ranks fight over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which rows are asked about, where the ranks compute, and how much is asked there."""
    parser.addoption(
        "--spec", action="append", metavar="ROW", help="only the tests of a row of docs/spec.md, or of two"
    )
    there = "cuda" if torch.cuda.is_available() else "cpu"
    parser.addoption("--device", choices=["cpu", "simulated", "cuda"], default=there, help="where the ranks compute")
    parser.addoption(
        "--every-row",
        action="store_true",
        help="with --device simulated: also tests of rows that a CPU shows as well (an hour on two cores)",
    )
