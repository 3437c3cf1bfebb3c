"""The board: where every rank puts up what it knows of itself, for all others to read.

The store of ``torch.distributed`` is a dictionary that all ranks reach, on a connection of its own. It works when
collectives do not, which is when it is needed::

    asked      3             how often anybody has asked where every rank is
    0/process  [...]         rank 0: the machine, and its process there
    0/state    {...}         rank 0: where it is, how far its groups are, which question this answers
    0/wanted   1             how often anybody has wanted the list of rank 0
    0/list     {...}         rank 0: its last collectives, one line each

Who wants to know counts ``asked`` up; every rank sees that within a tick and puts up its state, some hundred bytes. A
list is long, and wanted of few ranks only: of one for each state that there is. Who has ended has left last words,
which answer all questions; for one that was killed a rank on its machine leaves them (``neighbours.py``). Who neither
answers nor has any is stopped, or its machine is lost.

Only the watcher's thread may call these functions: where the store's host is stopped, they do not return. Where it has
ended, they raise, and go on to do so: each further message would only have C++ write warnings.

*In torch:* NCCL's watchdog signals over the same store that a rank has timed out.

Spec: LEDGER-04, LEDGER-13, LEDGER-15, LEDGER-18.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from minifsdp.ledger import neighbours

State = dict[str, Any]
Line = list[Any]  # chain, epoch, number, what, where, iteration, bytes
LAST_WORDS = 1 << 60  # answers any question
_PAUSE = 0.05  # seconds between two looks


class Board:
    """One job's board.

    Args:
        store: of the default group; a connection of its own is made, if it can be.
        rank, num_ranks: of this process, and of all.
        meanwhile: called while others are waited for, who may be waiting for this one.

    Attributes:
        is_gone: the store's host has ended.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int, meanwhile: Callable[[], None]) -> None:
        own = store.clone() if hasattr(store, "clone") else store
        self._store = PrefixStore("minifsdp/ledger", own)
        self.rank, self.num_ranks, self._meanwhile = rank, num_ranks, meanwhile
        self.is_gone = self._is_open = False

    def ask(self) -> int:
        """Asks all ranks where they are; returns the number of the question."""
        return int(self._call("add", "asked", 1))

    def wishes(self) -> tuple[int, int]:
        """How many questions there were, and how often this rank's list was wanted."""
        counts = ["asked", f"{self.rank}/wanted"]
        if not self._is_open:
            # What is not there would be waited for.
            for count in counts:
                self._call("add", count, 0)
            self._call("set", f"{self.rank}/process", json.dumps(neighbours.this_process()))
            self._is_open = True
        asked, wanted = self._call("multi_get", counts)
        return int(asked), int(wanted)

    def put_up(self, number: int, state: State) -> None:
        """Where a rank is, mostly this one, as its answer to all questions up to ``number``."""
        self._call("set", f"{state['rank']}/state", json.dumps({**state, "answers": number}))

    def put_up_list(self, number: int, lines: list[Line]) -> None:
        """This rank's last collectives, for all who have wanted them up to ``number``."""
        self._call("set", f"{self.rank}/list", json.dumps({"lines": lines, "answers": number}))

    def states(self, number: int, limit: float) -> dict[int, State | None]:
        """What each rank answers to question ``number``; ``None`` for those that have not after ``limit`` seconds."""
        return self._answers("state", dict.fromkeys(range(self.num_ranks), number), limit)

    def is_lost(self, rank: int) -> bool:
        """Whether the process of a rank was on this machine, and is over."""
        return (process := self._read(f"{rank}/process")) is not None and neighbours.is_over(process)

    def lists(self, ranks: Iterable[int], limit: float) -> dict[int, list[Line]]:
        """The last collectives of some ranks; without those that have not put them up after ``limit`` seconds."""
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
        """What was put up under ``key``; ``None`` if nothing was."""
        return json.loads(self._call("get", key)) if self._call("check", [key]) else None

    def _call(self, name: str, *arguments: Any) -> Any:
        if self.is_gone:
            raise ConnectionError
        try:
            return getattr(self._store, name)(*arguments)
        except (RuntimeError, ValueError, OSError):
            self.is_gone = True
            raise
