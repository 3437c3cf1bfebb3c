"""Detects on the same machine whether the process of another rank has ended.

A killed rank leaves no exit record, and a missing answer is no proof: a stopped process does not answer either. But the
operating system lists its processes. So each rank publishes its machine and process number, and if it does not answer,
a rank on the same machine checks its process. If the process has ended, the checking rank publishes an exit record for
it, which ranks on other machines read, too. If a machine is lost, the others wait until their timeout. ::

    machine    its boot ID and the PID namespace, which differs between two containers on one machine
    number     the process number

*In torch:* only the launcher detects this, and it does not report to the ranks why it ends them.

Spec: LEDGER-18.
"""

from __future__ import annotations

import os
from pathlib import Path

Process = list[str]  # machine and number
_SYSTEM = Path("/proc")


def this_process() -> Process:
    """Machine and number of this process; the machine is empty if unknown, as on systems other than Linux."""
    try:
        boot = (_SYSTEM / "sys/kernel/random/boot_id").read_text().strip()
        return [f"{boot} {(_SYSTEM / 'self/ns/pid').readlink()}", str(os.getpid())]
    except OSError:
        return ["", str(os.getpid())]


def is_over(process: Process) -> bool:
    """Whether a process of this machine has ended, including a process that its parent has not reaped yet."""
    machine, number = process
    if not machine or machine != this_process()[0]:
        return False
    try:
        # The state follows the process name in parentheses, which may itself contain parentheses.
        state = (_SYSTEM / number / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"
