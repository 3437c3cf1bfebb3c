"""The board: where every rank puts up what it knows of itself, for all others to read.

The store of ``torch.distributed`` is a dictionary that all ranks reach, on a connection of its own. It works when
collectives do not, which is when it is needed::

    asked      3             how often anybody has asked
    0/state    {...}         rank 0: where it is, how far its groups are, which question this answers
    0/list     [...]         rank 0: its last collectives, one line each

Who wants to know counts ``asked`` up; every rank sees that within a tick and puts up its state. Who has ended has left
last words, which answer all questions. Who neither answers nor has left any was killed, or is stopped.

Only the watcher's thread may call these functions: where the store's host is stopped, they do not return.

*In torch:* NCCL's watchdog signals over the same store that a rank has timed out.

Spec: LEDGER-04.
"""

from __future__ import annotations

import json
import time
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

State = dict[str, Any]
LAST_WORDS = 1 << 60  # answers any question
_PAUSE = 0.05  # seconds between two looks


class Board:
    """One job's board.

    Args:
        store: of the default group; a connection of its own is made, if it can be.
        rank, num_ranks: of this process, and of all.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        own = store.clone() if hasattr(store, "clone") else store
        self._store = PrefixStore("minifsdp/ledger", own)
        self.rank, self.num_ranks = rank, num_ranks

    def ask(self) -> int:
        """Asks all ranks; returns the number of the question."""
        return int(self._store.add("asked", 1))

    def num_asked(self) -> int:
        """How many questions there were."""
        return int(self._store.add("asked", 0))

    def put_up(self, number: int, state: State, lines: list[list[Any]]) -> None:
        """This rank's answer to all questions up to ``number``."""
        self._store.set(f"{self.rank}/list", json.dumps(lines))
        self._store.set(f"{self.rank}/state", json.dumps({**state, "answers": number}))

    def answers(self, number: int, limit: float) -> dict[int, State | None]:
        """What each rank answers to question ``number``; ``None`` for those that have not after ``limit`` seconds."""
        found: dict[int, State | None] = dict.fromkeys(range(self.num_ranks))
        until = time.monotonic() + limit
        while True:
            for rank in [rank for rank, state in found.items() if state is None]:
                state = self._read(f"{rank}/state", {"answers": 0})
                if state["answers"] >= number:
                    found[rank] = state
            if None not in found.values() or time.monotonic() > until:
                return found
            time.sleep(_PAUSE)

    def lines_of(self, rank: int) -> list[list[Any]]:
        """The last collectives of a rank that has answered."""
        lines: list[list[Any]] = self._read(f"{rank}/list", [])
        return lines

    def _read(self, key: str, default: Any) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else default
