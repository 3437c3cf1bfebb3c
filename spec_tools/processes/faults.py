"""The faults of a rank, calls at which they occur, and the check of the checkpoints that they leave."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

FAULTS = ("raises", "exits", "is killed", "is stopped", "is slow")


def commit(fault: str, seconds: float = 0.0) -> None:
    """The action of a faulty rank; a slow rank sleeps for ``seconds``."""
    if fault == "raises":
        raise ValueError("a bad batch")
    if fault == "exits":
        sys.exit(0)
    if fault == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(seconds)


@contextmanager
def calling(
    owner: Any, name: str, *, before: Callable[[], object] = lambda: None, after: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Calls functions before and after each call of ``owner.name`` in the block."""
    original = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        before()
        result = original(*arguments, **options)
        after()
        return result

    with mock.patch.object(owner, name, call):
        yield


def whole_checkpoints(runs: Path) -> list[str]:
    """Names of the checkpoints.

    Raises:
        AssertionError: a checkpoint is incomplete or changed.
    """
    found = sorted(runs.glob("step-*"))
    for checkpoint in found:
        listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
        assert {path.name for path in checkpoint.iterdir()} == {*listed, "manifest.json"}, checkpoint.name
        for name, seal in listed.items():
            contents = (checkpoint / name).read_bytes()
            intact = [seal["bytes"], seal["sha256"]] == [len(contents), hashlib.sha256(contents).hexdigest()]
            assert intact, f"{name} of {checkpoint.name} is damaged"
    return [checkpoint.name for checkpoint in found]
