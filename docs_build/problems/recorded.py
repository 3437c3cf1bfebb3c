"""The programs of the chapter "What goes wrong", and their recorded output.

``python -m docs_build.problems.recorded`` runs all programs of the folder ``programs`` on two ranks, and writes the
output of each rank to ``docs/data/problems.json``. With names (``early_stop``) it only runs those. A test runs all
programs again and compares.

From a traceback, the record keeps the lines of the program and the error. Each program ends in time, because its
process group has a timeout, and minifsdp reports most hangs earlier.
"""

import re
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from docs_build.reading.order import ROOT
from docs_build.reading.text import fitting
from docs_build.recording import records

STARTER = Path(__file__).parent / "start.py"
PROGRAMS = Path(__file__).parent / "programs"
NAME = "problems"
NUM_RANKS = 2
LIMIT = 60.0  # seconds
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in .*\n(?P<code>    .*)\n', re.MULTILINE)
_ERROR = re.compile(r"^\w+(\.\w+)*(Error|Exception|Interrupt)\b", re.MULTILINE)


def names() -> list[str]:
    """All programs."""
    return sorted(path.stem for path in PROGRAMS.glob("*.py"))


@cache
def record() -> dict[str, Any]:
    """The recorded runs, by program."""
    return records.load(NAME)


def source(name: str) -> str:
    """The text of a program."""
    return (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")


def program(name: str) -> str:
    """The source in Markdown, and the command that runs it."""
    path = (PROGRAMS / f"{name}.py").relative_to(ROOT)
    command = f"torchrun --nproc-per-node {NUM_RANKS} {path}"
    return f"```python\n{source(name).rstrip()}\n```\n\n```\n{command}\n```"


def output(name: str) -> str:
    """The recorded output of each rank in Markdown."""
    run = record()[name]
    lines = [f"[rank {rank}] {line}" for rank, text in enumerate(run["output"]) for line in text.splitlines()]
    said = fitting("\n".join(lines))
    return f"```text\n{said}\n```\n\n<small>Recorded {run['date']}; {run['machine']}</small>"


def line(name: str, code: str) -> int:
    """The number of the line of a program that contains ``code``.

    Raises:
        ValueError: there is no such line, or more than one.
    """
    (found,) = [n for n, text in enumerate(source(name).splitlines(), start=1) if code in text]
    return found


def said(name: str, pattern: str, rank: int = 0) -> tuple[str, ...]:
    """The groups of a pattern in the recorded output of a rank.

    Raises:
        LookupError: the output does not match.
    """
    found = re.search(pattern, record()[name]["output"][rank])
    if found is None:
        raise LookupError(f"the output of {name} does not contain {pattern!r}")
    return found.groups()


def run(name: str) -> list[tuple[int | None, str]]:
    """Runs a program: for each rank its exit status and its output, as in the record."""
    # Not at the top, because the site is also built where the tests are not installed.
    from spec_tests.harness.programs import outcome_of_ranks

    # Like torchrun, this process hosts the store, so that a rank can end before the others.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "MINIFSDP_LEDGER_DIR": folder}
        arguments = (str(PROGRAMS / f"{name}.py"), str(store.port))
        ranks = outcome_of_ranks(STARTER, *arguments, num_ranks=NUM_RANKS, environment=environment, limit=LIMIT)
        return [(status, shortened(text.replace(folder, "."))) for status, text in ranks]


def shortened(text: str) -> str:
    """An output without PyTorch's log lines and without the lines of a traceback that are not in a program."""
    text = re.sub(r"^\[rank\d\]:\[[WE].*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\[rank\d\]: ", "", text, flags=re.MULTILINE)
    before, _, traceback = text.rpartition("Traceback (most recent call last):\n")
    if not traceback or not (error := _ERROR.search(traceback)):
        return text.strip()
    before = before.partition("Traceback (most recent call last):\n")[0]
    frames = [
        f"{Path(frame['file']).name}:{frame['line']}: {frame['code'].strip()}"
        for frame in _FRAME.finditer(traceback)
        if Path(frame["file"]).parent == PROGRAMS
    ]
    message = re.sub(r"(minifsdp-ledger)-[\w-]*(rank\d)[\w-]*", r"\1-\2", traceback[error.start() :])
    message = re.sub(r"(\[127.0.0.1\]):\d+", r"\1", message)
    return "\n".join([*before.strip().splitlines(), *frames, message.strip()])


def main(chosen: list[str]) -> None:
    """Runs the named programs, or all, and writes their output to the record."""
    found = dict(record())
    for name in chosen or names():
        ranks = run(name)
        found[name] = {
            "output": [text for _, text in ranks],
            "status": [status for status, _ in ranks],
            **records.stamp(),
        }
        print(name, *found[name]["output"], sep="\n", end="\n\n", flush=True)
    records.save(NAME, {name: found[name] for name in names() if name in found})


if __name__ == "__main__":
    main(sys.argv[1:])
