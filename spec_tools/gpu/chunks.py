"""A chunk: a command in a process of its own, with a time limit. The kit also ends all processes that it started.

A chunk ends in one of four ways:

* ``passed``: status 0;
* ``failed``: another status; its output contains the reason;
* ``crashed``: ended by a signal, for example after a fault inside CUDA or if memory is exhausted;
* ``hung``: the limit passed. The kit stops the chunk, its processes write the stacks of all threads, and are killed.

Processes of a chunk are identified by an environment variable, which children inherit. A process group does not work:
``torchrun`` starts its workers in sessions of their own, and a worker that stays alive keeps its memory on the GPU.

Example: two ranks wait for each other::

    all          py-spy and PyTorch's flight recorder write files, see ``evidence.py``
    pytest       is stopped first, so that it does not start the next test when its ranks die
    rank 0, 1    SIGABRT: the fault handler writes all stacks into the rank's output, which is copied into the log
    pytest       SIGABRT and SIGCONT: its own stacks go into the log
    all          SIGKILL

The kit runs only on Linux, like NCCL, because it looks up processes in ``/proc``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from spec_tests.waiting import comes_true
from spec_tools.gpu import evidence, names
from spec_tools.gpu.names import ROOT

__all__ = [
    "FINDINGS_FILE", "ROOT", "Chunk", "Outcome", "end_leftovers", "examined_before", "first_error", "processes_of",
    "read_findings", "run_chunk",
]  # fmt: skip

MARK = "MINIFSDP_KIT"  # environment variable: the folder of the run that a process belongs to
FINDINGS = "MINIFSDP_KIT_FINDINGS"  # environment variable: the file for findings, a line of JSON each
FINDINGS_FILE = "findings.jsonl"  # in the folder of a chunk
PATIENCE = 5.0  # seconds that processes have to write their stacks
LAST_LINES = 60


@dataclass(frozen=True)
class Chunk:
    """A command and its limit in seconds; the name is also its path below the folder of the run.

    ``estimate`` is the expected duration in seconds; 0 if there is no estimate.
    """

    name: str
    command: list[str]
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    estimate: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The end of a chunk.

    Attributes:
        word: ``passed``, ``failed``, ``crashed`` or ``hung``.
        seconds: duration.
        reason: one line; empty if it passed.
        last_lines: the end of its log; empty if it passed.
        findings: the findings that it wrote, in their order.
        files: files with stacks and logs of collectives, relative to the folder of the chunk; see ``evidence.py``.
        advice: what the failure proves, and the next commands, see ``advice.py``; empty if it passed.
    """

    word: str
    seconds: float
    reason: str = ""
    last_lines: str = ""
    findings: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    advice: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


def run_chunk(
    chunk: Chunk, folder: Path, tell: Callable[[str], None] = lambda line: None, *, with_names: bool = False
) -> Outcome:
    """Runs a chunk. Ctrl-C ends the chunk, and this function then raises it.

    Args:
        chunk: what to run.
        folder: the folder of the run.
        tell: called for each line of text in the findings, as soon as the chunk has written it.
        with_names: whether the outcome may contain names of users, hosts and folders.
    """
    home = folder / chunk.name
    shutil.rmtree(home, ignore_errors=True)
    (home / evidence.RECORDER).mkdir(parents=True)
    log, findings = home / "log.txt", Findings(home / FINDINGS_FILE)
    # A short path, because the path of a socket has at most 107 characters.
    scratch = Path(tempfile.mkdtemp(prefix="kit-"))
    environment = {**os.environ, MARK: str(folder), FINDINGS: str(findings.path), "TMPDIR": str(scratch)}
    environment |= {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **chunk.environment}
    environment |= evidence.variables(home, scratch, environment)
    begin = time.monotonic()

    def has_ended() -> bool:
        findings.tell_new_lines(tell)
        return leader.poll() is not None

    try:
        with log.open("wb") as file:
            # In a session of its own, so that only the kit receives Ctrl-C.
            leader = subprocess.Popen(
                chunk.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        hung = not comes_true(has_ended, chunk.limit)
        if hung:
            evidence.collect(home, scratch, processes_of(folder))
            _write_down_stacks(leader, folder, scratch, log)
    finally:
        end_leftovers(folder)
        evidence.keep_ledgers(home, scratch)
        shutil.rmtree(scratch, ignore_errors=True)
    leader.wait()
    findings.tell_new_lines(tell)
    clean = str if with_names else names.clean
    outcome = _outcome(leader.returncode, hung, time.monotonic() - begin, chunk, log, findings.path, clean)
    return outcome if outcome.word == "passed" else replace(outcome, files=evidence.files(home))


class Findings:
    """The findings of a chunk while it runs: a line of JSON each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def tell_new_lines(self, tell: Callable[[str], None]) -> None:
        """Calls ``tell`` for each line of text in findings that are new since the last call."""
        if not self.path.exists() or self.path.stat().st_size == self._position:
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._position += len(complete)
        for finding in complete.splitlines():
            for line in json.loads(finding).get("lines", ()):
                tell(line)


def end_leftovers(folder: Path) -> None:
    """Kills the remaining processes of this run's chunks, including those of an earlier kit process that was killed."""
    for _ in range(10):  # repeated, because a process may have started another one meanwhile
        left = processes_of(folder)
        for process in left:
            _signal(process, signal.SIGKILL)
        if not left:
            return
        comes_true(lambda: not processes_of(folder), PATIENCE)


def processes_of(folder: Path) -> list[int]:
    """The running processes whose environment has the mark of this run."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def examined_before(limit: float) -> AbstractContextManager[None]:
    """In a process of a chunk: if the block still runs shortly before this limit, evidence about it is collected."""
    if MARK not in os.environ:
        return nullcontext()
    home, folder = Path(os.environ[FINDINGS]).parent, Path(os.environ[MARK])
    return evidence.collected_before(limit, home, Path(tempfile.gettempdir()), lambda: processes_of(folder))


def _write_down_stacks(leader: subprocess.Popen[bytes], folder: Path, scratch: Path, log: Path) -> None:
    leader.send_signal(signal.SIGSTOP)
    others = [process for process in processes_of(folder) if process != leader.pid]
    for process in others:
        _signal(process, signal.SIGABRT)
    comes_true(lambda: not set(others) & set(processes_of(folder)), PATIENCE)
    with log.open("a") as file:
        file.write("\n--- the limit has passed; where every thread was ---\n")
        # The pool writes the output of each rank to a file with this name.
        for output in sorted(scratch.glob("ranks-*/output-*")):
            file.write(f"--- {output.parent.name}, {output.name} ---\n{output.read_text(errors='replace')}\n")
    leader.send_signal(signal.SIGABRT)
    leader.send_signal(signal.SIGCONT)
    comes_true(lambda: leader.poll() is not None, PATIENCE)


def _signal(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


# ---- outcome --------------------------------------------------------------------------------------------------------


def _outcome(
    status: int,
    hung: bool,
    seconds: float,
    chunk: Chunk,
    log: Path,
    findings: Path,
    clean: Callable[[str], str] = names.clean,
) -> Outcome:
    found = read_findings(findings, clean)
    seconds = round(seconds, 1)
    if status == 0 and not hung:
        return Outcome("passed", seconds, findings=found)
    text = clean(log.read_text(errors="replace"))
    running = f"; it was in {found[-1]['started']}" if found and "started" in found[-1] else ""
    if hung:
        word, reason = "hung", f"did not end within {chunk.limit:g} s{running}"
    elif status < 0:
        word, reason = "crashed", f"ended by {signal.Signals(-status).name}{running}"
    else:
        word, reason = "failed", first_error(text)
    return Outcome(word, seconds, reason, "\n".join(text.splitlines()[-LAST_LINES:]), found)


def read_findings(findings: Path, clean: Callable[[str], str] = names.clean) -> list[dict[str, Any]]:
    """The findings, without names, and without a last line that a crash has truncated."""
    found = []
    for line in findings.read_text().splitlines() if findings.exists() else []:
        with suppress(json.JSONDecodeError):
            found.append(json.loads(clean(line)))
    return found


def first_error(text: str) -> str:
    """The line with the exception: pytest marks it with an E, and a Python traceback ends with it.

    The pool of ranks has lines of its own for ranks that hang or die. They come first, because the other ranks can
    raise an exception as a result.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(("hang: ", "the process died: "))]
    named += [line[1:].strip() for line in lines if line.startswith("E  ")]
    return (named or lines[-1:] or ["it has written nothing"])[0]
