"""A pytest plugin that writes a finding before each test begins, and another one as soon as the test is over.

A crash therefore does not lose earlier findings, and the last finding names the test that crashed. The finding of a
test contains its requirements and the kind of evidence. The finding of a benchmark also contains the measurements.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from spec_tests.harness.accounting import KINDS
from spec_tools.gpu.chunks import examined_before
from spec_tools.gpu.piece import leave_finding

__all__: list[str] = []

TEST_LIMIT = 60.0  # seconds: the limit of most tests on ranks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    leave_finding({"started": item.nodeid})
    with examined_before(TEST_LIMIT):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # A failure of the setup or teardown counts as a failure of the test.
    if report.when == "call" or not report.passed:
        leave_finding(
            {
                "test": item.nodeid,
                "outcome": report.outcome,
                "rows": [row for marker in item.iter_markers("spec") for row in marker.args],
                "kind": next((marker.args[0] for marker in item.iter_markers("proof")), KINDS[0]),
                "measured": _measured(item),
                "text": report.longreprtext if report.failed else "",
            }
        )
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Writes a finding if no test ran, for example because the only test does not apply to the engine."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        leave_finding({"nothing ran": True})


def _measured(item: pytest.Item) -> dict[str, Any]:
    """The measurements of a benchmark in addition to its time."""
    benchmark = getattr(item, "funcargs", {}).get("benchmark")
    if benchmark is None or not benchmark.extra_info:
        return {}
    names = ("contender", "best_torch", "ratio_to_best_torch")
    return {"workload": benchmark.group} | {name: benchmark.extra_info[name] for name in names}
