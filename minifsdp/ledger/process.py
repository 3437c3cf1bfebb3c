"""Starts and ends the watchdog, and handles the end of the process.

1. *It starts* when a model is sharded over a process group that has other ranks and a store that reaches them.
2. *It ends* when the default process group is destroyed. The thread, its store connection and its pipe are closed, the
   signal handler and the exit handler are removed, and the collective log is cleared. The next default group gets a new
   watchdog.
3. *The program ends* while the group exists. The exit handler publishes why: at its end, or by an exception. If the
   exception is of a collective that this package did not issue, the report about the other ranks is printed.
4. *A launcher sends SIGTERM*. The signal wakes the watchdog, which prints the report and ends the process. This needs
   Python's default handler for SIGTERM: a handler of the program's own is left alone, whether it was set before or
   after, and so is a wake-up descriptor of the program's own, such as asyncio's. A forked process has none of this.

Worked example: rank 1 ends by ``ValueError: a bad batch``. Rank 0, whose collective fails, reports "rank 1: has ended,
by ValueError: a bad batch".

*In torch:* ``torch.distributed.elastic`` writes the exception of a function that is marked with ``record`` to a file.

Spec: LEDGER-05, LEDGER-06, LEDGER-08, LEDGER-19.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import weakref
from functools import cache
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from minifsdp.engine import comparison, ledger
from minifsdp.engine.ledger import Chain
from minifsdp.engine.messages import MORE, message
from minifsdp.ledger import report
from minifsdp.ledger.watcher import LIMIT, TICK, Watcher

_watcher: Watcher | None = None
# The store of the default group: torch.distributed holds it until that group is destroyed, and nothing else does.
_life: Any = None


def begin() -> None:
    """Called for each process group that is used: starts the watchdog, once for each life of the default group."""
    global _watcher, _life
    if not dist.is_initialized() or (_life is not None and _life() is not None):
        return
    store = own = dist.distributed_c10d._get_default_store()
    _life = weakref.ref(store)
    weakref.finalize(store, _end).atexit = False
    while isinstance(own, PrefixStore):
        own = own.underlying_store
    # Other stores belong to one process, which has no other rank to ask.
    if dist.get_world_size() == 1 or not isinstance(own, TCPStore | FileStore):
        return
    is_host = isinstance(own, TCPStore) and dist.get_rank() == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    _watcher = Watcher(store, is_host, handles_sigterm)
    atexit.register(at_exit)
    _watch_signals(_watcher)


def _end() -> None:
    """The default process group was destroyed."""
    global _watcher
    watcher, _watcher = _watcher, None
    ledger.forget_groups()
    if watcher is not None:
        atexit.unregister(at_exit)
        _leave_signals(watcher)
        watcher.stop()


def explain(place: tuple[Chain, int, int]) -> str:
    """For the error of a collective: the report about all ranks."""
    return "" if _watcher is None else _watcher.ask(place)


def at_exit() -> None:
    """Publishes the exit record of this rank, once."""
    atexit.unregister(at_exit)
    watcher = _watcher
    if watcher is None:
        return
    ended, is_wrong = report.IN_ORDER, False
    # Python keeps an uncaught exception here, whichever hook prints it. An interactive session keeps those before, too.
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    if error is not None:
        ended, report.failed_at = f"by {type(error).__name__}: {error}", report.place_of(error.__traceback__)
    try:
        comparison.read_all()
    except RuntimeError as differs:
        print(differs, file=sys.stderr, flush=True)
        ended, is_wrong = "by RuntimeError: the ranks issued different collectives", True
    if error is not None and _is_of_backend(error):
        print(message("sent-by-others", report=watcher.ask(None)), file=sys.stderr, flush=True)
    watcher.leave(ended, is_failure=error is not None or is_wrong)
    if is_wrong:
        # The status shows that the results of the program are wrong.
        _StatusAtExit.replace(1)


def _is_of_backend(error: BaseException) -> bool:
    """Whether a collective of another package raised it. Errors of gloo have no type of their own, but name a file."""
    is_torch_s = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))
    return is_torch_s and MORE not in str(error)


class _StatusAtExit:
    """Ends the process with another status after all exit handlers have run, when Python deletes its modules."""

    _kept: _StatusAtExit | None = None

    def __init__(self, status: int) -> None:
        self._end = (os._exit, status)

    @classmethod
    def replace(cls, status: int) -> None:
        """From now on the process ends with ``status``."""
        cls._kept = cls(status)

    def __del__(self) -> None:
        end, status = self._end
        end(status)


def _watch_signals(watcher: Watcher) -> None:
    """Lets SIGTERM wake the watchdog, unless the program handles the signal, or wake-ups, itself."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    signal.signal(signal.SIGTERM, _wait_for_report)
    before = signal.set_wakeup_fd(watcher.wake_up_end, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
    _watch_forks()


def _leave_signals(watcher: Watcher) -> None:
    """Removes what `_watch_signals` installed, and nothing else."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is _wait_for_report:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    before = signal.set_wakeup_fd(-1)
    if before not in (-1, watcher.wake_up_end):
        signal.set_wakeup_fd(before)


def handles_sigterm() -> bool:
    """Whether SIGTERM is still handled here, and not by a handler that the program set later."""
    return signal.getsignal(signal.SIGTERM) is _wait_for_report


def _wait_for_report(number: int, frame: FrameType | None) -> None:
    """In the main thread: the watchdog ends the process after its report. Without a watchdog there is no report."""
    if _watcher is not None:
        _watcher.report_sigterm()
        _watcher.thread.join(3 * LIMIT + 2 * TICK)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


@cache
def _watch_forks() -> None:
    # Once, because Python cannot remove them.
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forget_in_child)


def _before_fork() -> None:
    """A signal that a new child gets at once must not wake its parent's watchdog."""
    if _watcher is not None:
        _leave_signals(_watcher)


def _after_fork() -> None:
    if _watcher is not None:
        _watch_signals(_watcher)


def _forget_in_child() -> None:
    """A forked process, such as a worker of a data loader, is no rank."""
    global _watcher
    watcher, _watcher = _watcher, None
    if watcher is not None:
        _leave_signals(watcher)
