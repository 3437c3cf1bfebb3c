"""The watchdog: a thread that publishes the state of this rank, and queries the others when this rank waits too long.

It wakes a few times a second, or when it is called, and does one of three things:

1. *It answers.* If another rank sent a query, it publishes this rank's state, even if the main thread is blocked.
2. *It queries for the main thread* after a failed collective: the error then reports the position of every rank.
3. *It queries by itself* if the main thread waits for a collective longer than a few seconds. If the answers prove
   that the collective cannot complete, the reason becomes the `CollectiveLog.fatal_error` and the group's connections
   are closed, so each rank's wait ends in an error within seconds instead of at the group's time-out. There are two
   proofs: at one position of the group, two ranks issued different collectives; or a rank has ended without issuing
   this one. Otherwise the rank keeps waiting, and prints the state of each rank once.

Worked example: rank 1 omits ``layers.2`` and continues with the all-gather of ``layers.3``. Rank 0 waits for
``layers.2``, and rank 1 for ``layers.3``. After two seconds the first rank that queries the other finds that they
diverge and closes the group. Both raise.

The main thread may be blocked in C++, where it can neither answer nor query. So this needs a thread. It is started by
``_thread`` and not listed by ``threading``, so programs that list or join their threads do not see it.

The thread continues after an exception in one read of the store, for instance because the store's host has ended.

On an accelerator, collectives run after the CPU has continued. The main thread also counts as waiting if an event after
the last collective is not complete. The reason is printed immediately, and raised when the main thread issues its next
collective or an optimizer steps, because the results on the device are invalid. The group is aborted to free the
device. The event is only queried after the main thread issued nothing for `PATIENCE` seconds, and in a mode in which a
query does not invalidate a capture of a CUDA graph. This abort has not run on a GPU yet.

*In torch:* NCCL has a watchdog in C++, which signals a time-out over the same store. Gloo has none.

Spec: LEDGER-03, LEDGER-04, LEDGER-12 to LEDGER-16, LEDGER-18, LEDGER-21, HEALTHY-01.
"""

import _thread
import ctypes
import os
import sys
import threading
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from minifsdp.checks.collective_log import Position, log
from minifsdp.engine.events import events
from minifsdp.engine.messages import message
from minifsdp.watchdog import report

_UNSENT_TAG = 0x6D696E6B  # the tag of a message that is never sent
TICK = 0.25  # seconds between two looks at the store
PATIENCE = (
    2.0  # seconds that the main thread may wait before this thread queries the others
)
DESTROY_LIMIT = 1.0  # seconds that a rank waits, after it has destroyed its group, until others have done so
LIMIT = 2.0  # seconds that other ranks have to answer


class Watchdog:
    """The watchdog of one default process group.

    Args:
        store: the store of the default group.
        is_host: whether the store ends with this process.

    Attributes:
        failed_at: the line that raised the error that ends this program.
        last: the findings of the last report.
    """

    def __init__(self, store: Any, is_host: bool) -> None:
        self._is_host = is_host
        self._process = os.getpid()
        self._channel = report.StoreChannel(store, self._answer)
        # The numbers of the last requests that this rank has answered.
        self._answered = {"state": 0, "list": 0}
        self._answered_at = 0.0
        self._asking = threading.Lock()
        self._wanted: list[Position | None] = []
        self.last: report.Findings | None = None
        self._is_found = threading.Event()
        self._stuck_at: Any = None
        self._stuck_since = 0.0
        self._patience = PATIENCE
        self._has_printed = False
        self._ended = ""
        self._stopped = threading.Event()
        self._has_ended = threading.Event()
        self.failed_at = ""
        self._called = threading.Event()
        # The first look is immediate. After it, other ranks can determine whether this process has ended.
        self._called.set()
        _thread.start_new_thread(self._run, ())

    @property
    def is_of_this_process(self) -> bool:
        """Whether the thread runs in this process, and not in one that has forked this process."""
        return self._process == os.getpid()

    # --- called by the main thread ---

    def ask(self, position: Position | None) -> str:
        """2. A report about all ranks, with the position where the ranks of the group of ``position`` diverge."""
        if not self.is_of_this_process:
            return ""
        with self._asking:
            self._is_found.clear()
            self._wanted = [position]
            self.last = None
            self._called.set()
            self._is_found.wait(3 * LIMIT + 2 * TICK)
            self.last = self.last or self._find_alone()
            return self.last.text()

    def stop(self) -> None:
        """Ends the thread without an exit record: the group was destroyed, and the program continues."""
        self._stopped.set()
        self._called.set()
        if self.is_of_this_process and self._has_ended.wait(LIMIT):
            with suppress(Exception):
                self._channel.delete_keys(DESTROY_LIMIT)

    def leave(self, ended: str) -> None:
        """Publishes an exit record, because the program ends.

        If this process hosts the store, it waits for two ticks, in which the other watchdogs copy the record. After a
        failure it waits until all ranks have ended, for a few seconds at most, so that they can still query each other.
        """
        is_failure = ended != report.IN_ORDER
        if is_failure and self._is_host:
            # Ends the waits of all other ranks at once.
            for sequence in list(log.sequences.values()):
                close(sequence.process_group())
        self._ended = ended
        self._called.set()
        self._has_ended.wait(LIMIT)
        if self._is_host:
            with suppress(Exception):
                self._channel.states(
                    report.EXIT_RECORD, 2 * LIMIT if is_failure else 2 * TICK
                )

    # --- the thread ---

    def _run(self) -> None:
        while not (self._ended or self._stopped.is_set()):
            try:
                self._look()
            except Exception:
                # For example, the store's host has ended. The next look may not need the store.
                self._stopped.wait(TICK)
        if self._ended:
            with suppress(Exception):
                self._publish("list", report.EXIT_RECORD)
                self._publish("state", report.EXIT_RECORD)
                if self._is_host:
                    self._channel.announce_exit()
        self._is_found.set()
        self._has_ended.set()

    def _look(self) -> None:
        """Sleeps for a moment or until it is called, and then does one of the three things if necessary."""
        was_asked = time.monotonic() - self._answered_at < PATIENCE
        self._called.wait(report.HASTE if was_asked else TICK)
        self._called.clear()
        if self._wanted:
            position = self._wanted.pop()
            try:
                self.last = self._find(position, self._channel.ask())
            finally:
                self._is_found.set()
        self._answer()
        if self._is_stuck():
            self._examine(on_device=events.last_event is not None)

    def _answer(self) -> None:
        """1. Answers the questions since the last look. Raises `RuntimeError` if the group was destroyed."""
        if self._stopped.is_set():
            raise RuntimeError
        for what, number in self._channel.requests().items():
            if number > self._answered[what]:
                self._publish(what, number)

    def _publish(self, what: str, number: int) -> None:
        """Publishes this rank's state or list of collectives, for all requests up to ``number``."""
        if what == "list":
            answer: report.State = {"lines": report.lines_of_this_rank()}
        else:
            answer = report.state_of_this_rank(self._ended, self.failed_at)
            self._answered_at = time.monotonic()
        self._channel.publish(self._channel.rank, what, number, answer)
        self._answered[what] = number

    def _find(self, position: Position | None, number: int) -> report.Findings:
        """The answers to a question; if ranks differ at ``position``, also their lists."""
        channel = self._channel
        states = channel.states(number, LIMIT)
        for rank in [
            rank
            for rank, state in states.items()
            if state is None and channel.is_lost(rank)
        ]:
            # An exit record for a rank whose process has ended without publishing one.
            lost: report.State = {
                "rank": rank,
                "ended": report.LOST,
                "waits": "",
                "sequences": {},
            }
            states[rank] = lost
            channel.publish(rank, "state", report.EXIT_RECORD, lost)
        if position is not None:
            epoch, ranks = report.different_ranks(*position[:2], states)
            if len(ranks) > 1:
                lists = channel.lists(ranks[: report.MOST_RANKS], LIMIT)
                at = (position[0].key, epoch, lists)
                return report.Findings(
                    states,
                    lists,
                    report.divergence(*at),
                    report.divergence(*at, report.OF_UNIT),
                )
        return report.Findings(states, {channel.rank: report.lines_of_this_rank()})

    def _find_alone(self) -> report.Findings:
        """The findings if no other rank can be queried."""
        channel = self._channel
        mine = report.state_of_this_rank(failed_at=self.failed_at)
        known = [mine] if channel.of_host is None else [mine, channel.of_host]
        return report.Findings(
            {state["rank"]: state for state in known},
            {channel.rank: report.lines_of_this_rank()},
            why=report.GONE if channel.is_gone else report.SILENT,
        )

    def _is_stuck(self) -> bool:
        """Whether the main thread has waited for the same collective, or for the device, longer than expected."""
        waiting = log.waiting
        event = events.last_event
        # Only the position is stored, because a reference to the collective would keep tensors alive.
        at = event if waiting is None else waiting.position
        if at != self._stuck_at:
            self._stuck_at = at
            self._stuck_since = time.monotonic()
            self._patience = PATIENCE
        if at is None or time.monotonic() - self._stuck_since <= self._patience:
            return False
        if waiting is None and _is_complete(event):
            if events.last_event is event:
                events.last_event = None
            return False
        return True

    def _examine(self, *, on_device: bool = False) -> None:
        """3. Checks whether the main thread waits for a slow rank, or for a collective that cannot complete.

        Args:
            on_device: whether an accelerator has perhaps not completed the last collective.
        """
        self._patience *= 2
        position = log.last_position
        is_known = log.waiting is not None
        if position is None:
            return
        # If another rank has asked a moment ago, those answers are recent enough. A proof needs new answers.
        just_now = time.monotonic() - self._answered_at < 2 * TICK
        found = self._find(
            position, self._answered["state"] if just_now else self._channel.ask()
        )
        if not found.prove_a_hang(position, on_cpu=is_known):
            self._print_once(position, found)
            return
        found = self._find(position, self._channel.ask())
        if (
            found.prove_a_hang(position, on_cpu=is_known)
            and log.last_position == position
        ):
            sequence = position[0]
            self.last = found
            log.fatal_error = message(
                "waits-in-vain", ranks=list(sequence.ranks), report=found.text()
            )
            if on_device or not is_known:
                # On an accelerator, the main thread may not wait, or the abort may end the process.
                print(log.fatal_error, file=sys.stderr, flush=True)
            close(sequence.process_group())

    def _print_once(self, position: Position, found: report.Findings) -> None:
        """After a long wait, one of the waiting ranks prints the state of each rank. All ranks keep waiting."""
        waits = [
            rank
            for rank in position[0].ranks
            if (state := found.states[rank]) and state["waits"]
        ]
        if (
            self._patience >= 16 * PATIENCE
            and not self._has_printed
            and self._channel.rank in waits[:1]
        ):
            print(
                message("still-waiting", report=found.text()),
                file=sys.stderr,
                flush=True,
            )
            self._has_printed = True


def _is_complete(event: Any) -> bool:
    """Whether an accelerator has reached an event. Sets the device, because this thread has no current device."""
    device = getattr(event, "device", None)
    with (
        nullcontext()
        if device is None
        else torch.get_device_module(device).device(device)
    ):
        # In the mode of a new thread, the query would invalidate a capture of a CUDA graph in any thread. In mode 1,
        # `cudaStreamCaptureModeThreadLocal`, it does not. torch has loaded the library for the whole process.
        if exchange := getattr(
            ctypes.CDLL(None), "cudaThreadExchangeStreamCaptureMode", None
        ):
            exchange(ctypes.byref(ctypes.c_int(1)))
        return bool(event.query())


def close(process_group: Any) -> None:
    """Ends all waits in a group, on this rank and, because the connections close, on the other ranks.

    Waits that ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` adds before a collective end when the other rank's process ends.
    """
    for device in getattr(process_group, "_device_types", ()):
        with suppress(RuntimeError):
            backend: Any = process_group._get_backend(device)
            # DETAIL wraps the backend.
            backend = getattr(backend, "wrapped_pg", backend)
            is_gloo = type(backend) is dist.ProcessGroupGloo
            if is_gloo:
                # The backend cannot abort. But a receive that times out closes all connections of its group.
                other = (backend.rank() + 1) % backend.size()
                unsent = torch.zeros(1, dtype=torch.uint8, device="cpu")
                backend.recv([unsent], other, _UNSENT_TAG).wait(
                    timedelta(milliseconds=1)
                )
            else:
                backend.abort()
