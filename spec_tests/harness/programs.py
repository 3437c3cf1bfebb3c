"""Runs a script on some ranks, as torchrun would, without what torchrun costs.

``torchrun lesson.py`` imports torch, and so does each of the ranks that it starts: on two cores six seconds, of which
nothing is learnt. Here the ranks are copies of a process that has torch already, the fork server of the pool. Each is
told its place in the environment, as torchrun does, and runs the file as ``__main__``.

That the real torchrun starts the lessons as well is a test of its own for one of them.

``run_module`` does the same for a command ``python -m``, and where the command starts ranks of its own, they need no
second import of torch either. What a copy cannot show is how Python starts and how it shuts down: it ends by ``_exit``.
So of each command one test at least starts the real one.
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

__all__ = ["outcome_of_ranks", "output_of_ranks", "run_module", "start_module"]

GRACE = 10.0  # seconds for the others to end, when one has failed


def output_of_ranks(
    script: Path, *arguments: str, num_ranks: int, environment: Mapping[str, str], limit: float = 600.0
) -> str:
    """What the ranks of ``script`` print together.

    Args:
        script: is run as ``__main__`` on each rank, with its folder in front of the places to import from.
        arguments: its command line.
        num_ranks: how many ranks.
        environment: beside what torchrun tells a rank.
        limit: seconds, after which the ranks are ended.

    Raises:
        AssertionError: some rank has not ended with status 0; with what all have printed.
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
    """Of each rank its exit status, ``None`` if it had to be ended, and what it has printed; see `output_of_ranks`."""
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
    """The exit status of each rank, of which there are as many as ``outputs``."""
    context = pool.fork_server()
    port = pool.free_port()
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
        told = {**environment, **{name: str(value) for name, value in place.items()}}
        ranks.append(context.Process(target=_run, args=(script, arguments, told, output)))
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
    """Until all have ended, or one has failed and the others have had time to notice."""
    end = time.monotonic() + limit
    running: dict[Any, Any] = {process.sentinel: process for process in ranks}
    while running and time.monotonic() < end:
        for sentinel in wait(list(running), timeout=end - time.monotonic()):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                end = min(end, time.monotonic() + grace)


def _run(script: Path, arguments: tuple[str, ...], told: Mapping[str, str], output: Path) -> None:
    """On a rank."""
    os.environ.update(told)
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
    """What ``subprocess.run`` says of ``python -m module``.

    Args:
        module: is run as ``__main__``.
        arguments: its command line.
        folder: where it is started.
        environment: all of it. An interpreter's own variables mean nothing here, but for ``PYTHONPATH``.
        limit: seconds, after which it is ended.

    Raises:
        TimeoutError: it has not ended by itself.
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
    """Starts the same and returns its process; writes into the files ``stdout`` and ``stderr`` of ``output``."""
    for name in ("stdout", "stderr"):
        (output / name).touch()
    target = (module, arguments, folder, dict(environment), output)
    process = pool.fork_server().Process(target=_run_module, args=target)
    process.start()
    return process


def _run_module(
    module: str, arguments: tuple[str, ...], folder: Path, environment: dict[str, str], output: Path
) -> None:
    """In the copy."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_APPEND), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [str(folder), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    # Now, while nothing of the module has been imported: it is to have a fork server like any other.
    with mock.patch.object(util, "spawnv_passfds", _fork_instead):
        pool.start_early()
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _fork_instead(python: bytes, command: Sequence[str], descriptors: Sequence[int]) -> int:
    """Instead of a new interpreter that runs ``python ... -c code``, a copy of this one that runs the code."""
    process = os.fork()
    if process:
        return process
    # The new one would have no others. And the server ends when the last copy of a certain one is closed.
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    try:
        exec(command[-1], {})
    finally:
        os._exit(0)
