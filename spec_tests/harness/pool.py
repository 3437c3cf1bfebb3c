"""The pool of ranks: worker processes that live for the whole test session.

Starting a process and importing torch takes seconds, but a test takes milliseconds. So there is one pool for each world
size that a test needs. A pool starts when it is first needed, and receives tests by name. ``worker.py`` runs them. A
fork server imports torch once, and each rank is forked from it.

Failures:

* A rank raises: the test fails with its traceback. The other ranks may wait for it in a collective. They get a grace
  period, then the pool is closed, and the next test starts a new one.
* Ranks hang: after the limit, a signal makes each rank write the stacks of all its threads, and the test fails with the
  stacks of all ranks.
* A rank dies: the test fails with the signal that killed it and with its last output.
* All pass, but one rank has issued more collectives than another: the test fails, because the next one would hang.
* The session ends: a rank that detects this ends, too.

Measured (``spec_tools/tests/test_pool.py``, 2 cores shared with other programs): an empty test on 2 ranks takes
1.4 ms, one with an all-reduce on 4 ranks 6 ms. A pool starts in 0.15 s once the fork server runs. The server itself
starts once, in 2 to 5 s.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing as mp
import multiprocessing.connection
import os
import pathlib
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Mapping
from multiprocessing import forkserver
from typing import Any

import torch

from spec_tests.harness import simulated, worker
from spec_tests.harness.worker import Answer, Seat, Task, serve
from spec_tests.ports import free_port

__all__ = [
    "Failure",
    "RankPool",
    "close_all",
    "fork_server",
    "run",
    "start_early",
    "use_device",
    "use_filters",
    "use_limit",
]

GRACE = 3.0  # seconds for the other ranks to end after a rank has failed
START_LIMIT = 120.0  # seconds until a new rank must have its default group

_device_kind = "cpu"
_filters: tuple[str, ...] = ()
_longest: float | None = None
_pools: dict[tuple[int, bool], RankPool] = {}


class Failure(AssertionError):
    """A test's body failed on some rank. The message contains that rank's traceback."""


def use_device(kind: str) -> None:
    """Sets the device of the ranks for the session: ``"cpu"``, ``"cuda"`` or ``"simulated"``."""
    global _device_kind
    _device_kind = kind
    # For tests without ranks, which run in this process.
    worker.device_here = torch.device("cuda:0" if kind == "cuda" else "cpu")
    if kind == "simulated":
        worker.device_here = simulated.install()


def use_limit(seconds: float | None) -> None:
    """Sets the longest time of a test for the session, also for tests that allow more. None: their own limits."""
    global _longest
    _longest = seconds


def use_filters(filters: Iterable[str]) -> None:
    """Sets the warning filters for the next tests, in pytest's syntax. Later filters take precedence."""
    global _filters
    _filters = tuple(filters)


def start_early() -> None:
    """Starts the import of torch in the fork server while this process continues."""
    fork_server()
    forkserver.ensure_running()


def run(
    num_ranks: int, module: str, name: str, arguments: Mapping[str, Any], limit: float, *, is_alone: bool = False
) -> None:
    """Runs one test's body on the pool of ``num_ranks``, or with ``is_alone`` in a single process with fake peers.

    Raises:
        Failure: a rank raised, died or hung, or the ranks issued different numbers of collectives.
        TypeError: an argument cannot be sent to another process.
    """
    task = Task(module, name, _pickled(arguments), min(limit, _longest or limit), _filters)
    key = (num_ranks, is_alone)
    if key not in _pools:
        _pools[key] = RankPool(num_ranks, _device_kind, is_alone=is_alone)
    pool = _pools[key]
    reusable = False
    try:
        reusable = pool.run(task)
    finally:
        if not reusable:
            # After a failure, the other ranks can still be waiting in a collective.
            _pools.pop(key).close()


def close_all() -> None:
    """Closes all pools."""
    while _pools:
        _pools.popitem()[1].close()


atexit.register(close_all)


class RankPool:
    """``num_ranks`` processes with a default process group, or one process in a group of that size."""

    def __init__(self, num_ranks: int, kind: str = "cpu", *, is_alone: bool = False) -> None:
        self.num_ranks = 1 if is_alone else num_ranks
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="ranks-"))
        port = free_port()
        self.seats = [
            Seat(rank, num_ranks, kind, self.folder, port, is_alone=is_alone) for rank in range(self.num_ranks)
        ]
        self.pipes: list[multiprocessing.connection.Connection] = []
        self.processes: list[mp.process.BaseProcess] = []
        try:
            self._start(fork_server())
        except BaseException:
            self.close()
            raise

    def _start(self, context: Any) -> None:
        for seat in self.seats:
            mine, its = context.Pipe()
            process = context.Process(target=serve, args=(seat, its), daemon=True, name=f"rank{seat.rank}")
            process.start()
            # Close this copy, or the pipe stays open after the rank has died.
            its.close()
            self.pipes.append(mine)
            self.processes.append(process)
        answers = self._collect(START_LIMIT)
        if len(answers) < self.num_ranks or any(answer.failure for answer in answers.values()):
            raise Failure(f"a pool of {self.num_ranks} ranks did not start\n{self._report(answers, START_LIMIT)}")

    def run(self, task: Task) -> bool:
        """Sends the test to every rank and waits for all answers.

        Returns:
            Whether the pool can run another test.

        Raises:
            Failure: see `run` of this module. The pool cannot be used afterwards.
        """
        for seat, pipe in zip(self.seats, self.pipes, strict=True):
            os.truncate(seat.output, 0)
            with contextlib.suppress(OSError):  # the rank has died since its last test; `_collect` detects it
                pipe.send(task)
        answers = self._collect(task.limit)
        try:
            if len(answers) < self.num_ranks or any(answer.failure for answer in answers.values()):
                raise Failure(self._report(answers, task.limit))
            seen = {rank: answer.num_collectives for rank, answer in sorted(answers.items())}
            if len(set(seen.values())) > 1:
                raise Failure(f"out of step: number of collectives on the default group, by rank: {seen}")
        finally:
            self._print_output()
        return all(answer.reusable for answer in answers.values())

    def _collect(self, limit: float) -> dict[int, Answer]:
        """The answers by rank. Answers that do not arrive in time are missing."""
        waiting = dict(enumerate(self.pipes))
        answers: dict[int, Answer] = {}
        deadline = time.monotonic() + limit
        while waiting:
            ready = mp.connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                answers[rank] = self._answer(rank, waiting.pop(rank))
                if answers[rank].failure is not None:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers

    def _answer(self, rank: int, pipe: multiprocessing.connection.Connection) -> Answer:
        try:
            answer: Answer = pipe.recv()
        except (EOFError, OSError):
            process = self.processes[rank]
            process.join(1)
            return Answer(f"the process died: {_reason(process.exitcode)}")
        return answer

    def _report(self, answers: Mapping[int, Answer], limit: float) -> str:
        """A report of all ranks: first the errors of the failed ranks, then the stacks of those that did not answer."""
        silent = [rank for rank in range(self.num_ranks) if rank not in answers]
        failures = {rank: answer.failure for rank, answer in sorted(answers.items()) if answer.failure}
        lines = [f"--- rank {rank} ---\n{text}" for rank, text in failures.items()]
        if silent and not failures:
            lines.append(f"hang: no answer from ranks {silent} after {limit:g} s")
        stacks = self._stacks() if silent else {}
        for rank in range(self.num_ranks) if silent and not failures else silent:
            word = "did not answer" if rank in silent else "has finished its body"
            lines.append(f"--- rank {rank} {word}; its stacks ---\n{stacks[rank]}")
        return "\n".join(lines)

    def _stacks(self) -> dict[int, str]:
        """The stacks of all threads of every rank, by rank."""
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        # A process handles the signal at once, but it may have to wait for a core.
        deadline = time.monotonic() + 2
        texts: dict[int, str] = {}
        while time.monotonic() < deadline:
            time.sleep(0.2)
            before, texts = texts, {seat.rank: seat.stacks.read_text() for seat in self.seats}
            if before == texts and all(texts.values()):
                break
        return texts

    def _print_output(self) -> None:
        """Prints the output of the ranks. pytest captures it, and shows it with a failure or under ``-s``."""
        for seat in self.seats:
            text = seat.output.read_text(errors="replace")
            if text:
                print(f"--- output of rank {seat.rank} ---\n{text[-100_000:]}")

    def close(self) -> None:
        """Kills the processes. A rank holds nothing that must be saved."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def fork_server() -> Any:
    """A multiprocessing context that forks from a process that has imported torch and no module of the package.

    The server does not use a device, so its forks can: CUDA is initialized in each rank.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["spec_tests.harness.worker"])
    return context


def _pickled(arguments: Mapping[str, Any]) -> bytes:
    try:
        return pickle.dumps(dict(arguments))
    except Exception as error:
        raise TypeError(
            f"the arguments {sorted(arguments)} of a test on ranks are pickled, and one of them cannot be: {error}. "
            "Pass a name and look it up in the body, or define it at the top of the module; fixtures that reach into "
            "the pytest process (monkeypatch, capsys) do not work there, pytest.MonkeyPatch.context() in the body does."
        ) from error


def _reason(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return signal.Signals(-exitcode).name
    return f"exit code {exitcode}"
