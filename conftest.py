"""The options of the suite.

They are in this file, because ``python -m pytest --device simulated`` names no folder, and pytest reads only this
``conftest.py`` before it parses the options.
"""

from __future__ import annotations

import os

# Before torch is imported: one thread for each rank. Otherwise the threads of two ranks share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# For each connection to a store, torch asks the DNS server for the names of both ends. If an answer is lost, the C
# library asks again after 1 second instead of 5. Some tests give all ranks only 3 seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

import pytest

# The hooks of the suite, for all folders with tests.
pytest_plugins = ["spec_tests.harness.session"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that choose requirements, the device, and the number of tests."""
    parser.addoption(
        "--spec", action="append", metavar="ID", help="only the tests of a requirement of docs/spec.md; repeatable"
    )
    parser.addoption(
        "--about", metavar="TOPICS", help="only the tests about all of these topics, for example 'no_sync, precision'"
    )
    # Not `cuda` where there is a GPU: a user who runs the tests once expects the time that the README names.
    parser.addoption(
        "--device", choices=["cpu", "simulated", "cuda"], default="cpu", help="where the ranks compute (default: cpu)"
    )
    parser.addoption(
        "--engine",
        default="minifsdp",
        metavar="NAME",
        help="implementation to test: minifsdp, torch (its own FSDPs), or an adapter module (see spec_tests/subject)",
    )
    parser.addoption(
        "--limit", type=float, metavar="SECONDS", help="a test on ranks that takes longer fails as hanging"
    )
    parser.addoption(
        "--variants",
        type=variants,
        metavar="each|all|others|NUMBER",
        help="the variants of each parametrized test: 'each' parameter value occurs once (default for folders), 'all' "
        "(default for a file, a test, -k and --spec), the 'others', which 'each' leaves out, or at most a NUMBER",
    )
    parser.addoption("--quick", action="store_true", help="the tests that noticed breaks of the package")
    parser.addoption(
        "--every-row",
        action="store_true",
        help="with --device simulated: also the tests that a CPU proves as well (an hour on two cores)",
    )


def variants(text: str) -> str | int:
    """Parses the option ``--variants``."""
    if text in ("each", "all", "others"):
        return text
    return int(text)
