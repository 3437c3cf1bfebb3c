"""Whether the process of another rank is over, which can be seen from the same machine.

A rank that is killed leaves no last words, and silence proves nothing: who is stopped is silent, too. But the system of
its machine knows. So each rank puts up where its process can be found, and whoever misses its answer looks there. If it
is over, the finder leaves last words in its place, which ranks on other machines read, too. If a whole machine is lost
there is no such rank, and the others wait until their time-out. ::

    machine    its boot, and the space of numbers that its processes have: two containers on it differ in that
    number     of the process

*In torch:* only the launcher knows, and it tells no rank why it ends it.

Spec: LEDGER-18.
"""

from __future__ import annotations

import os
from pathlib import Path

Process = list[str]  # machine and number
_SYSTEM = Path("/proc")


def this_process() -> Process:
    """Where others can find this process; on no machine where the system does not say, as only Linux does."""
    try:
        boot = (_SYSTEM / "sys/kernel/random/boot_id").read_text().strip()
        return [f"{boot} {(_SYSTEM / 'self/ns/pid').readlink()}", str(os.getpid())]
    except OSError:
        return ["", str(os.getpid())]


def is_over(process: Process) -> bool:
    """Whether it has been on this machine and is over, though its parent may not have noticed yet."""
    machine, number = process
    if not machine or machine != this_process()[0]:
        return False
    try:
        # Its name is in parentheses, and may have some of its own.
        state = (_SYSTEM / number / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"
