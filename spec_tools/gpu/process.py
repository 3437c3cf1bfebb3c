"""A job: a command in a process of its own, with a time limit. All processes that it has started end with it.

A job ends in one of five ways:

* ``passed``: status 0;
* ``failed``: another status; its output contains the reason;
* ``crashed``: ended by a signal, for example after a fault inside CUDA or if memory is exhausted;
* ``hung``: its limit passed. Its processes write the stacks of all threads, and are killed;
* ``stopped``: by Ctrl-C, or because the time of the whole run was over. It runs again next time.

Processes of a job are identified by an environment variable, which children inherit. A process group does not work:
``torchrun`` starts its workers in sessions of their own, and a worker that stays alive keeps its memory on the GPU.

The command runs only on Linux, like NCCL, because it looks up processes in ``/proc``.
"""

from __future__ import annotations

import getpass
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_tests.waiting import comes_true

ROOT = Path(__file__).resolve().parents[2]
MARK = "MINIFSDP_GPU_RUN"  # environment variable: the folder of the run that a process belongs to
FINDINGS = "MINIFSDP_GPU_FINDINGS"  # environment variable: the file for findings, a line of JSON each
OF_TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
PATIENCE = 5.0  # seconds that processes have to write their stacks
LAST_LINES = 60


@dataclass(frozen=True)
class Job:
    """A command and its limit in seconds. The name is ``STAGE/...``, and the path below the folder of the run."""

    name: str
    command: list[str]
    limit: float

    @property
    def stage(self) -> str:
        """The name of its stage."""
        return self.name.split("/")[0]


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        word: ``passed``, ``failed``, ``crashed``, ``hung`` or ``stopped``.
        seconds: duration.
        reason: one line; empty if it passed.
        last_lines: the end of its output; empty if it passed.
        findings: what it found, also before a crash.
    """

    word: str
    seconds: float
    reason: str = ""
    last_lines: str = ""
    findings: list[dict[str, Any]] = field(default_factory=list)


def run_job(job: Job, folder: Path, seconds_left: float = math.inf) -> Outcome:
    """Runs a job in a folder of the run. ``seconds_left`` is the time that is left for the whole run."""
    home = folder / job.name
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN}
    environment |= {MARK: str(folder), FINDINGS: str(home / "findings.jsonl")}
    environment |= {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    word = ""
    with (home / "log.txt").open("wb") as log:
        # In a session of its own, so that only the command receives Ctrl-C.
        process = subprocess.Popen(
            job.command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(min(job.limit, seconds_left))
        except subprocess.TimeoutExpired:
            word = "hung" if job.limit <= seconds_left else "stopped"
            _signal_all(folder, signal.SIGABRT)  # the fault handler of Python writes the stacks
            comes_true(lambda: process.poll() is not None, PATIENCE)
        except KeyboardInterrupt:
            word = "stopped"
        finally:
            end_processes(folder)
    return _outcome(job, home, word, process.wait(), round(time.monotonic() - begin, 1))


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


# ---- outcome --------------------------------------------------------------------------------------------------------


def _outcome(job: Job, home: Path, word: str, status: int, seconds: float) -> Outcome:
    found = []
    path = home / "findings.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):  # a crash can truncate the last line
            found.append(json.loads(_clean(line)))
    if status == 0 and not word:
        return Outcome("passed", seconds, findings=found)
    text = _clean((home / "log.txt").read_text(errors="replace"))
    test = f"; it was in {found[-1]['started']}" if found and "started" in found[-1] else ""
    if word == "hung":
        reason = f"did not end within {job.limit:g} s{test}"
    elif word == "stopped":
        reason = f"the run ended first{test}"
    elif status < 0:
        word, reason = "crashed", f"ended by {signal.Signals(-status).name}{test}"
    else:
        word, reason = "failed", first_error(text)
    return Outcome(word, seconds, reason, "\n".join(text.splitlines()[-LAST_LINES:]), found)


def first_error(text: str) -> str:
    """The line with the exception: pytest marks it with an E, and a Python traceback ends with it.

    The pool of ranks has lines of its own for ranks that hang or die. They come first, because the other ranks can
    raise an exception as a result.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(("hang: ", "the process died: "))]
    marked = [line[1:].strip() for line in lines if line.startswith("E  ")]
    return (named + marked + lines[-1:] + ["it has written nothing"])[0]


def _clean(text: str) -> str:
    """The text without names of this user and host, because reports are public."""
    words = {str(ROOT): ".", sys.prefix: "<python>", str(Path.home()): "~", socket.gethostname(): "<host>"}
    with suppress(KeyError, OSError):  # the user has no name, for example in a container
        words[getpass.getuser()] = "<user>"
    for name, word in words.items():
        if len(name) > 2 and name != "root":
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", word, text)
    return text
