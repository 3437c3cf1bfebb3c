"""Waits for conditions that become true a moment later.

Another thread or process is not finished when this one continues: gloo's thread releases a tensor after it has
reported completion, and a killed process is listed until it has ended. A test that checks at once sometimes fails,
more often on a busy machine. A test that checks until a limit fails only if the condition never becomes true.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["comes_true"]


def comes_true(condition: Callable[[], object], limit: float = 10.0) -> bool:
    """Whether the condition becomes true within ``limit`` seconds."""
    until = time.monotonic() + limit
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
