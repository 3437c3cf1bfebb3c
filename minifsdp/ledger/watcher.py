"""The thread that tells other ranks what this one does, and asks them when something is wrong.

It wakes twice in a second, or when it is called, and does one of four things:

1. *Answers.* Another rank has asked; this one puts its state on the board, whatever its main thread is stuck in.
2. *Asks for the main thread*, whose collective has failed: its error will say where every rank is.
3. *Asks of its own accord*, when the main thread waits for one collective longer than a few seconds. If the answers
   show that ranks have issued different collectives at one place, or that one has ended, waiting is in vain. So the
   reason is kept as the `ledger.verdict`, the group's connections are closed, and each rank's wait ends in an error
   within seconds instead of at the group's time-out, half an hour later. Else another rank is slow, and it goes on
   waiting.
4. *Reports a SIGTERM.* A launcher that ends all ranks because one has died sends it. The main thread may be stuck in
   C++, where no handler of Python runs; but the signal wakes this thread.

Worked example: rank 1 leaves out ``layers.2``, and goes on to gather ``layers.3``. Rank 0 waits for ``layers.2``, and
rank 1 for ``layers.3``. After two seconds the first to ask finds that they part, and closes; both raise.

What is found is printed in the error and written to a file, which ``python -m minifsdp.ledger`` draws. When the program
ends (``process.py``), it leaves last words on the board. What goes wrong in one look, say because the store's host has
gone, ends that look and not the thread: this rank's own place can always be told.

A rank that is merely slow makes all others ask. So of that little is sent: a state for each rank, to a question that
all of them share, and the lists of one rank for each state that there is.

An accelerator's collectives run after the CPU has gone on. There it counts as waiting, too, if an event behind the last
of them has not come. The reason is printed at once, and raised when the main thread issues its next collective, in
whichever group, since what the device has computed is worth nothing; the group is aborted, so that the device comes
free. This has not run on a GPU yet.

*In torch:* for NCCL a watchdog in C++, with a file of each rank that is compared afterwards; for gloo nothing.

Spec: LEDGER-03, LEDGER-04, LEDGER-06, LEDGER-12 to LEDGER-16, LEDGER-18.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minifsdp.engine import ledger
from minifsdp.engine.ledger import Chain
from minifsdp.engine.messages import message, rank_of_this_process
from minifsdp.ledger import report
from minifsdp.ledger.board import LAST_WORDS, Board, Line, State

TICK = 0.25  # seconds between two looks at the board
HASTE = 0.05  # the same for some time after a question: who has asked mostly asks for more at once
PATIENCE = 2.0  # seconds that the main thread may wait before this one asks
LIMIT = 2.0  # seconds that other ranks have to answer
_TAG = 0x6D696E6B  # of a message that is never sent

Place = tuple[Chain, int] | None  # a chain and an epoch of it
# The states of all ranks, the lists of some, and what these have issued where they part.
Findings = tuple[dict[int, State | None], dict[int, list[Line]], dict[int, Line]]


class Watcher:
    """One thread for each default group.

    Args:
        bell: both ends of a pipe, which wakes the thread: one for the process, since signals ring it as well.
        is_host: whether the store ends with this process.

    Attributes:
        world: the default group.
        is_host: as given.
        thread: itself.
    """

    def __init__(self, bell: tuple[int, int], is_host: bool) -> None:
        self.world, self.is_host = dist.group.WORLD, is_host
        store = dist.distributed_c10d._get_default_store()
        self._board = Board(store, dist.get_rank(), dist.get_world_size(), self._answer)
        self._bell, self._rung = bell
        self._answered, self._answered_at, self._listed = 0, 0.0, 0
        self._asking = threading.Lock()
        self._wanted: list[Place] = []
        self._found, self._is_told = "", threading.Event()
        self._stuck_at: Any = None
        self._stuck_since, self._patience = 0.0, PATIENCE
        self._ended, self._has_left = "", threading.Event()
        # The first look is at once: from then on others can see whether this process is over.
        self._ring()
        self.thread = threading.Thread(target=self._watch, name="minifsdp ledger", daemon=True)
        self.thread.start()

    # --- called by the main thread ---

    def ask(self, place: Place) -> str:
        """2. Where every rank is, and where those of the group of ``place`` part."""
        with self._asking:
            self._is_told.clear()
            self._wanted, self._found = [place], ""
            self._ring()
            self._is_told.wait(3 * LIMIT + 2 * TICK)
            return self._found or self._alone()

    def say_last_words(self, ended: str) -> None:
        """The program is over; returns when the board has it, or does not answer."""
        self._ended = self._ended or ended
        self._ring()
        self._has_left.wait(LIMIT)

    def let_others_read(self) -> None:
        """The host of the store stays until all other ranks have ended, too, or for a few seconds."""
        if self.is_host:
            self.thread.join(2 * LIMIT)

    def _ring(self) -> None:
        with suppress(OSError):
            os.write(self._rung, bytes(1))

    # --- the thread ---

    def _watch(self) -> None:
        while not self._ended:
            try:
                self._look(self._listen())
            except Exception:
                # The store's host has gone, or anything else. The next look may need none of it.
                time.sleep(TICK)
        with suppress(Exception):
            self._leave(self._ended)
        self._has_left.set()
        self._is_told.set()
        if self.is_host:
            with suppress(Exception):
                self._board.states(LAST_WORDS, 2 * LIMIT)

    def _listen(self) -> bytes:
        was_asked = time.monotonic() - self._answered_at < PATIENCE
        ready, _, _ = select.select([self._bell], [], [], HASTE if was_asked else TICK)
        return os.read(self._bell, 64) if ready else b""

    def _look(self, signals: bytes) -> None:
        if signal.SIGTERM in signals:
            self._report_sigterm()
        if self._wanted:
            place = self._wanted.pop()
            try:
                self._found = self._ask_all(place)
            finally:
                self._is_told.set()
        self._answer()
        if self._is_stuck():
            self._examine()

    def _answer(self) -> None:
        """1. Whatever others have asked since the last time."""
        asked, wanted = self._board.wishes()
        if asked > self._answered:
            self._board.put_up(asked, report.state_of_this_rank())
            self._answered, self._answered_at = asked, time.monotonic()
        if wanted > self._listed:
            self._board.put_up_list(wanted, report.lines_of_this_rank())
            self._listed = wanted

    def _leave(self, ended: str) -> None:
        """Puts up what answers all questions there will be."""
        self._answered = self._listed = LAST_WORDS
        self._board.put_up_list(LAST_WORDS, report.lines_of_this_rank())
        self._board.put_up(LAST_WORDS, report.state_of_this_rank(ended))

    def _ask_all(self, place: Place) -> str:
        """What is known of all ranks, in words; and in a file."""
        return _told(*self._find(place, self._board.ask()))

    def _find(self, place: Place, number: int) -> Findings:
        """What the answers to a question say; where they differ, by the lists of those who differ."""
        states = self._board.states(number, LIMIT)
        for rank in [rank for rank, state in states.items() if state is None and self._board.is_lost(rank)]:
            states[rank] = lost = report.state_of_lost(rank)
            self._board.put_up(LAST_WORDS, lost)
        if place is not None:
            epoch, ranks = report.unlike(*place, states)
            if len(ranks) > 1:
                lists = self._board.lists(ranks[: report.MOST_RANKS], LIMIT)
                return states, lists, report.parting(place[0].name, epoch, lists)
        return states, {self._board.rank: report.lines_of_this_rank()}, {}

    def _alone(self) -> str:
        """The same, where no other rank can be asked."""
        rank, why = self._board.rank, report.GONE if self._board.is_gone else report.SILENT
        return _told({rank: report.state_of_this_rank()}, {rank: report.lines_of_this_rank()}, {}, why)

    def _is_stuck(self) -> bool:
        """Whether the main thread has waited for the same collective, or the device, for longer than it should."""
        at = self._waits_for()
        if at != self._stuck_at:
            self._stuck_at, self._stuck_since, self._patience = at, time.monotonic(), PATIENCE
        return at is not None and time.monotonic() - self._stuck_since > self._patience

    @staticmethod
    def _waits_for() -> Any:
        waiting, event = ledger.waiting, ledger.on_its_way
        if waiting is not None:
            # Its place, and not itself: it would keep tensors alive.
            return waiting.chain.name, waiting.chain.epoch, waiting.chain.number
        return None if event is None or event.query() else event

    def _examine(self) -> None:
        """3. The main thread waits: for a slow rank, or in vain?"""
        # Who waits long asks ever more rarely.
        self._patience *= 2
        place, is_known = _last_place(), ledger.waiting is not None
        if place is None:
            return
        # What another rank has asked a moment ago will do, unless something is wrong.
        just_now = time.monotonic() - self._answered_at < 2 * TICK
        if not _is_in_vain(place, self._find(place, self._answered if just_now else self._board.ask())):
            return
        found = self._find(place, self._board.ask())
        if _is_in_vain(place, found) and self._waits_for() == self._stuck_at:
            ledger.verdict = RuntimeError(message("waits-in-vain", ranks=list(place[0].ranks), report=_told(*found)))
            if not is_known:
                # A device waits, and the main thread does not know yet.
                print(ledger.verdict, file=sys.stderr, flush=True)
            close(place[0].process_group)

    def _report_sigterm(self) -> None:
        """4. The main thread ends the process when it comes back to Python; if it does not, this one does."""
        text = ""
        with suppress(Exception):
            # Other ranks, which are told to end as well, ask at the same time.
            self._leave(report.TOLD_TO_END)
            text = self._ask_all(_last_place())
        with suppress(Exception):
            print(message("told-to-end", report=text or self._alone()), file=sys.stderr, flush=True)
        if self.is_host:
            time.sleep(TICK)
        os._exit(128 + signal.SIGTERM)


def _last_place() -> Place:
    """What the main thread waits for, or has sent last."""
    waiting = ledger.waiting
    return ledger.latest if waiting is None else (waiting.chain, waiting.epoch)


def _is_in_vain(place: tuple[Chain, int], found: Findings) -> bool:
    """Whether one in the group of ``place`` has ended, or two have parted."""
    states, _, parted = found
    of_group = [states[rank] for rank in place[0].ranks]
    return any(state["ended"] for state in of_group if state) or bool(parted)


def close(process_group: Any) -> None:
    """Ends all that is waited for in a group, on this rank and, as connections close, on the others.

    Not what ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` waits for before a collective; that ends with the other rank's process.
    """
    for device in process_group._device_types:
        with suppress(RuntimeError):
            backend: Any = process_group._get_backend(device)
            # DETAIL has wrapped it.
            backend = getattr(backend, "wrapped_pg", backend)
            is_gloo = type(backend) is dist.ProcessGroupGloo
            if is_gloo:
                # It has no abort. But a wait that runs out of time closes all connections of its group.
                other = (backend.rank() + 1) % backend.size()
                backend.recv([torch.zeros(1)], other, _TAG).wait(timedelta(milliseconds=1))
            else:
                backend.abort()


def _told(
    states: Mapping[int, State | None], lists: Mapping[int, list[Line]], parted: Mapping[int, Line], why: str = ""
) -> str:
    """What is known, in words; writes it to a file, too, and says where that is."""
    words = report.in_words(states, parted, why)
    folder = Path(os.environ.get("MINIFSDP_LEDGER_DIR", tempfile.gettempdir()))
    # Neither two jobs without an id nor two lives of one shall write to the same file.
    run, life = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    path = folder / f"minifsdp-ledger-{run}-{life}-rank{rank_of_this_process()}-{os.getpid()}.json"
    try:
        path.write_text(json.dumps({"states": states, "lines": lists, "parted": parted}), encoding="utf-8")
    except OSError as error:
        return f"{words}\n(could not be written to a file: {error})"
    return f"{words}\nTo draw it: python -m minifsdp.ledger {path}"
