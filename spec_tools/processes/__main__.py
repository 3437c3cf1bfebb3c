"""``python -m spec_tools.processes PROGRAM API``: a rank of a program of ``programs.py`` or ``around.py``.

Prints ``right`` when the program has finished, unless the program prints it itself at its end. The last exit
handler prints how long the main thread has slept since then. Time in which a busy machine runs other processes
does not count.
"""

from __future__ import annotations

import atexit
import sys
import time
from pathlib import Path

awake_at = []


def seconds_asleep() -> float:
    """The time that the main thread has slept since a fixed time, neither running nor waiting for a core."""
    ran, waited, _ = map(int, Path("/proc/self/schedstat").read_text().split())
    return time.monotonic() - (ran + waited) / 1e9


@atexit.register
def tell() -> None:
    """Registered before all other exit handlers, so it runs after all of them."""
    for before in awake_at:
        print(f"slept {seconds_asleep() - before:.2f} s", flush=True)


def main() -> None:
    import torch

    from spec_tools.processes import around, programs

    name, api = sys.argv[1:]
    torch.set_num_threads(1)
    try:
        getattr(around if hasattr(around, name) else programs, name)(api)
        if not name.startswith("exit_handlers"):
            print("right", flush=True)
    finally:
        awake_at.append(seconds_asleep())


if __name__ == "__main__":
    main()
