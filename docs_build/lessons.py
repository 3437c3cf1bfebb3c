"""The tutorials, and the recorded output and pictures of a run of each.

``python -m docs_build.lessons`` runs all of them as a reader would. It records their output, the date, the machine and
the versions in ``docs/data/lessons.json``. With names (``overlap digits``) it only runs those. The site is built from
the record, because some tutorials need packages that a reader of the documentation may not have.

Pictures need a machine on which nothing else runs. A run with pictures that are not `even` is repeated; if no run is
even, nothing is written. ``first_page`` is one more run, of which only the picture is kept, for README and Home.
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
from docs_build.record import EVEN
from docs_build.results import machine
from docs_build.source import read_module

__all__ = ["EVEN", "FIRST_PAGE", "LESSONS", "Lesson", "record", "recorded", "unevenness", "where"]

RECORD = ROOT / "docs" / "data" / "lessons.json"
TRIES = 10
# The title of a box in a picture.
BOX = re.compile(r"<title>(?P<kind>[FB]) [\w.]*\d+, at [\d.]+ ms, for (?P<length>[\d.]+) ms</title>")


@dataclass(frozen=True)
class Lesson:
    """One script.

    Attributes:
        name: ``tutorials/overlap.py``.
        num_ranks: number of ranks of the recorded run.
        arguments: of the recorded run; ``FOLDER`` stands for an empty folder.
        about_pictures: an introduction to the pictures, as HTML.
    """

    name: str
    num_ranks: int = 2
    arguments: str = ""
    about_pictures: str = ""

    @property
    def command(self) -> str:
        """The command that a reader types."""
        return f"torchrun --standalone --nproc-per-node {self.num_ranks} {self.name} {self.arguments}".rstrip()

    @property
    def title(self) -> str:
        """The first words of the essay's first sentence: ``Mixed precision and batch norm``."""
        words = re.match(r"[^:;,?]+\??", re.sub(r"[`*]", "", read_module(self.name).title))
        assert words
        return words[0]

    @property
    def extras(self) -> list[str]:
        """The packages that the essay installs."""
        found = re.search(r"python -m pip install (.+)", read_module(self.name).essay)
        return found[1].split() if found else []

    @property
    def comes_out(self) -> str:
        """The description of the output in the essay.

        Raises:
            ValueError: there is none.
        """
        found = re.search(r"^Output: (.+?)\n\n", read_module(self.name).essay, re.MULTILINE | re.DOTALL)
        if not found:
            raise ValueError(f"the docstring of {self.name} has no paragraph that begins with 'Output:'")
        return " ".join(found[1].split())


LESSONS = [
    Lesson("tutorials/train_gpt.py", arguments="--timeline FOLDER/timeline.svg"),
    Lesson("tutorials/naive_fsdp.py"),
    Lesson("tutorials/digits.py"),
    Lesson("tutorials/finetune_minilm.py"),
    Lesson("tutorials/t5_summarise.py"),
    Lesson("tutorials/knobs.py"),
    Lesson("tutorials/checkpoints.py"),
    Lesson(
        "tutorials/overlap.py",
        arguments="--folder FOLDER",
        about_pictures="All pictures have the same time axis. The two CPU cores do both computation and communication, "
        "so an early all-gather slows down the computation, and prefetching gains nothing here. Compare the order of "
        "operations. For an accelerator, which computes and communicates at the same time, see "
        '<a href="../learn/schedule.html">Prefetching</a>.',
    ),
    Lesson("tutorials/hybrid.py", num_ranks=4),
    Lesson("tutorials/fully_shard.py", arguments="--explicit-prefetch --mixed-precision --dcp FOLDER"),
    Lesson("tutorials/offload.py"),
    Lesson("tutorials/migrate.py", num_ranks=4),
]

# The picture of README and Home: few small blocks, so that its text stays readable there.
FIRST_PAGE = "first_page"
_FIRST = Lesson("tutorials/train_gpt.py", arguments="--blocks 3 --width 128 --steps 12 --timeline FOLDER/timeline.svg")
_FIRST_PICTURE = ROOT / "docs" / "assets" / "timeline.svg"


def record(names: list[str]) -> None:
    """Runs the named lessons, or all, and writes their output to the record.

    Raises:
        RuntimeError: a lesson failed, or other programs disturbed all of its runs.
    """
    found = recorded()
    todo = {Path(lesson.name).stem: (lesson.name, lesson) for lesson in LESSONS} | {FIRST_PAGE: (FIRST_PAGE, _FIRST)}
    for key, lesson in [todo[name] for name in names or todo]:
        print(lesson.command, flush=True)
        found[key] = _run_evenly(lesson)
    if FIRST_PAGE in (names or todo):
        (picture,) = found[FIRST_PAGE].pop("pictures").values()
        _FIRST_PICTURE.write_text(picture, encoding="utf-8")
    RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _run_evenly(lesson: Lesson) -> dict[str, Any]:
    worst = []
    for _ in range(TRIES):
        run = _run(lesson)
        worst.append(max(map(unevenness, run["pictures"].values()), default=1.0))
        if worst[-1] <= EVEN:
            return run
        print(f"  again: equal blocks differ by a factor of {worst[-1]:.1f}", flush=True)
    raise RuntimeError(f"{lesson.name}: equal blocks differ by a factor of at least {min(worst):.1f}: a busy machine?")


def unevenness(picture: str) -> float:
    """The longest over the shortest forward of equal blocks in a timeline, or backward if its ratio is greater."""
    lengths: dict[str, list[float]] = {}
    for box in BOX.finditer(picture):
        lengths.setdefault(box["kind"], []).append(float(box["length"]))
    return max((max(some) / min(some) for some in lengths.values()), default=1.0)


def _run(lesson: Lesson) -> dict[str, Any]:
    # Like torchrun, but `docs_build.watched` runs the script and records arrivals.
    words = shlex.split(lesson.command.replace(lesson.name, f"-m docs_build.watched {lesson.name}", 1))[1:]
    launcher = [sys.executable, "-m", "torch.distributed.run", *words]
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
    """The recorded runs, by lesson name."""
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return found


def where(key: str) -> str:
    """Date and machine of a recorded lesson."""
    run = recorded()[key]
    return f"Recorded on {run['date']}; {run['machine']}."


if __name__ == "__main__":
    record(sys.argv[1:])
