"""Starts each pytest run from one process that has imported torch once. A separate program, not part of a package.

pytest needs fifteen seconds for a mutant, ten of them for importing torch, here and in the fork server of the ranks. So
this program imports torch, starts that fork server, and forks itself for each request. It imports nothing of the
repository before the fork, so each child imports the package from the folder in its request.

A request is a line on standard input, ``{"folder": ..., "arguments": [...], "limit": 300}``. The answer is a line on
standard output: the exit code of pytest, or -1 if pytest exceeded the limit.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing as mp
import os
import pathlib
import signal
import sys
import time
import traceback
from multiprocessing import forkserver

PRELOADED = [
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.testing._internal.distributed.fake_pg",
]
GRACE = 20.0


def main() -> None:
    """Answers requests until standard input ends."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    for name in ["pytest", *PRELOADED]:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _serve(pathlib.Path(request["folder"]), request["arguments"])
        print(_wait(child, request["limit"]), flush=True)


def _serve(folder: pathlib.Path, arguments: list[str]) -> None:
    """In the child: runs pytest in the folder, and ends the process."""
    # The fork server is not a child of this process, so it cannot be checked here. It is a running child of the parent.
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    os.setsid()
    os.chdir(folder)
    sys.path[0] = str(folder)
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 3
    try:
        code = int(sys.modules["pytest"].main(arguments))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, limit: float) -> int:
    """The exit code, or -1 after the limit. Then the child gets some time to close its ranks before it is killed."""
    if (code := _exit_code(child, limit)) is not None:
        return code
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGINT)
        if _exit_code(child, GRACE) is None:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return -1


def _exit_code(child: int, limit: float) -> int | None:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    return None


if __name__ == "__main__":
    main()
