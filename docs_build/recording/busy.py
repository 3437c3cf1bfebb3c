"""The load that other programs caused on a machine during a measurement.

A time has little meaning without it: if another program uses one of two cores, a lesson on two ranks may take twice as
long. Linux counts the working seconds of all cores; those of this process and its children are subtracted::

    10 seconds on 2 cores: the cores worked 17 seconds, 12 for this process      other programs used half a core
"""

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")


class Others:
    """Measures the load from the construction of the object on."""

    def __init__(self) -> None:
        self._began, self._worked, self._ours = time.monotonic(), _worked(), _ours()

    def cores(self) -> float | None:
        """The average number of cores that other programs used since then; ``None`` if the system has no counter."""
        worked = _worked()
        if worked is None or self._worked is None:
            return None
        others = (worked - self._worked) - (_ours() - self._ours)
        return round(max(0.0, others / (time.monotonic() - self._began)), 1)


def _worked() -> float | None:
    """Seconds during which all cores together have worked since the machine was started."""
    if not STAT.exists():
        return None
    # cpu  user nice system idle iowait irq softirq steal
    user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _ours() -> float:
    """Seconds of CPU time of this process and of its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
