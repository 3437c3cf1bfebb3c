"""What the ledger installs in a process: when its watcher begins, and what is done when the program ends.

1. *It begins* when the first process group is met, if there are other ranks and a store to reach them by.
2. *A program ends* by an exception that is not caught, or at its end. Either is told to the others, so that who waits
   for this rank can say why it does not come. If the exception is of a collective that the program, a DTensor or a
   checkpoint has sent past this package, the report follows it.
3. *A launcher ends it* with SIGTERM. The signal wakes the watcher, which reports and ends the process. A handler that
   the program has for SIGTERM is left alone, and a process that is forked from this one, as a worker of a data loader
   is, has none of this.

Worked example: rank 1 ends by ``ValueError: a bad batch``; rank 0, whose collective has failed, says "rank 1: has
ended, by ValueError: a bad batch".

*In torch:* ``torch.distributed.elastic`` writes the exception of a function that is marked with ``record`` to a file.

Spec: LEDGER-05, LEDGER-06, LEDGER-08.
"""

from __future__ import annotations

import atexit
import os
import re
import signal
import sys
import threading
from contextlib import suppress
from functools import cache
from types import FrameType, TracebackType

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from minifsdp.engine import comparison, ledger
from minifsdp.engine.ledger import Chain
from minifsdp.engine.messages import MORE, message
from minifsdp.ledger import report
from minifsdp.ledger.watcher import LIMIT, TICK, Watcher, close

# What is in the errors of backends and of the store: a rank has gone, or has not come in time.
_OF_BACKENDS = re.compile(r"[Tt]imed out|timeout|[Cc]onnection (closed|reset)|NCCL|[Bb]roken pipe")

_watcher: Watcher | None = None


def begin() -> None:
    """Called when a process group is met; begins to watch, once for each default group that ranks can talk in."""
    global _watcher
    if not dist.is_initialized() or (_watcher is not None and _watcher.world is dist.group.WORLD):
        return
    if _watcher is not None:
        # What was found out about other groups does not concern those that are made now.
        _watcher.say_last_words("to begin anew, with other process groups")
        _watcher = ledger.verdict = ledger.latest = ledger.on_its_way = None
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    # Others are of one process, and have no other rank to ask.
    if dist.get_world_size() == 1 or not isinstance(store, TCPStore | FileStore):
        return
    is_host = isinstance(store, TCPStore) and dist.get_rank() == 0
    _watcher = Watcher(_bell(), is_host and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ)
    _watch_signals()


@cache
def _bell() -> tuple[int, int]:
    """A pipe for all watchers of this process, of which one comes after the other."""
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


def explain(chain: Chain, epoch: int) -> str:
    """For the error of a collective that has failed: where every rank is."""
    return "" if _watcher is None else _watcher.ask((chain, epoch))


def watch_the_end() -> None:
    """Leaves last words when the program ends, also if it has not come to its first group."""
    before = sys.excepthook

    def last_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        with suppress(Exception):
            begin()
        if _watcher is not None:
            report.failed_at = report.place_of(trace)
            if isinstance(error, RuntimeError) and _OF_BACKENDS.search(str(error)) and MORE not in str(error):
                # Of a collective that the program, DTensor or a checkpoint has sent past this package.
                print(message("sent-by-others", report=_watcher.ask(None)), file=sys.stderr, flush=True)
            first = (str(error).splitlines() or [""])[0]
            _watcher.say_last_words(f"by {kind.__name__}: {first}")
            if _watcher.is_host:
                # They hear of it at once.
                for chain in list(ledger.chains.values()):
                    close(chain.process_group)
            _watcher.let_others_read()

    sys.excepthook = last_error
    atexit.register(_at_the_end)


def _at_the_end() -> None:
    with suppress(Exception):
        begin()
    ended, is_wrong = "at the end of its program", False
    try:
        comparison.read_all()
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        ended, is_wrong = "by RuntimeError: the ranks have not sent each other the same", True
    if _watcher is not None:
        _watcher.say_last_words(ended)
        _watcher.let_others_read()
    if is_wrong:
        # Who looks at the status shall not take for right what the program has saved.
        sys.stdout.flush()
        os._exit(1)


def _watch_signals() -> None:
    """Has SIGTERM wake the thread, unless the program has a handler of its own."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _wait_for_report):
        return
    signal.signal(signal.SIGTERM, _wait_for_report)
    signal.set_wakeup_fd(_bell()[1], warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_forget_signals)


def _wait_for_report(number: int, frame: FrameType | None) -> None:
    """In the main thread: the watcher ends the process when it has reported. If it is gone, there is no report."""
    if _watcher is not None:
        _watcher.thread.join(3 * LIMIT + 2 * TICK)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _forget_signals() -> None:
    # A worker of a data loader is no rank. It would ring its parent's bell.
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is _wait_for_report:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
