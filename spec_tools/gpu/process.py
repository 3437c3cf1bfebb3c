"""A process of the run, with its time limit. All processes that it has started end with it.

A process ends in one of six ways:

* ``ended``: by itself, with what the journal says;
* ``failed``: with an error outside the tests, for example because a test file cannot be imported;
* ``crashed``: by a signal, for example after a fault inside CUDA or if memory is exhausted;
* ``hung``: the journal had no new line for longer than the limit. Its processes write the stacks of all threads, and
  are killed;
* ``stopped``: the time was over;
* ``interrupted``: by Ctrl-C or SIGTERM.

The test that was running gets this word as its outcome, with the last lines of the output. After the last two, it
runs again.
The next process continues with what comes after it: after an illegal memory access, a process cannot use the GPU any
more.

Processes of a run are identified by an environment variable, which children inherit. A process group does not work:
``torchrun`` starts its workers in sessions of their own, and a worker that stays alive keeps its memory on the GPU.

The command runs only on Linux, like NCCL, because it looks up processes in ``/proc``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from spec_tests.waiting import comes_true
from spec_tools.gpu import journal
from spec_tools.gpu.code import ROOT
from spec_tools.gpu.report import write

MARK = "MINIFSDP_GPU_RUN"  # environment variable: the folder of the run that a process belongs to
OF_TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
# For sums in a fixed order inside cuBLAS, and for a reason in the log if NCCL fails.
SETTINGS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_DEBUG": "WARN"}
PATIENCE = 5.0  # seconds that processes have to write their stacks
PAUSE = 5.0  # seconds between two reports
LAST_LINES = 200  # the stack of a test inside pytest has about 50 lines, and several processes may write theirs


def run_process(command: Sequence[str], folder: Path, limit: float, until: float, report: Path) -> str:
    """Runs a process of the run; returns how it ended.

    Args:
        command: its command.
        folder: the folder of the run, for its output.
        limit: the most seconds between two lines of the journal.
        until: the moment of its end.
        report: the report, which is written again and again meanwhile.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN}
    environment |= {**SETTINGS, MARK: str(folder), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    environment["OMP_NUM_THREADS"] = "1"
    with (folder / "log.txt").open("wb") as log:
        # In a session of its own, so that only the command receives Ctrl-C.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            word = _watch(process, limit, until, report)
            if word:
                _signal_all(folder, signal.SIGABRT)  # the fault handler of Python writes the stacks
                comes_true(lambda: process.poll() is not None, PATIENCE)
        except KeyboardInterrupt:
            word = "interrupted"
        finally:
            end_processes(folder)
    status = process.wait()
    # Of pytest, 1 means that tests have failed, and 5 that there are none.
    return word or ("crashed" if status < 0 else "ended" if status in (0, 1, 5) else "failed")


def _watch(process: subprocess.Popen[bytes], limit: float, until: float, report: Path) -> str:
    """Waits for the end of a process; returns a word if it must be ended."""
    path = Path(os.environ[journal.JOURNAL])
    size, changed, reported = 0, time.time(), time.time()
    while process.poll() is None:
        time.sleep(0.05)
        now = time.time()
        if path.stat().st_size != size:
            size, changed = path.stat().st_size, now
            if now - reported > PAUSE:
                write(report)
                reported = time.time()
        if now > until:
            return "stopped"
        if now - changed > limit:
            return "hung"
    return ""


def note_end(what: journal.Result, word: str, folder: Path) -> None:
    """Writes into the journal that a process has ended during a task or test, with the last lines of its output."""
    lines = (folder / "log.txt").read_text(errors="replace").splitlines()[-LAST_LINES:]
    facts = {name: value for name, value in what.items() if name != "started"}
    journal.leave({**facts, "outcome": word, "seconds": 0.0, "text": "\n".join(lines)})


def end_processes(folder: Path) -> None:
    """Kills all processes of the run, also those of an earlier command that was killed."""
    # Repeated, because a process may have started another one meanwhile.
    comes_true(lambda: not _signal_all(folder, signal.SIGKILL), PATIENCE)


def _signal_all(folder: Path, number: signal.Signals) -> list[int]:
    found = processes_of(folder)
    for one in found:
        with suppress(ProcessLookupError):
            os.kill(one, number)
    return found


def processes_of(folder: Path) -> list[int]:
    """The running processes whose environment has the mark of this run."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
