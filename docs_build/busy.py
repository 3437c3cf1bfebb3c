"""How busy others kept a machine while something was measured on it.

A time says little without it: on two cores of which another program takes one, a lesson on two ranks may take twice as
long. Linux counts the seconds in which its cores worked; what we and those we started have worked is subtracted::

    10 seconds on 2 cores: cores worked 17 seconds, we 12      others kept half a core busy
"""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["Others"]

STAT = Path("/proc/stat")


class Others:
    """Watches from its construction on."""

    def __init__(self) -> None:
        self._began, self._worked, self._ours = time.monotonic(), _worked(), _ours()

    def cores(self) -> float | None:
        """How many cores others have kept busy since, on average; ``None`` where the system does not tell."""
        worked = _worked()
        if worked is None or self._worked is None:
            return None
        others = (worked - self._worked) - (_ours() - self._ours)
        return round(max(0.0, others / (time.monotonic() - self._began)), 1)


def _worked() -> float | None:
    """Seconds in which all cores together have worked since the machine was started."""
    if not STAT.exists():
        return None
    # cpu  user nice system idle iowait irq softirq steal
    user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _ours() -> float:
    """Seconds that this process has worked, and those that it has started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
