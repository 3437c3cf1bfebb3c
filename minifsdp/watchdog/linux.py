"""The functions that need Linux: the states of processes and threads, from the folder ``/proc``.

Other systems do not have this folder. Training does not need it, and the package uses no signals and no forks. Without
it, two things are off:

* A rank that was killed is reported as a rank that does not answer, see `has_ended`.
* The end of a program does not wait for threads of gloo, see `another_thread_runs`.

Worked example, a rank of this machine with process ID 4211 that the system has ended::

    /proc/4211/stat       4211 (python) Z 4180 ...       Z: it has ended, but its parent has not noticed

*In torch:* the agent of ``torchrun`` waits for its processes, and does not inform the other ranks.

Spec: LEDGER-18, HEALTHY-06, START-11.
"""

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from minifsdp.engine.messages import message

SYSTEM = Path("/proc")


def note_what_is_off() -> None:
    """Called on rank 0 when the watchdog starts. Prints what does not work if the folder does not exist."""
    if not this_process()[0]:
        text = message("without-proc", system=sys.platform, folder=SYSTEM)
        print(text, file=sys.stderr, flush=True)


def this_process() -> list[str]:
    """Machine and number of this process; the machine is empty if unknown, as on systems other than Linux.

    The machine is its boot ID and the PID namespace, which differs between two containers on one machine.
    """
    try:
        boot = (SYSTEM / "sys/kernel/random/boot_id").read_text().strip()
        return [f"{boot} {(SYSTEM / 'self/ns/pid').readlink()}", str(os.getpid())]
    except OSError:
        return ["", str(os.getpid())]


def has_ended(process: list[str]) -> bool:
    """Whether a process of this machine (see `this_process`) has ended, even if its parent has not reaped it yet."""
    machine, number = process
    if not machine or machine != this_process()[0]:
        return False
    try:
        return _state_in(SYSTEM / number) in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def another_thread_runs() -> bool:
    """Whether another thread of this process runs or waits for a CPU. ``False`` if the system does not show it."""
    for thread in (SYSTEM / "self/task").glob("*"):
        with suppress(OSError):
            if (
                thread.name != str(threading.get_native_id())
                and _state_in(thread) == "R"
            ):
                return True
    return False


def _state_in(folder: Path) -> str:
    """The letter of a process or thread for its state."""
    # The state follows the name in parentheses, which may itself contain parentheses.
    return (folder / "stat").read_text().rpartition(")")[2].split()[0]
