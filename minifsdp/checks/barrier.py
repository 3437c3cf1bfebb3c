"""A barrier before a state dict, as an observer sees it: the order of collectives before it, and its entry in the log.

1. *Before* the barrier, the answers of earlier comparisons are read.
2. *At* the barrier, the ranks compare the collectives that they have issued since the last comparison.
3. *While* this rank waits, the barrier is in the collective log, so reports of other ranks show it.
4. *If a rank does not arrive*, the entry is removed, because the other ranks have none. Then all ranks can call again.

Worked example: rank 1 saves another model before this one. Then the text `BarrierCheck.order` differs, and both ranks
raise an error with a report about the collectives at which they have parted.

*In torch:* ``monitored_barrier`` of gloo names missing ranks and does not compare collectives.

Spec: SD-FULL-03, ORDER-11, LEDGER-23.
"""

from collections.abc import Callable
from typing import Any

from minifsdp.checks.collective import Collective
from minifsdp.checks.collective_log import log
from minifsdp.engine.mesh import Group


class BarrierCheck:
    """An observer of one barrier of a group. `Events.barrier` creates it.

    Args:
        group: the ranks that wait for each other.

    Attributes:
        order: a text that is equal on all ranks if they have issued the same collectives in the group.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sequence = log.sequence_of(group)
        self._before = self._sequence.now
        epoch, number, digest, _ = self._before
        self._position = (self._sequence, epoch, number)
        self.order = f"; collectives {epoch} {number} {digest}"

    def wait(self, wait: Callable[..., None], *arguments: Any) -> None:
        """3. Calls ``wait``, with an entry in the log. ``wait`` raises `TimeoutError` if a rank does not arrive."""
        Collective("barrier", self._group, [], wait, arguments, checks_size=False)

    def is_over(self) -> bool:
        """Whether no further collective can complete, so that this rank stops to wait."""
        return bool(log.fatal_error)

    def undo(self) -> str:
        """4. Called if a rank has not arrived. Returns the report about all ranks."""
        report = log.diagnosis(self._position)
        self._sequence.undo(self._before)
        return report

    def begin_epoch(self) -> str:
        """2. Called if the texts of the ranks differ. Returns the report about all ranks."""
        report = log.diagnosis(self._position)
        self._sequence.begin_epoch()
        return report
