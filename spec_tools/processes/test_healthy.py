"""Healthy programs that need their own processes.

They mostly wait, so several run at once: the first test starts all selected programs. The launcher of a program is

* ``plain``: none. The environment variables are set, and rank 0 hosts the store;
* ``forked``: the same, but the ranks are forks of a process that has imported torch. This takes a fraction of the time,
  and does not cover the start and the end of Python;
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
from spec_tools.processes.healthy import PROGRAMS, SECOND_RUN
from spec_tools.processes.ranks import ROOT, start

pytestmark = [pytest.mark.cpu, pytest.mark.pure]
PARAMS = [
    pytest.param(
        *(name, launcher),
        marks=[pytest.mark.spec(*program.requirements), *[pytest.mark.needs("IPython")] * (name == "ipython")],
    )
    for name, program in PROGRAMS.items()
    for launcher in program.launchers
]


# Status, stdout and stderr. The status is ``None`` if the process was killed at the limit.
Result = tuple[int | None, str, str]
LIMIT = 150.0  # seconds for a program
AT_ONCE = 1.5  # seconds that a process may sleep between the end of its program and its exit


def problem_of(program: str, launcher: str) -> str:
    """Describes what is wrong with the end of a program. Empty if nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        results = results_of(program, launcher, Path(folder))
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
    if num_right < PROGRAMS[program].num_ranks:
        found.append(f"only {num_right} ranks are right")
    return "\n".join(found)


def results_of(program: str, launcher: str, folder: Path) -> list[Result]:
    """The result of each process."""
    module, num_ranks = "spec_tools.processes.healthy", PROGRAMS[program].num_ranks
    if launcher == "forked":
        with start(module, program, folder=folder, num_ranks=num_ranks) as forks:
            codes = forks.wait(LIMIT)
        return [(code, forks.output(rank), forks.errors(rank)) for rank, code in enumerate(codes)]
    command = ["-m", module, program]
    if launcher == "plain":
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": num_ranks}
        places = [{**job, "RANK": rank, "LOCAL_RANK": rank} for rank in range(num_ranks)]
    else:
        options = ["--max-restarts=1", "--monitor-interval=0.1"] if launcher == "restarts" else []
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", *options]
        command, places = [*launch, *command], [{}]
    processes = [started(command, folder, **place) for place in places]
    return [finished(process) for process in processes]


def started(command: list[str], folder: Path, **place: object) -> subprocess.Popen[str]:
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


def finished(process: subprocess.Popen[str]) -> Result:
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


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(("program", "launcher"), PARAMS)
def test_program_ends_without_an_error_of_a_rank(
    program: str, launcher: str, problems: dict[tuple[str, str], Future[str]]
) -> None:
    found = problems[program, launcher].result()
    assert found == ""
