"""The tutorials, and what a run of each has printed and drawn.

``python -m docs_build.lessons`` runs all of them as a reader would and records what they say, with the date, the
machine and the versions, in ``docs/data/lessons.json``; with names (``overlap digits``) only those. The site is built
from the record, because some need packages that a reader of the documentation may not have.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from docs_build.busy import Others
from docs_build.order import ROOT
from docs_build.results import machine
from docs_build.source import read_module

__all__ = ["LESSONS", "Lesson", "record", "recorded"]

RECORD = ROOT / "docs" / "data" / "lessons.json"


@dataclass(frozen=True)
class Lesson:
    """One script.

    Attributes:
        name: ``tutorials/overlap.py``.
        num_ranks: with which it is recorded.
        arguments: with which it is recorded; ``FOLDER`` stands for an empty folder.
    """

    name: str
    num_ranks: int = 2
    arguments: str = ""

    @property
    def command(self) -> str:
        """What a reader types."""
        return f"torchrun --standalone --nproc-per-node {self.num_ranks} {self.name} {self.arguments}".rstrip()

    @property
    def title(self) -> str:
        """The first words of its first sentence: ``Mixed precision and batch norm``."""
        words = re.match(r"[^:;,?]+\??", re.sub(r"[`*]", "", read_module(self.name).title))
        assert words
        return words[0]

    @property
    def extras(self) -> list[str]:
        """The packages that its essay says to install."""
        found = re.search(r"python -m pip install (.+)", read_module(self.name).essay)
        return found[1].split() if found else []

    @property
    def comes_out(self) -> str:
        """What its essay says of its output.

        Raises:
            ValueError: it says nothing.
        """
        found = re.search(r"^Out comes: (.+?)\n\n", read_module(self.name).essay, re.MULTILINE | re.DOTALL)
        if not found:
            raise ValueError(f"the docstring of {self.name} has no paragraph that begins with 'Out comes:'")
        return " ".join(found[1].split())


LESSONS = [
    Lesson("tutorials/train_gpt.py", arguments="--timeline FOLDER/timeline.svg"),
    Lesson("tutorials/naive_fsdp.py"),
    Lesson("tutorials/digits.py"),
    Lesson("tutorials/finetune_minilm.py"),
    Lesson("tutorials/t5_summarise.py"),
    Lesson("tutorials/knobs.py"),
    Lesson("tutorials/checkpoints.py"),
    Lesson("tutorials/overlap.py", arguments="--folder FOLDER"),
    Lesson("tutorials/hybrid.py", num_ranks=4),
    Lesson("tutorials/fully_shard.py", arguments="--explicit-prefetch --mixed-precision --dcp FOLDER"),
    Lesson("tutorials/offload.py"),
    Lesson("tutorials/migrate.py", num_ranks=4),
]


def record(names: list[str]) -> None:
    """Runs the lessons of these names, or all, and writes what they say.

    Raises:
        RuntimeError: one of them has failed.
    """
    found = recorded()
    for lesson in LESSONS:
        if not names or Path(lesson.name).stem in names:
            print(lesson.command, flush=True)
            found[lesson.name] = _run(lesson)
    RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _run(lesson: Lesson) -> dict[str, Any]:
    launcher = [sys.executable, "-m", "torch.distributed.run", *shlex.split(lesson.command)[1:]]
    with tempfile.TemporaryDirectory() as folder:
        command = [part.replace("FOLDER", folder) for part in launcher]
        begin, others = time.monotonic(), Others()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{lesson.name} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        pictures = {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.svg"))}
        return {
            "output": done.stdout.replace(folder, "FOLDER"),
            "pictures": pictures,
            "seconds": round(time.monotonic() - begin),
            "others": others.cores(),
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine(),
        }


@cache
def recorded() -> dict[str, dict[str, Any]]:
    """What was recorded, by the lesson's name."""
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return found


if __name__ == "__main__":
    record(sys.argv[1:])
