"""A pytest plugin that writes which tests failed, with their requirements.

    python -m pytest -p spec_tools.breaks.watch --failed failed.json --spec HYB-05 spec_tests/meshes/test_hybrid.py

With ``--spec``, a test is skipped if each of its chosen requirements has already failed. The file is written after each
failure, so that the results so far are not lost if the run hangs or crashes.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Generator

import pytest

FAILED: dict[str, list[str]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option for the output file."""
    parser.addoption("--failed", type=pathlib.Path, help="the output file: failed tests with their requirements")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts tests with few requirements first, whole programs last."""
    items.sort(key=lambda item: len(_rows_of(item)))


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Skips a test, by reporting it as handled, if all of its chosen requirements have failed."""
    chosen = set(_rows_of(item)).intersection(item.config.getoption("--spec") or [])
    return True if chosen and chosen <= set().union(*FAILED.values()) else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes a failure."""
    report = yield
    if report.failed:
        FAILED[item.nodeid] = _rows_of(item)
        item.config.getoption("--failed").write_text(json.dumps(FAILED))
    return report


def _rows_of(item: pytest.Item) -> list[str]:
    return [row for marker in item.iter_markers("spec") for row in marker.args]
