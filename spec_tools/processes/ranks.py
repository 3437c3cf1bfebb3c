"""Starts a program on some ranks, waits for them, and reads what they have written.

    with start("spec_tools.processes.deviate", "wrapper", "ends", folder=folder) as ranks:
        codes = ranks.wait(20.0)
    print(ranks.errors(0))

The ranks are forked from a process that has imported torch, so a run takes a second. Each rank is a process of its own,
so it can be killed.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from spec_tests.harness import pool
from spec_tests.harness.programs import start_module
from spec_tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


class Ranks:
    """The processes of one run. At the end of the ``with`` block, all of them have ended.

    Attributes:
        processes: of the ranks.
        folder: each rank writes its output to a folder in it.
        store: the store outside the ranks, which exists as long as the ranks.
    """

    def __init__(self, processes: list[Any], folder: Path, store: TCPStore | None) -> None:
        self.processes, self.folder, self.store = processes, folder, store

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def wait(self, seconds: float, ranks: Iterable[int] | None = None) -> list[int | None]:
        """The exit statuses of ``ranks``, by default of all; ``None`` for a rank that has not ended in time."""
        until = time.monotonic() + seconds
        waited_for = self.processes if ranks is None else [self.processes[rank] for rank in ranks]
        for process in waited_for:
            process.join(max(0.0, until - time.monotonic()))
        return [process.exitcode for process in waited_for]

    def output(self, rank: int) -> str:
        """The standard output of a rank so far."""
        return (self.folder / str(rank) / "stdout").read_text()

    def errors(self, rank: int) -> str:
        """The end of a rank's standard error."""
        return (self.folder / str(rank) / "stderr").read_text()[-6000:]

    def all_errors(self) -> str:
        """The end of the standard error of each rank."""
        return "\n".join(self.errors(rank) for rank in range(len(self.processes)))


def start(module: str, *arguments: str, folder: Path, num_ranks: int = 2, hosts: bool = True) -> Ranks:
    """Starts ``python -m module`` on ``num_ranks`` ranks.

    Args:
        module: the program.
        arguments: its command line.
        folder: for the outputs, and for the files of the collective log.
        num_ranks: number of ranks.
        hosts: whether rank 0 hosts the store. Otherwise it is outside the ranks, like that of torchrun.
    """
    pool.start_early()
    store = None if hosts else TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), False)
    job: dict[str, Any] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port if store else free_port()}
    job |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "OMP_NUM_THREADS": 1, "MINIFSDP_LEDGER_DIR": folder}
    if store:
        job["TORCHELASTIC_USE_AGENT_STORE"] = True
    processes = []
    for rank in range(num_ranks):
        place = {**job, "RANK": rank, "LOCAL_RANK": rank}
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        output = folder / str(rank)
        output.mkdir(parents=True)
        processes.append(start_module(module, *arguments, folder=ROOT, environment=environment, output=output))
    return Ranks(processes, folder, store)


def result_of(module: str, *arguments: str, file: Path, folder: Path, limit: float, **place: Any) -> Any:
    """Runs a program whose ranks must all succeed. Returns the JSON that it writes to ``file``. See `start`."""
    with start(module, *arguments, folder=folder, **place) as ranks:
        codes = ranks.wait(limit)
    assert not any(code is None or code for code in codes), ranks.all_errors()
    return json.loads(file.read_text())


def end_as_python_does(main: Callable[[], None]) -> None:
    """Runs ``main`` and ends the process.

    A forked rank ends with ``_exit``. This function does what Python does at the end: it handles an uncaught exception
    and runs the exit handlers.
    """
    status = 0
    try:
        main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException as error:
        sys.last_value, sys.last_traceback = error, _through_first_frame(error.__traceback__)
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _through_first_frame(trace: TracebackType | None) -> TracebackType:
    """The traceback of an exception that also passed through the first frame of the process, like an uncaught one."""
    first = sys._getframe()
    while first.f_back is not None:
        first = first.f_back
    return TracebackType(trace, first, first.f_lasti, first.f_lineno)
