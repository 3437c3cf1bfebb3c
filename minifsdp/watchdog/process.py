"""Starts and ends the watchdog, and handles the end of the process.

1. *It starts* when a model is sharded over a process group that has other ranks and a store that reaches them.
2. *It ends* when the default process group is destroyed. The thread, its store connection and its pipe are closed, the
   signal handler and the exit handler are removed, and the collective log is cleared. The next default group gets a new
   watchdog. Threads of gloo get a moment to release tensors (`_let_threads_finish`).
3. *The program ends* while the group exists. The exit handler publishes the reason, which may be an exception. If the
   exception is of a collective that this package did not issue, the report about the other ranks is printed.
4. *A launcher sends SIGTERM*. The signal wakes the watchdog, which prints the report and ends the process. This needs
   Python's default handler for SIGTERM. A handler of the program is not replaced, whether it was set before or after.
   The same applies to a wake-up descriptor, such as that of asyncio. A forked process has no watchdog.

Worked example: rank 1 raises ``ValueError: a bad batch`` and ends. The collective of rank 0 fails, and rank 0 reports
"rank 1: has ended, by ValueError: a bad batch".

*In torch:* ``torch.distributed.elastic`` writes the exception of a function that is marked with ``record`` to a file.

Spec: LEDGER-05, LEDGER-06, LEDGER-08, LEDGER-19.
"""

import atexit
import functools
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore

from minifsdp.engine.collective_log import called, log, where
from minifsdp.engine.messages import MORE, NOT_THE_PROGRAM, message
from minifsdp.engine.rank_checks import read_all
from minifsdp.watchdog import report
from minifsdp.watchdog.watchdog import LIMIT, TICK, Watchdog

# Characters of the text of an error. The store sends it to all ranks.
_LONGEST = 10_000


def start() -> None:
    """Called for each process group that is used: starts the watchdog, once for each default process group."""
    if not dist.is_initialized() or (log.store is not None and log.store() is not None):
        return
    store = own = dist.distributed_c10d._get_default_store()
    # Only torch.distributed references the store, until the default group is destroyed.
    log.store = weakref.ref(store, _stop)
    atexit.register(at_exit)
    while isinstance(own, PrefixStore):
        own = own.underlying_store
    # Other stores exist in one process only, so they do not reach other ranks.
    if dist.get_world_size() == 1 or not isinstance(own, TCPStore | FileStore):
        return
    # With `--rdzv-backend static`, which `--master-addr` selects, torchrun does not host the store.
    is_first = dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    log.watchdog = Watchdog(store, is_first and isinstance(own, TCPStore), handles_sigterm)
    _watch_signals()


def _stop(_: Any) -> None:
    """Called when the default process group is destroyed."""
    if sys.is_finalizing():
        return
    _leave_signals()
    watchdog, log.watchdog = log.watchdog, None
    log.clear()
    atexit.unregister(at_exit)
    if watchdog is not None:
        watchdog.stop()
    _let_threads_finish()


def at_exit() -> None:
    """Called when the program ends while the default process group exists."""
    atexit.unregister(at_exit)
    if log.watchdog is not None:
        _leave_exit_record(log.watchdog)
    # The callback needs modules, which Python clears before it deletes the store.
    log.store = None
    _let_threads_finish()


def _let_threads_finish() -> None:
    """Sleeps for a moment, before Python may shut down.

    The caller gets the result of a gloo collective shortly before gloo's thread releases the tensors, which requires
    the GIL. If the thread requests the GIL while Python shuts down, the thread is ended, and C++ aborts the process by
    SIGABRT, ``terminate called without an active exception``, although all work is complete. No other code waits for
    these threads, because caches of DTensor keep the group alive even after ``destroy_process_group``.
    """
    time.sleep(0.05)


def _leave_exit_record(watchdog: Watchdog) -> None:
    ended = report.IN_ORDER
    # Python stores an uncaught exception here, for any exception hook. An interactive shell also stores the exceptions
    # that it displays. They did not pass through the first frame of the program.
    trace = getattr(sys, "last_traceback", None)
    was_shown = hasattr(sys, "ps1") or (trace is not None and trace.tb_frame.f_back is not None)
    error = None if was_shown else getattr(sys, "last_value", None)
    if error is not None:
        ended = f"by {type(error).__name__}: {str(error)[:_LONGEST]}"
        watchdog.failed_at = _line_of(error.__traceback__)
    try:
        read_all()
    except RuntimeError as failed:
        print(failed, file=sys.stderr, flush=True)
        # The device may also report an earlier error of its own here.
        what = "the ranks issued different collectives" if "#E-order-differs" in str(failed) else str(failed)
        ended = f"by {type(failed).__name__}: {what[:_LONGEST]}"
        # The status shows that the results of the program are wrong.
        log.exit_status = _ExitStatus()
    if error is not None and _is_of_backend(error):
        print(message("sent-by-others", report=watchdog.ask(None)), file=sys.stderr, flush=True)
    watchdog.leave(ended)


def _line_of(trace: TracebackType | None) -> str:
    """The line of the program that raised an error, and the function that it called."""
    place, inside = "outside of the program", None
    for frame, line in traceback.walk_tb(trace):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in NOT_THE_PROGRAM:
            place, inside = where(frame.f_code, line), None
        elif inside is None:
            inside = frame.f_code
    return f"in {called(inside)}, {place}" if inside else place


def _is_of_backend(error: BaseException) -> bool:
    """Whether a collective of another package raised the error. Errors of gloo have no own type, but name a file."""
    is_torch_s = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))
    return is_torch_s and MORE not in str(error)


class _ExitStatus:
    """Ends the process with status 1 after all exit handlers have run, when Python deletes this object."""

    # The default value keeps the function, because Python clears the modules first.
    def __del__(self, end: Any = os._exit) -> None:
        end(1)


def _watch_signals() -> None:
    """Lets SIGTERM wake the watchdog, unless the program handles the signal, or wake-ups, itself."""
    is_main = threading.current_thread() is threading.main_thread()
    if log.watchdog is None or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    signal.signal(signal.SIGTERM, _wait_for_report)
    before = signal.set_wakeup_fd(log.watchdog.wake_up_end, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
    _watch_forks()


def _leave_signals() -> None:
    """Reverts the changes of `_watch_signals`, and no others."""
    if log.watchdog is None or threading.current_thread() is not threading.main_thread():
        return
    if handles_sigterm():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    before = signal.set_wakeup_fd(-1)
    if before not in (-1, log.watchdog.wake_up_end):
        signal.set_wakeup_fd(before)


def handles_sigterm() -> bool:
    """Whether SIGTERM is still handled here, and not by a handler that the program set later."""
    return signal.getsignal(signal.SIGTERM) is _wait_for_report


def _wait_for_report(number: int, frame: FrameType | None) -> None:
    """The signal handler, in the main thread. It waits while the watchdog prints its report and ends the process."""
    if log.watchdog is not None:
        log.watchdog.report_sigterm()
        log.watchdog.thread.join(3 * LIMIT + 2 * TICK)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


@functools.cache
def _watch_forks() -> None:
    """Registers functions that run at each fork. Called once, because Python cannot remove them."""
    # The handler is removed before the fork, so that a signal to the new child does not wake its parent's watchdog.
    os.register_at_fork(before=_leave_signals, after_in_parent=_watch_signals, after_in_child=_forget_in_child)


def _forget_in_child() -> None:
    """Removes the watchdog from a forked process, such as a worker of a data loader, because it is not a rank."""
    # If a thread other than the main thread has forked, the handler is still installed.
    _leave_signals()
    log.watchdog = None
