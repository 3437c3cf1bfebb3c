"""Runs a command without network access, except for a loopback interface of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["can_cut", "run"]

# In a new network namespace even the loopback interface is down. Ranks need it to connect to each other.
_UP = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    fcntl.ioctl(s, 0x8914, struct.pack("16sH14s", b"lo", 0x1 | 0x40, b""))
os.execvp(sys.argv[1], sys.argv[1:])
"""


def can_cut() -> bool:
    """Whether this machine allows a user to create a network namespace."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0


def run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs the command, without network access if this machine allows that."""
    prefix = ["unshare", "-rn", sys.executable, "-c", _UP] if can_cut() else []
    return subprocess.run([*prefix, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False)
