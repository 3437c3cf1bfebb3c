"""What a process with a simulated accelerator does for the hunt: plays scenarios, or makes one smaller.

Such a process is a rank of a pool, alone among invented ones. Its results come back in a file.
"""

from __future__ import annotations

import json
import pathlib
import pickle
import tempfile
from typing import Any

from spec_tests.harness.pool import Failure, RankPool
from spec_tests.harness.worker import Task
from spec_tests.streams.scenario import from_json, to_json
from spec_tests.streams.scenarios import play, simplest

__all__ = ["findings_of", "simplest_of"]

NUM_SCHEDULES = 6
LIMIT = 120.0  # seconds


def findings_of(texts: list[str]) -> list[str | None]:
    """For each scenario, given as JSON, what is wrong with it."""
    try:
        return _asked("play_all", {"texts": texts})  # type: ignore[no-any-return]
    except Failure as failure:
        if len(texts) == 1:
            return [str(failure)]
    return [finding for text in texts for finding in findings_of([text])]


def simplest_of(text: str) -> str:
    """The scenario without all that can be left out, as far as a minute goes."""
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


# --- there ---


def play_all(texts: list[str], file: str) -> None:
    """The findings of all, as JSON."""
    pathlib.Path(file).write_text(json.dumps([play(from_json(text), NUM_SCHEDULES).finding for text in texts]))


def make_smaller(text: str, file: str) -> None:
    """The smaller one, as JSON."""
    pathlib.Path(file).write_text(json.dumps(to_json(simplest(from_json(text), NUM_SCHEDULES))))


# The pool looks for the undecorated body of a test under this name.
for _body in (play_all, make_smaller):
    _body.body_on_a_rank = _body  # type: ignore[attr-defined]
