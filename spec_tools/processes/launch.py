"""Starts the ranks of a program in their own processes, and reports how each has ended.

* ``plain``: without a launcher. The environment variables are set, and rank 0 hosts the store.
* ``torchrun``: by ``torch.distributed.run``, whose agent hosts the store. ``restarts`` allows it to restart the job.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_tests.healthy.quiet import accusations
from spec_tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 150.0  # seconds for a program
SECOND_RUN = "--- second run ---"  # a line on stderr
AT_ONCE = 1.5  # seconds that a process may sleep between the end of its program and its exit


@dataclass(frozen=True)
class Launch:
    """A program, an API (or ``both``), a launcher and the number of processes that it starts."""

    program: str
    api: str
    launcher: str = "plain"
    num_ranks: int = 2

    def __str__(self) -> str:
        return f"{self.program}-{self.api}-{self.launcher}"


def problem(launch: Launch) -> str:
    """Describes what is wrong with the end of a program. Empty if nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "spec_tools.processes", launch.program, launch.api]
        if launch.launcher == "plain":
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": launch.num_ranks}
            ranks = [started(command, folder, **place, RANK=rank, LOCAL_RANK=rank) for rank in range(launch.num_ranks)]
            num_right = 1 if launch.program in ("hash_store", "spawned") else launch.num_ranks
        else:
            options = ["--standalone", f"--nproc-per-node={launch.num_ranks}"]
            options += ["--max-restarts=1", "--monitor-interval=0.1"] if launch.launcher == "restarts" else []
            ranks = [started([*command[:2], "torch.distributed.run", *options, "-m", *command[2:]], folder)]
            num_right = launch.num_ranks
        results = [finished(rank) for rank in ranks]
        # With `fully_shard`, torch leaves the file of its mesh.
        is_file_store = (launch.program, launch.api) == ("file_store", "wrapper")
        left = [path.name for path in Path(folder).iterdir() if is_file_store]
    found = [f"a file is left: {left}"] if left else []
    for rank, (status, output, errors) in enumerate(results):
        if status != 0:
            found.append(f"process {rank} has ended with {status}:\n{errors[-3000:]}")
        elif accusations(after_the_last_restart(errors, launch)):
            found.append(f"process {rank} says:\n{errors[-3000:]}")
        for seconds in re.findall(r"slept ([\d.]+) s", output):
            if float(seconds) > AT_ONCE:
                found.append(f"process {rank} has slept for {seconds} s at its end")
    seen = sum(output.count("right") for _, output, *_ in results)
    if not found and seen < num_right:
        found.append(f"{seen} of {num_right} ranks are right")
    return "\n".join(found)


def after_the_last_restart(errors: str, launch: Launch) -> str:
    """The part of stderr that must report no error. A restarted program fails once, and marks its second run."""
    if launch.launcher != "restarts":
        return errors
    _, found, rest = errors.rpartition(SECOND_RUN)
    return rest if found else ""


def started(command: list[str], folder: str, **place: object) -> Any:
    reported = {**os.environ, **{name: str(value) for name, value in place.items()}}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    reported |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HEALTHY_FOLDER": folder, "GLOO_SOCKET_IFNAME": "lo"}
    reported |= {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.Popen(
        command,
        env=reported,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(process: Any) -> tuple[int | None, str, str]:
    """Status, stdout and stderr. The status is ``None`` if the process was killed at the limit."""
    try:
        output, errors = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        # The process has its own session, so this also kills its children.
        os.killpg(process.pid, signal.SIGKILL)
        return None, *process.communicate()
    return process.returncode, output, errors
