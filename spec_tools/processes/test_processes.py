"""Healthy programs that need their own processes.

They mostly wait, so several run at once: the first test starts all selected programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from spec_tools.processes.launch import Launch, problem

pytestmark = [pytest.mark.cpu, pytest.mark.pure]
APIS = ("wrapper", "fully_shard")
BOTH = {
    "HEALTHY-06": [
        ("destroyed_and_made_again", "plain"),
        ("destroyed_and_made_again", "torchrun"),
        ("two_models_in_turn_with_a_store_each", "plain"),
        ("file_store", "plain"),
        ("ten_groups", "plain"),
        ("groups_made_by_the_package", "plain"),
        ("ten_new_groups", "plain"),
    ],
    "LEDGER-19": [("process_as_before", "plain")],
    "HEALTHY-07": [
        ("late_at_every_place", "plain"),
        ("prefix_store", "plain"),
        ("host_of_the_store_leaves", "plain"),
        ("no_temporary_folder", "plain"),
        ("started_again", "restarts"),
        ("spawned", "plain"),
    ],
    "HEALTHY-08": [("sigterm_handler_set_later", "plain"), ("asyncio_around_training", "plain")],
    "HEALTHY-09": [("data_loader", "plain")],
    "HEALTHY-10": [("rank_1_ends_later", "plain")],
}
# The behaviour of these does not depend on the API.
ONE = {
    "HEALTHY-06": [("destroyed_on_one_rank_first", "torchrun")],
    "HEALTHY-07": [("hash_store", "plain")],
    "HEALTHY-08": [
        ("sigterm_handler_set_before", "torchrun"),
        ("wakeup_descriptor", "plain"),
        ("own_excepthook", "plain"),
        ("exit_handlers", "plain"),
        ("exit_handlers_without_destroying", "plain"),
    ],
    "HEALTHY-09": [("fork_that_ends_as_programs_do", "plain"), ("fork_that_fails_between_steps", "plain")],
    "HEALTHY-10": [("rank_0_ends_later", "plain"), ("rank_1_ends_early", "plain"), ("rank_1_ends_early", "torchrun")],
}
# These train with both APIs in one process.
TOGETHER = {
    "HEALTHY-06": [("hash_store_and_file_store", "plain")],
    "HEALTHY-07": [("spawned_with_results", "plain")],
    "HEALTHY-08": [("two_event_loops", "plain")],
    "HEALTHY-09": [("workers_by_spawn_around_training", "plain")],
    "HEALTHY-11": [("one_rank_raises_once", "restarts")],
    "HEALTHY-12": [("console", "plain"), ("ipython", "plain")],
    "HEALTHY-13": [("slow_store", "plain"), ("store_behind_a_slow_network", "plain")],
}
NUM_PROCESSES = {"host_of_the_store_leaves": 3, "spawned_with_results": 1, "groups_made_by_the_package": 4}


def params(table: dict[str, list[tuple[str, str]]], *api: str) -> list[Any]:
    """A parameter for each program and launcher: its name, its launcher, and the API if one is given."""
    return [
        pytest.param(
            *(program, launcher, *api),
            marks=[pytest.mark.spec(requirement), *([pytest.mark.needs("IPython")] if program == "ipython" else [])],
        )
        for requirement, programs in table.items()
        for program, launcher in programs
    ]


def launch_of(program: str, launcher: str, api: str) -> Launch:
    return Launch(program, api, launcher, NUM_PROCESSES.get(program, 2))


@pytest.fixture(scope="module")
def problems(request: pytest.FixtureRequest) -> Iterator[dict[Launch, Future[str]]]:
    """The problems of all selected launches, in their order."""
    items = [item for item in request.session.items if item.path == request.path]
    chosen = [launch_of(**item.callspec.params) for item in items]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(3) as threads:
        futures = {launch: threads.submit(problem, launch) for launch in chosen}
        yield futures
        for future in futures.values():
            future.cancel()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("program", "launcher"), params(BOTH))
def test_programs_with_each_api_run_without_errors(
    program: str, launcher: str, api: str, problems: dict[Launch, Future[str]]
) -> None:
    assert problems[launch_of(program, launcher, api)].result() == ""


@pytest.mark.parametrize(("program", "launcher", "api"), [*params(ONE, "fully_shard"), *params(TOGETHER, "both")])
def test_programs_with_one_api_or_both_run_without_errors(
    program: str, launcher: str, api: str, problems: dict[Launch, Future[str]]
) -> None:
    assert problems[launch_of(program, launcher, api)].result() == ""
