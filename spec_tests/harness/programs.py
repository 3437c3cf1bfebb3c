"""Runs a script on several ranks like torchrun, but faster.

``torchrun lesson.py`` imports torch, and each of its ranks imports it again. This takes six seconds on two cores and
tests nothing. Here the ranks are forked from the fork server of the pool, which has imported torch. Each rank gets the
environment variables of torchrun and runs the file as ``__main__``.

A separate test starts one of the lessons with the real torchrun.

``run_module`` does the same for a command ``python -m``. If the command starts ranks of its own, they do not import
torch again either. A fork does not cover the start and the shutdown of Python, because it ends with ``_exit``.
So for each command at least one test starts the real one.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import util
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from spec_tests.harness import pool
from spec_tests.ports import free_port

__all__ = ["outcome_of_ranks", "output_of_ranks", "run_module", "start_module"]

GRACE = 10.0  # seconds for the other ranks to end after one has failed


def output_of_ranks(
    script: Path, *arguments: str, num_ranks: int, environment: Mapping[str, str], limit: float = 600.0
) -> str:
    """The combined output of the ranks of ``script``.

    Args:
        script: runs as ``__main__`` on each rank, with its folder first in ``sys.path``.
        arguments: its command line.
        num_ranks: number of ranks.
        environment: variables in addition to those that torchrun sets.
        limit: seconds, after which the ranks are killed.

    Raises:
        AssertionError: a rank has ended with a status other than 0. The message contains the output of all ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        codes = _run_ranks(script, arguments, [output] * num_ranks, environment, limit, GRACE)
        text = output.read_text()
    assert not any(code is None or code for code in codes), f"{script.name} ended with {codes}:\n{text}"
    return text


def outcome_of_ranks(
    script: Path, *arguments: str, num_ranks: int, environment: Mapping[str, str], limit: float
) -> list[tuple[int | None, str]]:
    """For each rank its exit status (``None`` if it was killed at the limit) and its output. See `output_of_ranks`."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"output-{rank}" for rank in range(num_ranks)]
        codes = _run_ranks(script, arguments, outputs, environment, limit, limit)
        return [(code, output.read_text()) for code, output in zip(codes, outputs, strict=True)]


def _run_ranks(
    script: Path,
    arguments: tuple[str, ...],
    outputs: Sequence[Path],
    environment: Mapping[str, str],
    limit: float,
    grace: float,
) -> list[int | None]:
    """Runs ``len(outputs)`` ranks and returns their exit statuses."""
    context = pool.fork_server()
    port = free_port()
    ranks = []
    for rank, output in enumerate(outputs):
        output.touch()
        place: dict[str, int | str] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": len(outputs),
            "LOCAL_WORLD_SIZE": len(outputs),
        }
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        reported = {**environment, **{name: str(value) for name, value in place.items()}}
        ranks.append(context.Process(target=_run, args=(script, arguments, reported, output)))
    try:
        for process in ranks:
            process.start()
        _wait(ranks, limit, grace)
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()


def _wait(ranks: list[Any], limit: float, grace: float) -> None:
    """Waits until all ranks have ended, or one has failed and the grace period of the others is over."""
    end = time.monotonic() + limit
    running: dict[Any, Any] = {process.sentinel: process for process in ranks}
    while running and time.monotonic() < end:
        for sentinel in wait(list(running), timeout=end - time.monotonic()):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                end = min(end, time.monotonic() + grace)


def _run(script: Path, arguments: tuple[str, ...], reported: Mapping[str, str], output: Path) -> None:
    """Runs on a rank."""
    os.environ.update(reported)
    number = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(number, 1)
    os.dup2(number, 2)
    torch.set_num_threads(1)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


# ---- commands -------------------------------------------------------------------------------------------------------


def run_module(
    module: str, *arguments: str, folder: Path, environment: Mapping[str, str], limit: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """The result of ``python -m module``, as ``subprocess.run`` returns it.

    Args:
        module: runs as ``__main__``.
        arguments: its command line.
        folder: the working directory.
        environment: all variables. Those of the interpreter have no effect here, except ``PYTHONPATH``.
        limit: seconds, after which the process is killed.

    Raises:
        TimeoutError: it has not ended within the limit.
    """
    with tempfile.TemporaryDirectory() as kept:
        process = start_module(module, *arguments, folder=folder, environment=environment, output=Path(kept))
        try:
            process.join(limit)
            if process.exitcode is None:
                raise TimeoutError(f"{module} did not end within {limit:g} s")
        finally:
            process.kill()
            process.join()
        out, err = ((Path(kept) / name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess([module, *arguments], process.exitcode, out, err)


def start_module(module: str, *arguments: str, folder: Path, environment: Mapping[str, str], output: Path) -> Any:
    """Starts ``python -m module`` and returns its process. It writes to ``stdout`` and ``stderr`` in ``output``."""
    for name in ("stdout", "stderr"):
        (output / name).touch()
    target = (module, arguments, folder, dict(environment), output)
    process = pool.fork_server().Process(target=_run_module, args=target)
    process.start()
    return process


def _run_module(
    module: str, arguments: tuple[str, ...], folder: Path, environment: dict[str, str], output: Path
) -> None:
    """Runs in the forked process."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_APPEND), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [str(folder), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    # Before any import of the module: it must be able to start a fork server like any other program.
    with mock.patch.object(util, "spawnv_passfds", _fork_instead):
        pool.start_early()
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _fork_instead(python: bytes, command: Sequence[str], descriptors: Sequence[int]) -> int:
    """Forks this process and runs the code, instead of starting a new interpreter with ``python ... -c code``."""
    process = os.fork()
    if process:
        return process
    # A new interpreter inherits no other descriptors. The server only ends when all copies of one of them are closed.
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    try:
        exec(command[-1], {})
    finally:
        os._exit(0)
