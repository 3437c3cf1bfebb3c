"""Files about a chunk that did not pass: stacks, PyTorch's flight recorder, and the log of minifsdp's collectives.

They are in the folder of the chunk, and the report names them:

* ``py-spy-PID.txt``: the stacks of one process, with C++ frames where possible. Only if ``py-spy`` is installed.
  Otherwise the fault handler of Python writes the stacks into the log of the chunk.
* ``flight-recorder/rank-N``: the last collectives of PyTorch on rank N, which ``torchfrtrace`` reads. NCCL's process
  group writes it after its time-out, or if a byte arrives in its named pipe. Other backends do not write it.
* ``ledger/*.json``: the last collectives of minifsdp, which ``python -m minifsdp.ledger`` reads.

Worked example: both ranks of ``smoke/2-ranks`` hang. The limit for ranks is 60 s::

    45 s     all ranks are still running: py-spy writes their stacks, and a byte is sent into each pipe
    60 s     the pool of ranks ends with the stacks of the fault handler; the chunk has failed
    after    the kit copies the files of minifsdp from the temporary folder of the chunk

The names of the variables are valid for torch 2.11 to 2.15. Some have an older name, which parts of torch still read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from spec_tests.waiting import comes_true

__all__ = ["RECORDER", "collect", "collected_before", "files", "keep_ledgers", "variables"]

RECORDER = "flight-recorder"
NUM_ENTRIES = "2000"
SHARE_OF_LIMIT = 0.75  # the part of a limit after which ranks that still run are examined
SPY_LIMIT = 10.0  # seconds for one process
ALL_SPIES_LIMIT = 40.0
DUMP_LIMIT = 5.0


def variables(home: Path, scratch: Path, given: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that make PyTorch record collectives. Those that the user has set stay."""
    dump = f"{home / RECORDER}/rank-"
    wanted = {
        "TORCH_FR_BUFFER_SIZE": NUM_ENTRIES,
        "TORCH_NCCL_TRACE_BUFFER_SIZE": NUM_ENTRIES,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": dump,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": dump,
        # torch appends the rank and ".pipe".
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{scratch}/fr-",
    }
    return {name: value for name, value in wanted.items() if name not in given}


def collect(home: Path, scratch: Path, processes: Sequence[int]) -> None:
    """Writes the stacks of these processes, and lets PyTorch write its record. Does not raise, and ends in a minute."""
    _trigger_recorders(home, scratch)
    spy = shutil.which("py-spy")
    until = time.monotonic() + ALL_SPIES_LIMIT
    for process in processes if spy else ():
        if time.monotonic() < until:
            _write_stacks(str(spy), process, home / f"py-spy-{process}.txt")


def _write_stacks(spy: str, process: int, path: Path) -> None:
    # Without C++ frames if py-spy cannot read them, for example on an unusual processor.
    for options in (["--native"], []):
        with suppress(OSError, subprocess.TimeoutExpired):
            command = [spy, "dump", *options, "--pid", str(process)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SPY_LIMIT, check=False)
            path.write_text(done.stdout or done.stderr)
            if done.returncode == 0:
                return


def _trigger_recorders(home: Path, scratch: Path) -> None:
    asked = []
    for pipe in scratch.glob("fr-*.pipe"):
        # Not blocking: if no process reads the pipe, `open` raises.
        with suppress(OSError):
            end = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(end, b"1")
            finally:
                os.close(end)
            asked.append(home / RECORDER / f"rank-{pipe.stem.removeprefix('fr-')}")
    comes_true(lambda: all(path.exists() for path in asked), DUMP_LIMIT if asked else 0.0)


@contextmanager
def collected_before(limit: float, home: Path, scratch: Path, find: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Calls `collect` if the block still runs shortly before its limit, with the processes that ``find`` returns."""
    timer = threading.Timer(SHARE_OF_LIMIT * limit, lambda: collect(home, scratch, find()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def keep_ledgers(home: Path, scratch: Path) -> None:
    """Copies the files of minifsdp's watchdog from the temporary folder of the chunk, which is deleted."""
    for path in sorted(scratch.glob("**/minifsdp-ledger-*.json")):
        (home / "ledger").mkdir(exist_ok=True)
        with suppress(OSError):
            shutil.copy(path, home / "ledger" / path.name)


def files(home: Path) -> list[str]:
    """The paths of these files, relative to the folder of the chunk."""
    found = [*home.glob("py-spy-*.txt"), *(home / RECORDER).glob("*"), *(home / "ledger").glob("*")]
    return sorted(str(path.relative_to(home)) for path in found)
