"""Finds a free port. It imports nothing of torch, so that a program starts fast."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

__all__ = ["free_port"]

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def candidates() -> list[int]:
    """Ports in random order, without those that the system gives to processes that request no specific port.

    A port of that range can be taken after `free_port` has found it, and before a test listens on it.
    """
    first, last = (int(text) for text in EPHEMERAL.read_text().split()) if EPHEMERAL.exists() else (32768, 60999)
    # Many systems extend the range down to 10000, and a container can show the range of another system.
    ports = [port for port in range(2_000, 10_000) if not first <= port <= last]
    random.SystemRandom().shuffle(ports)
    return ports or list(range(2_000, 10_000))


_unused = candidates()


def free_port() -> int:
    """A free port of this machine. One process never gets the same port twice, so its programs cannot conflict."""
    while _unused:
        port = _unused.pop()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port between 2000 and 10000 is free")
