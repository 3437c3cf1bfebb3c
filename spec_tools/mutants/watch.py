"""A pytest plugin that runs only the tests of some requirements, and records which requirements failed.

    python -m pytest -p spec_tools.mutants.watch --rows HYB-05,HYB-09 --red red.json spec_tests/fsdp1/test_hybrid.py

A test is skipped if each of its requirements has already failed. The file is written after each test, so that the
results so far are not lost if the run hangs or crashes.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Generator

import pytest

__all__: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options for the requirements and for the output file."""
    parser.addoption("--rows", default="", help="run the tests of these rows only")
    parser.addoption("--red", type=pathlib.Path, help="the output file: the rows whose tests failed, with the test")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin object."""
    config.pluginmanager.register(_Watch(config.getoption("--rows").split(","), config.getoption("--red")))


class _Watch:
    def __init__(self, rows: list[str], path: pathlib.Path) -> None:
        self.rows, self.path = set(rows), path
        self.red: dict[str, str] = {}
        self.green: list[str] = []

    def concerns(self, item: pytest.Item) -> set[str]:
        """The watched requirements of a test."""
        return self.rows & _rows_of(item)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Deselects tests of other requirements, and runs tests with few requirements first, whole programs last."""
        items[:] = sorted(filter(self.concerns, items), key=lambda item: len(_rows_of(item)))

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Skips a test, by reporting it as handled, if all of its requirements have failed."""
        return True if self.concerns(item) <= set(self.red) else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Records the outcome of a test."""
        report = yield
        if report.failed:
            self.red |= {row: item.nodeid for row in sorted(self.concerns(item)) if row not in self.red}
        elif report.when == "call" and report.passed:
            self.green.append(item.nodeid)
        self.path.write_text(json.dumps({"red": self.red, "green": self.green}))
        return report


def _rows_of(item: pytest.Item) -> set[str]:
    return {row for marker in item.iter_markers("spec") for row in marker.args}
