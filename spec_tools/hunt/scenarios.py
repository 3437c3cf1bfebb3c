"""Runs or reduces scenarios for the hunt, in a process with a simulated accelerator.

The process is the only real rank of its pool; the other ranks are fake. It returns its results in a file.
"""

from __future__ import annotations

import json
import pathlib
import pickle
import tempfile
from typing import Any

from spec_tests.harness.pool import Failure, RankPool
from spec_tests.harness.worker import Task
from spec_tests.random_programs.description import from_json, to_json
from spec_tests.streams.scenarios import play, simplest

__all__ = ["findings_of", "simplest_of"]

NUM_SCHEDULES = 6
LIMIT = 120.0  # seconds


def findings_of(texts: list[str]) -> list[str | None]:
    """The failure of each scenario, which is given as JSON, or ``None``."""
    try:
        return _asked("play_all", {"texts": texts})  # type: ignore[no-any-return]
    except Failure as failure:
        if len(texts) == 1:
            return [str(failure)]
    return [finding for text in texts for finding in findings_of([text])]


def simplest_of(text: str) -> str:
    """The scenario, reduced for up to a minute; the original one if the process fails."""
    try:
        return _asked("make_smaller", {"text": text})  # type: ignore[no-any-return]
    except Failure:
        return text


def _asked(name: str, arguments: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "answer.json")
        pool = RankPool(1, "simulated", is_alone=True)
        try:
            pool.run(Task(__name__, name, pickle.dumps({**arguments, "file": str(file)}), LIMIT, ()))
        finally:
            pool.close()
        return json.loads(file.read_text())


# --- in the worker process ---


def play_all(texts: list[str], file: str) -> None:
    """Writes the findings of all scenarios as JSON."""
    pathlib.Path(file).write_text(json.dumps([play(from_json(text), NUM_SCHEDULES).finding for text in texts]))


def make_smaller(text: str, file: str) -> None:
    """Writes the reduced scenario as JSON."""
    pathlib.Path(file).write_text(json.dumps(to_json(simplest(from_json(text), NUM_SCHEDULES))))


# The pool finds the undecorated function of a test under this name.
for _body in (play_all, make_smaller):
    _body.body_on_a_rank = _body  # type: ignore[attr-defined]
