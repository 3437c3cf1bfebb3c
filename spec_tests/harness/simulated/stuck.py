"""Collectives that cannot complete, because a rank never arrives: how the CPU waits for them, aborts and time-outs.

On NCCL, such a collective occupies its stream. The CPU continues, until it waits for the device. The wait ends when
another thread aborts the communicator, or when the group's time-out has passed. An aborted kernel ends without an
error, and leaves arbitrary values in its outputs. The group's next collective raises an error.

    the main thread     all-reduce  backward  item() .............. garbage  all-gather: error
    the watchdog                                          abort

In the simulation, a test calls `SimulatedNccl.lose_peers`. The outputs of later collectives are filled with NaN, and
every operator that reads them is reported (`garbage`): at once, because the simulation executes in program order.

Spec: SIM-14.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from spec_tests.harness.simulated.clocks import Clock

__all__ = ["Group", "Stuck"]


class Group(Protocol):
    """A process group with a time-out."""

    seconds: float

    def abort(self) -> None:
        """Ends the collectives of the group."""


class Stuck:
    """The collectives that cannot complete, and the waits for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._groups: dict[tuple[int, int], Group] = {}

    def add(self, stream: int, number: int, group: Group) -> None:
        """Adds a collective: operation ``number`` of ``stream``."""
        with self._changed:
            self._groups[stream, number] = group

    def end(self, group: Group | None = None) -> None:
        """Ends all collectives of a group, or of all groups. The waits for them continue."""
        with self._changed:
            self._groups = {item: other for item, other in self._groups.items() if group not in (None, other)}
            self._changed.notify_all()

    def wait(self, clock: Clock) -> None:
        """Waits until no operation of the clock is such a collective, and no other one is before it on its stream.

        Raises:
            RuntimeError: the time-out of a group has passed. Its collectives are aborted.
        """
        begin = time.monotonic()
        while group := self._group_in(clock):
            with self._changed:
                self._changed.wait(0.05)
            if time.monotonic() - begin > group.seconds:
                group.abort()
                raise RuntimeError(f"a collective has not completed within the time-out of {group.seconds:g} s")

    def _group_in(self, clock: Clock) -> Group | None:
        if not self._groups:
            return None
        with self._changed:
            found = (group for (stream, number), group in self._groups.items() if clock.get(stream, 0) >= number)
            return next(found, None)
