"""Starts and ends the watchdog, and handles the end of the process.

1. *It starts* when a model is sharded over a process group that has other ranks and a store that reaches them.
2. *It ends* when the default process group is destroyed. The thread and its store connection are closed, the exit
   handler is removed, and the collective log is cleared. The next default group gets a new watchdog. Threads of gloo
   get a moment to release tensors (`_let_threads_finish`).
3. *The program ends* while the group exists. The exit handler publishes the reason, which may be an exception. If the
   exception is of a collective that this package did not issue, the report about the other ranks is printed. If the
   exception contains a report, the report is also written to a file. An exception that the program catches leaves no
   file.

While the group exists, the process has one more thread, which ``threading`` does not list, one more connection to the
store, and one exit handler. A forked process has no watchdog.

Worked example: rank 1 raises ``ValueError: a bad batch`` and ends. The collective of rank 0 fails, and rank 0 reports
"rank 1: has ended, by ValueError: a bad batch".

*In torch:* ``torch.distributed.elastic`` writes the exception of a function that is marked with ``record`` to a file.

Spec: LEDGER-05, LEDGER-07, LEDGER-08, LEDGER-17, LEDGER-19, LEDGER-20.
"""

import atexit
import json
import os
import sys
import tempfile
import time
import traceback
import weakref
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore

from minifsdp.checks.collective_log import log
from minifsdp.checks.place import Place, place_as_text
from minifsdp.checks.rank_checks import read_all
from minifsdp.engine.messages import (
    MORE,
    NOT_THE_PROGRAM,
    message,
    rank_of_this_process,
)
from minifsdp.watchdog import linux, report
from minifsdp.watchdog.watchdog import Watchdog

FOLDER = "MINIFSDP_LEDGER_DIR"  # the folder of report files
# Characters of the text of an error. The store sends it to all ranks.
_LONGEST = 10_000


def start() -> None:
    """Called when a model is sharded: starts the watchdog, once for each default process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = own = dist.distributed_c10d._get_default_store()
    if log.store is not None and log.store() is store:
        return
    while isinstance(own, PrefixStore):
        own = own.underlying_store
    # Other stores exist in one process only, so they do not reach other ranks.
    if not isinstance(own, TCPStore | FileStore):
        return
    # Only torch.distributed references the store, until the default group is destroyed.
    log.store = weakref.ref(store, _stop)
    atexit.register(at_exit)
    # With `--rdzv-backend static`, which `--master-addr` selects, torchrun does not host the store.
    is_first = (
        dist.get_rank() == 0
        and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    )
    log.watchdog = Watchdog(store, is_first and isinstance(own, TCPStore))
    if dist.get_rank() == 0:
        linux.note_what_is_off()


def _stop(_: Any) -> None:
    """Called when the default process group is destroyed."""
    watchdog = log.watchdog
    log.watchdog = None
    log.clear()
    atexit.unregister(at_exit)
    watchdog.stop()
    _let_threads_finish()


def at_exit() -> None:
    """Called when the program ends while the default process group exists."""
    atexit.unregister(at_exit)
    # The callback needs modules, which Python clears before it deletes the store.
    log.store = None
    if log.watchdog is not None and log.watchdog.is_of_this_process:
        _leave_exit_record(log.watchdog)
    _let_threads_finish()


def _let_threads_finish() -> None:
    """Sleeps until no other thread runs, for half a second at most, before Python may shut down.

    The caller gets the result of a gloo collective shortly before gloo's thread releases the tensors, which requires
    the GIL. If the thread requests the GIL while Python shuts down, the thread is ended, and C++ aborts the process by
    SIGABRT, ``terminate called without an active exception``, although all work is complete. No other code waits for
    these threads, because caches of DTensor keep the group alive even after ``destroy_process_group``.
    """
    time.sleep(report.HASTE)
    # On a machine with a high load, gloo's thread may still wait for a CPU.
    report.comes_true(lambda: not linux.another_thread_runs(), 0.45)


def _leave_exit_record(watchdog: Watchdog) -> None:
    ended = report.IN_ORDER
    # Python stores an uncaught exception here, for any exception hook. An interactive shell also stores the exceptions
    # that it displays. They did not pass through the first frame of the program.
    trace = getattr(sys, "last_traceback", None)
    was_shown = hasattr(sys, "ps1") or (
        trace is not None and trace.tb_frame.f_back is not None
    )
    error = None if was_shown else getattr(sys, "last_value", None)
    said = str(error)
    if error is not None:
        ended = f"by {type(error).__name__}: {said[:_LONGEST]}"
        watchdog.failed_at = _line_of(error.__traceback__)
    try:
        read_all()
    except RuntimeError as failed:
        said = str(failed)
        print(said, file=sys.stderr, flush=True)
        # The device may also report an earlier error of its own here.
        what = (
            "the ranks issued different collectives"
            if "#E-order-differs" in said
            else said
        )
        ended = f"by {type(failed).__name__}: {what[:_LONGEST]}"
        # The status shows that the results of the program are wrong.
        log.exit_status = _ExitStatus()
    if error is not None and _is_of_backend(error):
        said = message("sent-by-others", report=watchdog.ask(None))
        print(said, file=sys.stderr, flush=True)
    if watchdog.last is not None and watchdog.last.text() in said:
        print(write_report(watchdog.last), file=sys.stderr, flush=True)
    watchdog.leave(ended)


def write_report(found: report.Findings) -> str:
    """Writes the report to a new file, in `FOLDER` or in a new folder. Returns a line that names the file.

    Only this user can read the file, because texts of exceptions may contain secrets.
    """
    if (folder := os.environ.get(FOLDER)) == "off":
        return ""
    # Two jobs without an ID, two starts of a job, and two reports of a process use different files.
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none").replace("/", "_")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    prefix = (
        f"minifsdp-ledger-{run}-{restart}-rank{rank_of_this_process()}-{os.getpid()}-"
    )
    try:
        folder = folder or tempfile.mkdtemp(prefix="minifsdp-")
        with tempfile.NamedTemporaryFile(
            "w", dir=folder, prefix=prefix, suffix=".json", delete=False
        ) as file:
            json.dump(
                {"report": found.text(), "states": found.states, "lines": found.lists},
                file,
            )
    except OSError as error:
        return f"(the report could not be written to a file: {error})"
    return f"To draw the report: python -m minifsdp.ledger {file.name}"


def _line_of(trace: TracebackType | None) -> str:
    """The line of the program that raised an error, and the function that it called."""
    place: Place = (None, None, None)
    for frame, line in traceback.walk_tb(trace):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in NOT_THE_PROGRAM:
            place = (None, frame.f_code, line)
        elif place[0] is None:
            place = (frame.f_code, *place[1:])
    return place_as_text(*place)


def _is_of_backend(error: BaseException) -> bool:
    """Whether a collective of another package raised the error. Errors of gloo have no own type, but name a file."""
    return MORE not in str(error) and (
        isinstance(error, dist.DistError)
        or (isinstance(error, RuntimeError) and "gloo/" in str(error))
    )


class _ExitStatus:
    """Ends the process with status 1 after all exit handlers have run, when Python deletes this object."""

    # The default value keeps the function, because Python clears the modules first.
    def __del__(self, end: Any = os._exit) -> None:
        end(1)
