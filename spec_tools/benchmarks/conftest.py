"""The options of the benchmarks, the fixture that runs the races, and the table at the end."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from spec_tools.benchmarks import page
from spec_tools.benchmarks.race import Outcome
from spec_tools.benchmarks.ranks import run_race
from spec_tools.benchmarks.workloads import WORKLOADS

RACES = pytest.StashKey[dict[str, list[list[Outcome]]]]()
STARTED = pytest.StashKey[float]()
ROUNDS_OF_A_QUICK_RUN = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("minifsdp benchmarks")
    group.addoption("--quick", action="store_true", help=f"{ROUNDS_OF_A_QUICK_RUN} rounds of each workload")
    group.addoption("--record", action="store_true", help="write the tables into docs/benchmarks.md")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RACES] = {}
    config.stash[STARTED] = time.monotonic()


@pytest.fixture
def race(pytestconfig: pytest.Config) -> Callable[[str], list[list[Outcome]]]:
    """Returns the outcomes of a workload by rank; all tests of a workload share one race."""
    races = pytestconfig.stash[RACES]

    def outcomes(workload: str) -> list[list[Outcome]]:
        if workload not in races:
            rounds = ROUNDS_OF_A_QUICK_RUN if pytestconfig.getoption("--quick") else WORKLOADS[workload].rounds
            races[workload] = []
            races[workload] = run_race(workload, rounds)
        if not races[workload]:
            pytest.fail(f"the race of {workload} has failed before, see there", pytrace=False)
        return races[workload]

    return outcomes


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    results = {name: by_rank[0] for name, by_rank in config.stash[RACES].items() if by_rank}
    if not results:
        return
    seconds = time.monotonic() - config.stash[STARTED]
    terminalreporter.section("minifsdp beside torch")
    for line in [*page.circumstances(seconds), "", *page.sections(results)]:
        terminalreporter.write_line(line)
    if config.getoption("--record"):
        if len(results) < len(WORKLOADS):
            terminalreporter.write_line("not recorded: the page wants all workloads", red=True)
        else:
            page.record(results, seconds)
            terminalreporter.write_line(f"recorded in {page.PAGE}")
