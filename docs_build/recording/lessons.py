"""The tutorials, and the recorded output and pictures of a run of each.

``python -m docs_build.recording.lessons`` runs all of them as a reader would. It records their output, the date, the
machine and the versions in ``docs/data/lessons.json``. With names (``overlap digits``) it only runs those. The site is
built from the record, because some tutorials need packages that a reader of the documentation may not have.

Pictures need a machine on which nothing else runs. If equal blocks of a picture take times that differ by more than
`EVEN`, nothing is written. ``first_page`` is another run. Only its picture is kept, for README and Home.
"""

import re
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from docs_build.reading.order import ROOT
from docs_build.reading.source import read_module
from docs_build.recording import records
from docs_build.recording.record import EVEN

# The title of a box in a picture.
BOX = re.compile(r"<title>(?P<kind>[FB]) [\w.]*\d+, at [\d.]+ ms, for (?P<length>[\d.]+) ms</title>")


@dataclass(frozen=True)
class Lesson:
    """One script.

    Attributes:
        name: ``tutorials/overlap.py``.
        num_ranks: number of ranks of the recorded run.
        arguments: of the recorded run; ``FOLDER`` stands for an empty folder.
    """

    name: str
    num_ranks: int = 2
    arguments: str = ""

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


# In the order in which a reader should take them.
LESSONS = [
    Lesson("tutorials/naive_fsdp.py"),
    Lesson("tutorials/fully_shard.py", arguments="--explicit-prefetch --mixed-precision --dcp FOLDER"),
    Lesson("tutorials/overlap.py", arguments="--folder FOLDER"),
    Lesson("tutorials/knobs.py"),
    Lesson("tutorials/checkpoints.py"),
    Lesson("tutorials/hybrid.py", num_ranks=4),
    Lesson("tutorials/offload.py"),
    Lesson("tutorials/migrate.py", num_ranks=4),
    Lesson("tutorials/train_gpt.py", arguments="--timeline FOLDER/timeline.svg"),
    Lesson("tutorials/digits.py"),
    Lesson("tutorials/finetune_minilm.py"),
    Lesson("tutorials/t5_summarise.py"),
]

# The picture of README and Home: few small blocks, so that its text stays readable there.
FIRST_PAGE = "first_page"
_FIRST = Lesson("tutorials/train_gpt.py", arguments="--blocks 3 --width 128 --steps 12 --timeline FOLDER/timeline.svg")
_FIRST_PICTURE = ROOT / "docs" / "assets" / "timeline.svg"


def record(names: list[str]) -> None:
    """Runs the named lessons, or all, and writes their output to the record.

    Raises:
        RuntimeError: a lesson failed, or other programs disturbed its run.
    """
    found = recorded()
    todo = {Path(lesson.name).stem: (lesson.name, lesson) for lesson in LESSONS} | {FIRST_PAGE: (FIRST_PAGE, _FIRST)}
    for key, lesson in [todo[name] for name in names or todo]:
        print(lesson.command, flush=True)
        found[key] = _run(lesson)
        uneven = max(map(unevenness, found[key]["pictures"].values()), default=1.0)
        if uneven > EVEN:
            raise RuntimeError(f"{lesson.name}: equal blocks differ by a factor of {uneven:.1f}: a busy machine?")
    if FIRST_PAGE in (names or todo):
        (picture,) = found[FIRST_PAGE].pop("pictures").values()
        _FIRST_PICTURE.write_text(picture, encoding="utf-8")
    records.save("lessons", found)


def unevenness(picture: str) -> float:
    """The longest over the shortest forward of equal blocks in a timeline, or backward if its ratio is greater."""
    lengths: dict[str, list[float]] = {}
    for box in BOX.finditer(picture):
        lengths.setdefault(box["kind"], []).append(float(box["length"]))
    return max((max(some) / min(some) for some in lengths.values()), default=1.0)


def _run(lesson: Lesson) -> dict[str, Any]:
    # `docs_build.recording.watched` runs the script and records arrivals.
    words = shlex.split(lesson.command.replace(lesson.name, f"-m docs_build.recording.watched {lesson.name}", 1))[1:]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        done = records.torchrun([word.replace("FOLDER", folder) for word in words], HF_HUB_OFFLINE="1")
        if done.returncode:
            raise RuntimeError(f"{lesson.name} ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return {
            "output": done.stdout.replace(folder, "FOLDER"),
            "pictures": {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob("*.svg"))},
            "seconds": round(time.monotonic() - begin),
            **records.stamp(),
        }


@cache
def recorded() -> dict[str, dict[str, Any]]:
    """The recorded runs, by lesson name."""
    return records.load("lessons")


def where(key: str) -> str:
    """Date and machine of a recorded lesson."""
    run = recorded()[key]
    return f"Recorded on {run['date']}; {run['machine']}."


if __name__ == "__main__":
    record(sys.argv[1:])
