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
ends (``process.py``), it leaves last words on the board.

An accelerator's collectives run after the CPU has gone on. There it counts as waiting, too, if an event behind the last
of them has not come. The reason is printed at once, and raised when the main thread issues its next collective; the
group is aborted, so that the device comes free. This has not run on a GPU yet.

*In torch:* for NCCL a watchdog in C++, with a file of each rank that is compared afterwards; for gloo nothing.

Spec: LEDGER-03, LEDGER-04, LEDGER-06.
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
from minifsdp.ledger.board import LAST_WORDS, Board, State

TICK = 0.5  # seconds between two looks at the board
PATIENCE = 2.0  # seconds that the main thread may wait before this one asks
LIMIT = 2.0  # seconds that other ranks have to answer
_TAG = 0x6D696E6B  # of a message that is never sent

Place = tuple[Chain, int] | None  # a chain and an epoch of it


class Watcher:
    """One thread for each process and default group.

    Attributes:
        world: the default group.
        rung: where to write a byte to wake the thread, say the number of a signal.
        thread: itself.
    """

    def __init__(self) -> None:
        self.world = dist.group.WORLD
        self._board = Board(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())
        self._bell, self.rung = os.pipe()
        for end in (self._bell, self.rung):
            os.set_blocking(end, False)
        self._answered = 0
        self._asking = threading.Lock()
        self._wanted: list[Place] = []
        self._found, self._is_told = "", threading.Event()
        self._stuck_at: Any = None
        self._stuck_since, self._patience = 0.0, PATIENCE
        self._ended = ""
        self._latest: tuple[float, Place, tuple[str, bool]] = (0.0, None, ("", False))
        self.thread = threading.Thread(target=self._watch, name="minifsdp ledger", daemon=True)
        self.thread.start()

    # --- called by the main thread ---

    def ask(self, place: Place) -> str:
        """2. Where every rank is, and where those of the group of ``place`` part."""
        with self._asking:
            self._is_told.clear()
            self._wanted, self._found = [place], ""
            self._ring()
            self._is_told.wait(2 * LIMIT + 2 * TICK)
            return self._found or report.UNKNOWN

    def say_last_words(self, ended: str) -> None:
        """The program is over; returns when the board has it, or does not answer."""
        self._ended = self._ended or ended
        self._ring()
        self.thread.join(LIMIT)

    def _ring(self, byte: int = 0) -> None:
        with suppress(OSError):
            os.write(self.rung, bytes([byte]))

    # --- the thread ---

    def _watch(self) -> None:
        # Without the store no rank can be asked: its host has gone, and this rank will hear of it by its groups.
        with suppress(dist.DistError, RuntimeError, ValueError, OSError):
            while not self._ended:
                signals = self._listen()
                if self._ended:
                    break
                self._answer()
                if signal.SIGTERM in signals:
                    self._report_sigterm()
                if self._wanted:
                    self._found, _ = self._ask_all(self._wanted.pop())
                    self._is_told.set()
                elif self._is_stuck():
                    self._examine()
            self._board.put_up(LAST_WORDS, report.state_of_this_rank(self._ended), report.lines_of_this_rank())
        self._is_told.set()

    def _listen(self) -> bytes:
        ready, _, _ = select.select([self._bell], [], [], TICK)
        return os.read(self._bell, 64) if ready else b""

    def _answer(self) -> None:
        asked = self._board.num_asked()
        if asked > self._answered:
            self._answered = asked
            self._board.put_up(asked, report.state_of_this_rank(), report.lines_of_this_rank())

    def _ask_all(self, place: Place) -> tuple[str, bool]:
        """What is known of all ranks, in words; whether in the group of ``place`` two have parted or one has ended."""
        at, of, found = self._latest
        if of == place and place is not None and time.monotonic() - at < LIMIT:
            # Asked a moment ago for another reason.
            return found
        number = self._board.ask()
        self._answer()
        states = self._board.answers(number, LIMIT)
        of_group = {rank: states.get(rank) for rank in (place[0].ranks if place else ())}
        has_ended = any(state["ended"] for state in of_group.values() if state)
        parted = report.parting(*place, of_group, self._board.lines_of) if place else {}
        lines = {rank: self._board.lines_of(rank) for rank in of_group}
        found = report.in_words(states, parted) + _written(states, lines, parted), has_ended or bool(parted)
        self._latest = time.monotonic(), place, found
        return found

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
        waiting, place = ledger.waiting, ledger.latest
        if waiting is not None:
            place = waiting.chain, waiting.epoch
        if place is None:
            return
        text, is_in_vain = self._ask_all(place)
        if is_in_vain and self._waits_for() == self._stuck_at:
            ledger.verdict = RuntimeError(message("waits-in-vain", ranks=list(place[0].ranks), report=text))
            if waiting is None:
                # A device waits, and the main thread does not know yet.
                print(ledger.verdict, file=sys.stderr, flush=True)
            close(place[0].process_group)

    def _report_sigterm(self) -> None:
        """4. The main thread ends the process when it comes back to Python; if it does not, this one does."""
        waiting = ledger.waiting
        if waiting is not None:
            text, _ = self._ask_all((waiting.chain, waiting.epoch))
            print(message("told-to-end", report=text), file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGTERM)


def close(process_group: Any) -> None:
    """Ends all that is waited for in a group, on this rank and, as connections close, on the others."""
    for device in process_group._device_types:
        with suppress(RuntimeError):
            backend: Any = process_group._get_backend(device)
            is_gloo = type(backend) is dist.ProcessGroupGloo
            if is_gloo:
                # It has no abort. But a wait that runs out of time closes all connections of its group.
                other = (backend.rank() + 1) % backend.size()
                backend.recv([torch.zeros(1)], other, _TAG).wait(timedelta(milliseconds=1))
            else:
                backend.abort()


def _written(states: dict[int, State | None], lines: dict[int, Any], parted: dict[int, Any]) -> str:
    """Writes what is known to a file; says where it is."""
    folder = Path(os.environ.get("MINIFSDP_LEDGER_DIR", tempfile.gettempdir()))
    run = os.environ.get("TORCHELASTIC_RUN_ID", os.getppid())
    path = folder / f"minifsdp-ledger-{run}-rank{rank_of_this_process()}.json"
    try:
        path.write_text(json.dumps({"states": states, "lines": lines, "parted": parted}), encoding="utf-8")
    except OSError as error:
        return f"\n(could not be written to a file: {error})"
    return f"\nTo draw it: python -m minifsdp.ledger {path}"
