"""The store channel: each rank publishes its state in the store of ``torch.distributed``, and reads that of the others.

The store is a dictionary that all ranks reach on a connection of its own. It works when collectives do not::

    asked      3             number of questions so far; any rank increases it
    host       0             1 as soon as the rank that hosts the store has exited
    0/process  [...]         machine and process of rank 0
    0/state    {...}         state of rank 0, and the number of the question that it answers
    0/wanted   1             how often other ranks asked for the list of rank 0
    0/list     {...}         the last collectives of rank 0, one line each

A rank that needs the states of the others increases ``asked``. Every watchdog sees that within a tick and publishes its
state, about one hundred bytes. A list is long, so a rank asks only for a few of them. A rank that ends publishes an
*exit record*, a state that answers all questions. If a process was killed, another rank on its machine publishes the
record (``neighbours.py``).

Only the watchdog thread may call these functions: if the host of the store is stopped, they do not return. If the host
has ended, they raise, also in later calls, because each further message would make C++ write a warning.

*In torch:* NCCL's watchdog signals over the same store that a rank has timed out.

Spec: LEDGER-04, LEDGER-13, LEDGER-15, LEDGER-16, LEDGER-18.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from minifsdp.ledger import neighbours

State = dict[str, Any]
Line = list[Any]  # chain, epoch, number, what, where, iteration, bytes, identity
EXIT_RECORD = 1 << 60  # the number of an answer to all questions
_PAUSE = 0.05  # seconds between two reads
_HOST = 0  # the rank that hosts the store, if no launcher does


class Board:
    """The store channel of one life of the default process group.

    Args:
        store: of the default group.
        rank, num_ranks: of this process, and of all.
        meanwhile: called while this rank waits for other ranks, because they may be waiting for this rank.

    Attributes:
        is_gone: the host of the store has ended.
        of_host: the exit record of the store's host, if it left one.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, meanwhile: Callable[[], None]) -> None:
        own = store.clone() if hasattr(store, "clone") else store
        self._store = PrefixStore("minifsdp/ledger", own)
        self.rank, self.num_ranks, self._meanwhile = rank, num_ranks, meanwhile
        self.is_gone = self._is_open = False
        self.of_host: State | None = None

    def ask(self) -> int:
        """Asks all ranks for their state; returns the number of the question."""
        return int(self._call("add", "asked", 1))

    def wishes(self) -> tuple[int, int]:
        """The number of questions so far, and how often other ranks asked for this rank's list."""
        counts = ["asked", f"{self.rank}/wanted", "host"]
        if not self._is_open:
            # Reading a key that does not exist would block.
            for count in counts:
                self._call("add", count, 0)
            self._call("set", f"{self.rank}/process", json.dumps(neighbours.this_process()))
            self._is_open = True
        asked, wanted, has_left = map(int, self._call("multi_get", counts))
        if has_left and self.of_host is None:
            # Kept, because the store ends with its host.
            self.of_host = self._read(f"{_HOST}/state")
        return asked, wanted

    def put_up(self, number: int, state: State) -> None:
        """Publishes a state, usually of this rank, as the answer to all questions up to ``number``."""
        self._call("set", f"{state['rank']}/state", json.dumps({**state, "answers": number}))

    def put_up_list(self, number: int, lines: list[Line]) -> None:
        """Publishes this rank's last collectives for all requests up to ``number``."""
        self._call("set", f"{self.rank}/list", json.dumps({"lines": lines, "answers": number}))

    def announce_exit(self) -> None:
        """Notifies all ranks that the host of the store exits; its exit record is already published."""
        self._call("add", "host", 1)

    def states(self, number: int, limit: float) -> dict[int, State | None]:
        """The answer of each rank to question ``number``; ``None`` if there is none after ``limit`` seconds."""
        return self._answers("state", dict.fromkeys(range(self.num_ranks), number), limit)

    def is_lost(self, rank: int) -> bool:
        """Whether the process of a rank ran on this machine and has ended."""
        return (process := self._read(f"{rank}/process")) is not None and neighbours.is_over(process)

    def lists(self, ranks: Iterable[int], limit: float) -> dict[int, list[Line]]:
        """The last collectives of some ranks, without ranks that do not answer within ``limit`` seconds."""
        wanted = {rank: int(self._call("add", f"{rank}/wanted", 1)) for rank in ranks}
        return {rank: said["lines"] for rank, said in self._answers("list", wanted, limit).items() if said}

    def _answers(self, what: str, numbers: Mapping[int, int], limit: float) -> dict[int, State | None]:
        found: dict[int, State | None] = dict.fromkeys(numbers)
        until = time.monotonic() + limit
        while True:
            self._meanwhile()
            for rank in [rank for rank, said in found.items() if said is None]:
                said = self._read(f"{rank}/{what}")
                if said is not None and said["answers"] >= numbers[rank]:
                    found[rank] = said
            if None not in found.values() or time.monotonic() > until:
                return found
            time.sleep(_PAUSE)

    def _read(self, key: str) -> Any:
        """The value of ``key``, or ``None``."""
        return json.loads(self._call("get", key)) if self._call("check", [key]) else None

    def _call(self, name: str, *arguments: Any) -> Any:
        if self.is_gone:
            raise ConnectionError
        try:
            return getattr(self._store, name)(*arguments)
        except (RuntimeError, ValueError, OSError):
            self.is_gone = True
            raise
