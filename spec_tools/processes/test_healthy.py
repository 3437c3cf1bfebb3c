"""Healthy programs that need their own processes.

They mostly wait, so several run at once: the first test starts all selected programs. The launcher of a program is

* ``plain``: none. The environment variables are set, and rank 0 hosts the store;
* ``torchrun``, whose agent hosts the store, or ``restarts``, which allows torchrun to restart the job.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spec_tests.healthy.quiet import accusations
from spec_tests.ports import free_port
from spec_tools.processes.healthy import SECOND_RUN
from spec_tools.processes.ranks import ROOT

pytestmark = [pytest.mark.cpu, pytest.mark.pure]
# The programs and launchers that prove each requirement.
PROGRAMS = {
    ("HEALTHY-06",): [
        ("destroyed_and_made_again", "plain"),
        ("destroyed_and_made_again", "torchrun"),
        ("destroyed_on_one_rank_first", "torchrun"),
        ("ten_groups", "plain"),
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
    ],
    ("HEALTHY-09",): [
        ("data_workers", "plain"),
        ("fork_that_fails_between_steps", "plain"),
    ],
    ("HEALTHY-10",): [
        ("rank_1_ends_later", "plain"),
        ("rank_1_ends_early", "plain"),
        ("rank_1_ends_early", "torchrun"),
    ],
    ("HEALTHY-12",): [("console", "plain"), ("ipython", "plain")],
    ("HEALTHY-13",): [("slow_store", "plain")],
}


def marks(requirements: tuple[str, ...], program: str) -> list[Any]:
    return [pytest.mark.spec(*requirements), *[pytest.mark.needs("IPython")] * (program == "ipython")]


PARAMS = [
    pytest.param(program, launcher, marks=marks(requirements, program))
    for requirements, programs in PROGRAMS.items()
    for program, launcher in programs
]


LIMIT = 150.0  # seconds for a program
AT_ONCE = 1.5  # seconds that a process may sleep between the end of its program and its exit
NUM_RANKS = {"host_of_the_store_leaves": 3, "spawned": 1, "groups_made_by_the_package": 4}


def problem_of(program: str, launcher: str) -> str:
    """Describes what is wrong with the end of a program. Empty if nothing is."""
    num_ranks, module = NUM_RANKS.get(program, 2), ["-m", "spec_tools.processes.healthy", program]
    with tempfile.TemporaryDirectory() as folder:
        if launcher == "plain":
            job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": num_ranks}
            ranks = [started(module, folder, **job, RANK=rank, LOCAL_RANK=rank) for rank in range(num_ranks)]
        else:
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
            launch += ["--max-restarts=1", "--monitor-interval=0.1"] if launcher == "restarts" else []
            ranks = [started([*launch, *module], folder)]
        results = [finished(rank) for rank in ranks]
        found = [f"a file is left: {path.name}" for path in Path(folder).glob("wrapper-*")]
    for rank, (status, output, errors) in enumerate(results):
        # A restarted program fails once, and marks its second run.
        after_restart = errors.rpartition(SECOND_RUN)[2]
        if status != 0 or accusations(after_restart):
            found.append(f"process {rank} has ended with {status}:\n{errors[-3000:]}")
        for seconds in re.findall(r"slept ([\d.]+) s", output):
            if float(seconds) > AT_ONCE:
                found.append(f"process {rank} has slept for {seconds} s at its end")
    num_right = sum(output.count("right") for _, output, _ in results)
    if num_right < num_ranks:
        found.append(f"{num_right} of {num_ranks} ranks are right")
    return "\n".join(found)


def started(command: list[str], folder: str, **place: object) -> subprocess.Popen[str]:
    settings = {"OMP_NUM_THREADS": 1, "HEALTHY_FOLDER": folder, "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings |= {"PYTHONPATH": path, "TORCH_CPP_LOG_LEVEL": "ERROR", **place}
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **{name: str(value) for name, value in settings.items()}},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str]) -> tuple[int | None, str, str]:
    """Status, stdout and stderr. The status is ``None`` if the process was killed at the limit."""
    try:
        output, errors = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        # The process has its own session, so this also kills its children.
        os.killpg(process.pid, signal.SIGKILL)
        return None, *process.communicate()
    return process.returncode, output, errors


@pytest.fixture(scope="module")
def problems(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Future[str]]]:
    """The problems of all selected programs, in their order."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    chosen = [(item.callspec.params["program"], item.callspec.params["launcher"]) for item in items]
    with ThreadPoolExecutor(3) as threads:
        futures = {launch: threads.submit(problem_of, *launch) for launch in chosen}
        yield futures
        for future in futures.values():
            future.cancel()


@pytest.mark.parametrize(("program", "launcher"), PARAMS)
def test_program_ends_without_an_error_of_a_rank(
    program: str, launcher: str, problems: dict[tuple[str, str], Future[str]]
) -> None:
    found = problems[program, launcher].result()
    assert found == ""
