"""What comes true only a moment later.

A thread or another process is not done at the very moment at which this one goes on: gloo's thread lets go of a tensor
after it has said that it is done, and a process that was killed is listed until its end is over. So a test that looks
at once fails now and then, on a busy machine more often; one that looks until a limit fails if it never comes true.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["comes_true"]


def comes_true(condition: Callable[[], object], limit: float = 10.0) -> bool:
    """Whether it does within ``limit`` seconds."""
    until = time.monotonic() + limit
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
