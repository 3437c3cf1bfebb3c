"""Tests of the programs in ``tutorials/``: they run, and their output is correct."""

from __future__ import annotations

import os

__all__ = ["without_launcher"]

_LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def without_launcher(**others: str) -> dict[str, str]:
    """The environment of a user who starts a script without a launcher."""
    return {name: value for name, value in os.environ.items() if name not in _LAUNCHER} | others
