"""Tests of the programs in ``tutorials/``: they run, and their output is correct."""

from __future__ import annotations

import os
import subprocess

__all__ = ["started_by_a_user"]

_LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def started_by_a_user(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command without the environment variables of a rank, and with some more variables."""
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
