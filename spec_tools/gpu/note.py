"""A pytest plugin that writes a finding before each test begins, and another one as soon as the test is over.

A crash therefore does not lose earlier findings, and the last finding names the test that crashed. The finding of a
test contains its requirements and the kind of evidence.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from spec_tests.harness.accounting import KINDS
from spec_tools.gpu.job import leave_finding


def pytest_runtest_logstart(nodeid: str) -> None:
    leave_finding({"started": nodeid})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # A failure of the setup or teardown counts as a failure of the test.
    if report.when == "call" or not report.passed:
        leave_finding(
            {
                "test": item.nodeid,
                "outcome": report.outcome,
                "rows": [row for marker in item.iter_markers("spec") for row in marker.args],
                "kind": next((marker.args[0] for marker in item.iter_markers("proof")), KINDS[0]),
                "text": report.longreprtext if report.failed else "",
            }
        )
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A file has no tests for every device. This is no failure."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK
