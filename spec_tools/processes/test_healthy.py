"""Healthy programs that need their own processes.

They mostly wait, so several run at once: the first test starts all selected programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from spec_tools.processes.launch import problem

pytestmark = [pytest.mark.cpu, pytest.mark.pure]
# The programs and launchers that prove each requirement.
PROGRAMS = {
    ("HEALTHY-06",): [
        ("destroyed_and_made_again", "plain"),
        ("destroyed_and_made_again", "torchrun"),
        ("destroyed_on_one_rank_first", "torchrun"),
        ("ten_groups", "plain"),
        ("ten_new_groups", "plain"),
        ("groups_made_by_the_package", "plain"),
    ],
    ("HEALTHY-06", "HEALTHY-07"): [("hash_store_and_file_store", "plain")],
    ("HEALTHY-07",): [
        ("late_at_every_place", "plain"),
        ("host_of_the_store_leaves", "plain"),
        ("prefix_store_and_no_temporary_folder", "plain"),
        ("spawned", "plain"),
    ],
    ("HEALTHY-07", "HEALTHY-11"): [("one_rank_raises_once", "restarts")],
    ("HEALTHY-08",): [
        ("sigterm_handler_set_later", "plain"),
        ("sigterm_handler_set_before", "torchrun"),
        ("wakeup_descriptor", "plain"),
        ("two_event_loops", "plain"),
        ("own_excepthook", "plain"),
        ("exit_handlers", "plain"),
        ("exit_handlers_without_destroying", "plain"),
    ],
    ("HEALTHY-09",): [
        ("data_workers", "plain"),
        ("fork_that_ends_as_programs_do", "plain"),
        ("fork_that_fails_between_steps", "plain"),
    ],
    ("HEALTHY-10",): [
        ("rank_1_ends_later", "plain"),
        ("rank_0_ends_later", "plain"),
        ("rank_1_ends_early", "plain"),
        ("rank_1_ends_early", "torchrun"),
    ],
    ("HEALTHY-12",): [("console", "plain"), ("ipython", "plain")],
    ("HEALTHY-13",): [("slow_store", "plain"), ("store_behind_a_slow_network", "plain")],
}


def marks(requirements: tuple[str, ...], program: str) -> list[Any]:
    return [pytest.mark.spec(*requirements), *[pytest.mark.needs("IPython")] * (program == "ipython")]


PARAMS = [
    pytest.param(program, launcher, marks=marks(requirements, program))
    for requirements, programs in PROGRAMS.items()
    for program, launcher in programs
]


@pytest.fixture(scope="module")
def problems(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Future[str]]]:
    """The problems of all selected programs, in their order."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    chosen = [(item.callspec.params["program"], item.callspec.params["launcher"]) for item in items]
    with ThreadPoolExecutor(3) as threads:
        futures = {launch: threads.submit(problem, *launch) for launch in chosen}
        yield futures
        for future in futures.values():
            future.cancel()


@pytest.mark.parametrize(("program", "launcher"), PARAMS)
def test_program_ends_without_an_error_of_a_rank(
    program: str, launcher: str, problems: dict[tuple[str, str], Future[str]]
) -> None:
    found = problems[program, launcher].result()
    assert found == ""
