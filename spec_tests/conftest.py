"""The suite's options, spec accounting, and the end of the pools."""

from __future__ import annotations

import os

# Before torch is imported anywhere: one thread for each rank, or two ranks fight over two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402

from spec_tests.harness import pool  # noqa: E402
from spec_tests.harness.accounting import Accounting  # noqa: E402

ACCOUNTING = pytest.StashKey[Accounting]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where the ranks compute")


def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("--device")
    pool.use_device(device)
    config.stash[ACCOUNTING] = Accounting(device)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    accounting = config.stash[ACCOUNTING]
    accounting.collect(items)
    if config.getoption("--device") == "cpu":
        on_gpu = [item for item in items if item.get_closest_marker("gpu")]
        accounting.num_gpu_not_run = len(on_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=on_gpu)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    outcome = yield
    item.config.stash[ACCOUNTING].note(outcome.get_result())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    accounting = config.stash[ACCOUNTING]
    if accounting.outcomes:
        accounting.write()
        terminalreporter.section("spec")
        for line in accounting.summary():
            terminalreporter.write_line(line)


def pytest_sessionfinish() -> None:
    pool.close_all()
