"""The failure lab: its scripts as shown on its pages, and the recorded output of both ranks.

``python -m docs_build.failures`` runs all scripts with torchrun, both the broken and the mended form. It records the
output of each rank, the date and the machine in ``docs/data/failure_lab.json``. With names (``slow_rank``) it only runs
those scripts. The text about a script is on its page, ``docs/lab/NAME.md``, which starts with these lines::

    symptom: The loss does not fall.
    family: silent                        one of `FAMILIES`
    rows: CTOR-05                         requirement IDs
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from textwrap import indent, wrap
from typing import Any

from docs_build.generator import front_matter
from docs_build.order import ROOT
from docs_build.results import machine

__all__ = ["FAMILIES", "Failure", "failures", "mend", "record", "recorded", "table", "what_happens"]

LAB = ROOT / "tutorials" / "failure_lab"
PAGES = ROOT / "docs" / "lab"
RECORD = ROOT / "docs" / "data" / "failure_lab.json"
FAMILIES = {"silent": "silent wrong answer", "hang": "hang", "loud": "loud"}
MEND = "# ---- one way to fix it; try your own first ----"
START = 'if __name__ == "__main__":'
# PyTorch's own log lines, which contain times and socket numbers.
LOGGED = re.compile(r"^\[rank\d\]:\[W.*\n", re.MULTILINE)


@dataclass(frozen=True)
class Failure:
    """One script.

    Attributes:
        name: of the script, without ``.py``.
        title: of its page.
        symptom: what a user observes.
        family: one of `FAMILIES`.
        rows: IDs of the requirements that define the behaviour.
    """

    name: str
    title: str
    symptom: str
    family: str
    rows: tuple[str, ...]

    @property
    def command(self) -> str:
        """The command that a reader types."""
        return f"torchrun --nproc-per-node 2 tutorials/failure_lab/{self.name}.py"

    @property
    def text(self) -> str:
        """The source of the script."""
        return (LAB / f"{self.name}.py").read_text(encoding="utf-8")


@cache
def failures() -> list[Failure]:
    """All scripts that have a page, the silent ones first."""
    found = [_read(path) for path in PAGES.glob("*.md") if path.stem != "index"]
    return sorted(found, key=lambda one: (list(FAMILIES).index(one.family), one.name))


def _read(page: Path) -> Failure:
    text, head = front_matter(page.read_text(encoding="utf-8"))
    title = text.strip().splitlines()[0].removeprefix("# ")
    return Failure(page.stem, title, head["symptom"], head["family"], tuple(head["rows"].split()))


def _find(name: str) -> Failure:
    return {one.name: one for one in failures()}[name]


# ---- what the pages show ----


def table() -> str:
    """A table of all scripts, in Markdown."""
    lines = ["| script | symptom | family | rows |", "|---|---|---|---|"]
    for one in failures():
        rows = ", ".join(one.rows)
        lines.append(f"| [`{one.name}.py`]({one.name}.md) | {one.symptom} | {FAMILIES[one.family]} | {rows} |")
    return "\n".join(lines)


def what_happens(name: str) -> str:
    """The script without its mended form, and the output of each rank, folded.

    Raises:
        KeyError: the script has no page, or was never recorded.
    """
    one, run = _find(name), recorded()[name]
    script = one.text.partition(MEND)[0].rstrip()
    parts = [
        _fence("python", script),
        "Guess the output before you unfold it. To run the script:",
        _fence("", f"{one.command}"),
        *[
            f'??? failure "What rank {rank} says"\n\n{indent(_fence("text", _folded(words)), "    ")}'
            for rank, words in enumerate(run["broken"])
        ],
        f"<small>Recorded {run['date']}; {run['machine']}</small>",
    ]
    return "\n\n".join(parts) + "\n"


def mend(name: str) -> str:
    """The mended form, and the output of each rank with it."""
    one, words = _find(name), recorded()[name]["mended"]
    code = one.text.partition(MEND)[2].partition(START)[0].strip()
    command = f"$ {one.command} --mended\n\n"
    return "\n\n".join([_fence("python", code), _fence("text", command + "\n".join(words))]) + "\n"


def _fence(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def _folded(words: str) -> str:
    """Wraps lines that are wider than a page."""
    lines = [wrap(line, 100, subsequent_indent="    ", break_on_hyphens=False) for line in words.splitlines()]
    return "\n".join(part for parts in lines for part in parts)


# ---- the record ----


def record(names: list[str]) -> None:
    """Runs the named scripts, or all, and writes their output to the record.

    Raises:
        RuntimeError: a script succeeded or failed unexpectedly.
    """
    found = dict(recorded())
    for path in sorted(LAB.glob("*.py")):
        if path.stem == "lab" or (names and path.stem not in names):
            continue
        print(path.stem, flush=True)
        found[path.stem] = {
            "broken": _run(path, fails=True),
            "mended": _run(path, "--mended", fails=False),
            "date": datetime.now(UTC).date().isoformat(),
            "machine": machine(),
        }
        RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _run(script: Path, *arguments: str, fails: bool) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launcher, "--redirects", "3", "--log-dir", folder, str(script), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MINIFSDP_LEDGER_DIR": folder}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        words = [_words_of(Path(folder), rank) for rank in range(2)]
    if bool(done.returncode) is not fails:
        raise RuntimeError(f"{script.name} ended with {done.returncode}\n{words}\n{done.stderr}")
    return words


def _words_of(folder: Path, rank: int) -> str:
    """The output of a rank: first its warnings, then what it printed."""
    files = [path for name in ("stderr.log", "stdout.log") for path in folder.glob(f"*/attempt_0/{rank}/{name}")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    text = re.sub(rf"{re.escape(str(folder))}/(minifsdp-ledger)-[\w-]+-(rank\d)", r"\1-\2", text)
    return LOGGED.sub("", text).replace(f"{ROOT}/", "").strip()


@cache
def recorded() -> dict[str, dict[str, Any]]:
    """The recorded runs, by script name."""
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return found


if __name__ == "__main__":
    record(sys.argv[1:])
