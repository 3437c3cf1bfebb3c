"""Finds a free port. It imports nothing of torch, so that a program starts fast."""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ["free_port"]


def free_port() -> int:
    """A free port of this machine, below the range from which the system takes ports for outgoing connections.

    A port of that range can be taken by any other process before a test listens on it.
    """
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("none of 100 ports between 10000 and 32000 is free")
