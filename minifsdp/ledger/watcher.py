"""The watchdog: a thread that publishes the state of this rank, and queries the others when this rank waits too long.

It wakes twice a second, or when it is called, and does one of four things:

1. *It answers.* If another rank sent a query, it publishes this rank's state, whatever the main thread does.
2. *It queries for the main thread* after a failed collective: the error then reports the position of every rank.
3. *It queries by itself* if the main thread waits for a collective longer than a few seconds. If the answers prove
   that the collective cannot complete, the reason becomes the `ledger.verdict` and the group's connections are closed,
   so each rank's wait ends in an error within seconds instead of at the group's time-out. There are two proofs: at one
   position of the group, two ranks issued different collectives; or a rank has ended that did not issue this one.
   Otherwise the rank keeps waiting, and prints once what each rank is doing.
4. *It reports a SIGTERM.* A launcher sends it to all ranks because one has died. The main thread may be blocked in
   C++, where no Python handler runs, but the signal wakes this thread.

Worked example: rank 1 omits ``layers.2`` and continues with the all-gather of ``layers.3``. Rank 0 waits for
``layers.2``, and rank 1 for ``layers.3``. After two seconds the first rank that queries the other finds that they
diverge and closes the group. Both raise.

The report is part of the error and is written to a file, which ``python -m minifsdp.ledger`` draws. An exception in one
look, for instance because the store's host has ended, ends that look, not the thread.

On an accelerator, collectives run after the CPU has continued. The main thread also counts as waiting if an event
behind the last collective is not complete. The reason is printed immediately, and raised when the main thread issues
its next collective, because the results on the device are invalid. The group is aborted to free the device. The event
is only queried after the main thread issued nothing for `PATIENCE` seconds. No GPU has run this yet.

*In torch:* for NCCL a watchdog in C++ and one file for each rank, which are compared later. Gloo has none.

Spec: LEDGER-03, LEDGER-04, LEDGER-06, LEDGER-12 to LEDGER-17, LEDGER-20, LEDGER-21, HEALTHY-01.
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
from collections.abc import Callable, Mapping
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
from minifsdp.ledger.board import EXIT_RECORD, Board, Line, State

TICK = 0.25  # seconds between two looks at the store
HASTE = 0.05  # the same for some time after a question, because more questions usually follow
PATIENCE = 2.0  # seconds that the main thread may wait before this thread queries the others
LIMIT = 2.0  # seconds that other ranks have to answer
_TAG = 0x6D696E6B  # of a message that is never sent
FOLDER = "MINIFSDP_LEDGER_DIR"

Place = tuple[Chain, int, int] | None  # a chain, an epoch, and a number in it
# The states of all ranks, the lists of some, and the collectives of these where they diverge.
Findings = tuple[dict[int, State | None], dict[int, list[Line]], dict[int, Line]]


class Watcher:
    """The watchdog of one life of the default group.

    Args:
        store: of the default group; referenced only through a copy.
        is_host: whether the store ends with this process.
        handles_sigterm: whether a SIGTERM is to be reported.

    Attributes:
        thread: the thread.
        wake_up_end: of a pipe; a byte written to it wakes the thread.
    """

    def __init__(self, store: Any, is_host: bool, handles_sigterm: Callable[[], bool]) -> None:
        self._is_host, self._handles_sigterm = is_host, handles_sigterm
        self._board = Board(store, dist.get_rank(), dist.get_world_size(), self._answer)
        self._pipe_end, self.wake_up_end = os.pipe()
        for end in (self._pipe_end, self.wake_up_end):
            os.set_blocking(end, False)
        self._answered, self._answered_at, self._listed = 0, 0.0, 0
        self._asking = threading.Lock()
        self._wanted: list[Place] = []
        self._found, self._is_found = "", threading.Event()
        self._stuck_at: Any = None
        self._stuck_since, self._patience = 0.0, PATIENCE
        self._has_printed = self._has_sigterm = False
        self._ended, self._has_left, self._stopped = "", threading.Event(), threading.Event()
        # The first look is immediate: from then on other ranks can see whether this process has ended.
        self._ring()
        self.thread = threading.Thread(target=self._watch, name="minifsdp watchdog", daemon=True)
        self.thread.start()

    # --- called by the main thread ---

    def ask(self, place: Place) -> str:
        """2. A report about all ranks, and about the position where those of the group of ``place`` diverge."""
        with self._asking:
            self._is_found.clear()
            self._wanted, self._found = [place], ""
            self._ring()
            self._is_found.wait(3 * LIMIT + 2 * TICK)
            return self._found or self._alone()

    def stop(self) -> None:
        """Ends the thread without an exit record: the group was destroyed, and the program continues."""
        self._stopped.set()
        self._ring()
        self.thread.join(LIMIT)
        if not self.thread.is_alive():
            os.close(self._pipe_end)
            os.close(self.wake_up_end)

    def leave(self, ended: str, *, is_failure: bool) -> None:
        """Publishes an exit record, because the program ends.

        If this process hosts the store, it stays for two ticks, in which the other watchdogs copy the record. After a
        failure it stays until all ranks have ended, for a few seconds at most, so that they can still ask each other.
        """
        if is_failure and self._is_host:
            # Ends the waits of all other ranks at once.
            for chain in list(ledger.chains.values()):
                close(chain.process_group())
        self._ended = ended
        self._ring()
        self._has_left.wait(LIMIT)
        if self._is_host:
            with suppress(Exception):
                self._board.states(EXIT_RECORD, 2 * LIMIT if is_failure else 2 * TICK)

    def report_sigterm(self) -> None:
        """Called by the handler of the signal."""
        self._has_sigterm = True
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):
            os.write(self.wake_up_end, bytes(1))

    # --- the thread ---

    def _watch(self) -> None:
        while not (self._ended or self._stopped.is_set()):
            try:
                self._look(self._listen())
            except Exception:
                # The store's host has ended, or anything else. The next look may not need it.
                self._stopped.wait(TICK)
        if self._ended:
            with suppress(Exception):
                self._publish_exit(self._ended)
        self._has_left.set()
        self._is_found.set()

    def _listen(self) -> bytes:
        was_asked = time.monotonic() - self._answered_at < PATIENCE
        ready, _, _ = select.select([self._pipe_end], [], [], HASTE if was_asked else TICK)
        return os.read(self._pipe_end, 64) if ready else b""

    def _look(self, signals: bytes) -> None:
        if self._has_sigterm or (signal.SIGTERM in signals and self._handles_sigterm()):
            self._end_by_sigterm()
        if self._wanted:
            place = self._wanted.pop()
            try:
                self._found = _told(*self._find(place, self._board.ask()))
            finally:
                self._is_found.set()
        self._answer()
        if self._is_stuck():
            self._examine()

    def _answer(self) -> None:
        """1. Answers the questions since the last look. Raises `RuntimeError` if the group was destroyed."""
        if self._stopped.is_set():
            raise RuntimeError
        asked, wanted = self._board.wishes()
        if asked > self._answered:
            self._board.put_up(asked, report.state_of_this_rank())
            self._answered, self._answered_at = asked, time.monotonic()
        if wanted > self._listed:
            self._board.put_up_list(wanted, report.lines_of_this_rank())
            self._listed = wanted

    def _publish_exit(self, ended: str) -> None:
        self._answered = self._listed = EXIT_RECORD
        self._board.put_up_list(EXIT_RECORD, report.lines_of_this_rank())
        self._board.put_up(EXIT_RECORD, report.state_of_this_rank(ended))
        if self._is_host:
            self._board.announce_exit()

    def _find(self, place: Place, number: int) -> Findings:
        """The answers to a question; where they differ, also the lists of ranks that differ."""
        states = self._board.states(number, LIMIT)
        for rank in [rank for rank, state in states.items() if state is None and self._board.is_lost(rank)]:
            states[rank] = lost = report.state_of_lost(rank)
            self._board.put_up(EXIT_RECORD, lost)
        if place is not None:
            epoch, ranks = report.unlike(*place[:2], states)
            if len(ranks) > 1:
                lists = self._board.lists(ranks[: report.MOST_RANKS], LIMIT)
                return states, lists, report.divergence(place[0].key, epoch, lists)
        return states, {self._board.rank: report.lines_of_this_rank()}, {}

    def _alone(self) -> str:
        """The report if no other rank can be asked."""
        board, why = self._board, report.GONE if self._board.is_gone else report.SILENT
        states: dict[int, State | None] = {board.rank: report.state_of_this_rank()}
        if board.of_host is not None:
            states[board.of_host["rank"]] = board.of_host
        return _told(states, {board.rank: report.lines_of_this_rank()}, {}, why)

    def _is_stuck(self) -> bool:
        """Whether the main thread has waited for the same collective, or for the device, longer than expected."""
        waiting, event = ledger.waiting, ledger.on_its_way
        # The position, not the collective, which would keep tensors alive.
        at = event if waiting is None else (waiting.chain.key, waiting.epoch, waiting.number)
        if at != self._stuck_at:
            self._stuck_at, self._stuck_since, self._patience = at, time.monotonic(), PATIENCE
        if at is None or time.monotonic() - self._stuck_since <= self._patience:
            return False
        if waiting is None and _is_complete(event):
            if ledger.on_its_way is event:
                ledger.on_its_way = None
            return False
        return True

    def _examine(self) -> None:
        """3. The main thread waits: for a slow rank, or for a collective that cannot complete?"""
        self._patience *= 2
        place, is_known = _last_place(), ledger.waiting is not None
        if place is None:
            return
        # The answers to a question of another rank a moment ago are recent enough, unless they contain a proof.
        just_now = time.monotonic() - self._answered_at < 2 * TICK
        found = self._find(place, self._answered if just_now else self._board.ask())
        if not _cannot_complete(place, found, is_known):
            self._print_once(place, found[0])
            return
        found = self._find(place, self._board.ask())
        if _cannot_complete(place, found, is_known) and _last_place() == place:
            ledger.verdict = {"ranks": list(place[0].ranks), "report": _told(*found)}
            if not is_known:
                # The device waits, but the main thread does not.
                print(ledger.cannot_complete(), file=sys.stderr, flush=True)
            close(place[0].process_group())

    def _print_once(self, place: tuple[Chain, int, int], states: Mapping[int, State | None]) -> None:
        """After a long wait, one of the waiting ranks prints the state of each rank. All ranks keep waiting."""
        waits = [rank for rank in place[0].ranks if (state := states[rank]) and state["waits"]]
        if self._patience >= 16 * PATIENCE and not self._has_printed and self._board.rank in waits[:1]:
            print(message("still-waiting", report=report.in_words(states, {})), file=sys.stderr, flush=True)
            self._has_printed = True

    def _end_by_sigterm(self) -> None:
        """4. Prints the report and ends the process."""
        text = ""
        with suppress(Exception):
            # Other ranks, which get the signal as well, ask at the same time.
            self._publish_exit(report.ENDED_BY_LAUNCHER)
            text = _told(*self._find(_last_place(), self._board.ask()))
        with suppress(Exception):
            print(message("told-to-end", report=text or self._alone()), file=sys.stderr, flush=True)
        if self._is_host:
            time.sleep(TICK)
        os._exit(128 + signal.SIGTERM)


def _is_complete(event: Any) -> bool:
    """Whether an accelerator has reached an event. In this thread, which has no current device."""
    device = getattr(event, "device", None)
    if device is None:
        return bool(event.query())
    with torch.get_device_module(device).device(device):
        return bool(event.query())


def _last_place() -> Place:
    """The position for which the main thread waits, or the last one that it issued."""
    waiting = ledger.waiting
    return ledger.latest if waiting is None else (waiting.chain, waiting.epoch, waiting.number)


def _cannot_complete(place: tuple[Chain, int, int], found: Findings, on_cpu: bool) -> bool:
    """Whether two ranks diverge, or a rank has ended without the collective at ``place``.

    A process that ends on a CPU has sent everything that it issued. The kernels of an accelerator end with the process.
    """
    chain, epoch, number = place
    states, _, diverging = found
    ended = [state for rank in chain.ranks if (state := states[rank]) and state["ended"]]
    return bool(diverging) or any(
        not (on_cpu and report.has_issued(state, chain.key, epoch, number)) for state in ended
    )


def close(process_group: Any) -> None:
    """Ends all waits in a group, on this rank and, because connections close, on the others.

    Waits of ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` before a collective end with the other rank's process.
    """
    for device in getattr(process_group, "_device_types", ()):
        with suppress(RuntimeError):
            backend: Any = process_group._get_backend(device)
            # DETAIL has wrapped it.
            backend = getattr(backend, "wrapped_pg", backend)
            is_gloo = type(backend) is dist.ProcessGroupGloo
            if is_gloo:
                # It has no abort. But a receive that times out closes all connections of its group.
                other = (backend.rank() + 1) % backend.size()
                backend.recv([torch.zeros(1)], other, _TAG).wait(timedelta(milliseconds=1))
            else:
                backend.abort()


def _told(
    states: Mapping[int, State | None], lists: Mapping[int, list[Line]], diverging: Mapping[int, Line], why: str = ""
) -> str:
    """The report. It is also written to a file, and the last line names the file."""
    words = report.in_words(states, diverging, why)
    if os.environ.get(FOLDER) == "off":
        return words
    try:
        path = _write(json.dumps({"states": states, "lines": lists, "diverging": diverging}))
    except OSError as error:
        return f"{words}\n(could not be written to a file: {error})"
    return f"{words}\nTo draw it: python -m minifsdp.ledger {path}"


def _write(text: str) -> Path:
    """A new file that only this user can read, in `FOLDER` or in a new folder. Texts of exceptions may hold secrets."""
    folder = Path(os.environ.get(FOLDER) or tempfile.mkdtemp(prefix="minifsdp-"))
    # Two jobs without an id, two lives of a job, and two reports of a process write to different files.
    run, life = os.environ.get("TORCHELASTIC_RUN_ID", "none"), os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    stem = f"minifsdp-ledger-{run}-{life}-rank{rank_of_this_process()}-{os.getpid()}"
    names = (f"{stem}{f'-{number}' if number else ''}.json" for number in range(100))
    for path in map(folder.joinpath, names):
        with suppress(FileExistsError):
            end = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(end, "w", encoding="utf-8") as file:
                file.write(text)
            return path
    raise FileExistsError
