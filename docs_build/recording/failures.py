"""Runs the scripts of the failure lab, and records the output of both ranks.

``python -m docs_build.recording.failures`` runs all scripts with torchrun, both the broken and the fixed form. It
records the output of each rank, the date and the machine in ``docs/data/failure_lab.json``. With names (``slow_rank``)
it only runs those.
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from docs_build.reading.order import ROOT
from docs_build.recording import records

LAB = ROOT / "tutorials" / "failure_lab"
NAME = "failure_lab"
# PyTorch's own log lines, which contain times and socket numbers.
LOGGED = re.compile(r"^\[rank\d\]:\[W.*\n", re.MULTILINE)


def recorded() -> dict[str, dict[str, Any]]:
    """The recorded runs, by script name."""
    return records.load(NAME)


def record(names: list[str]) -> None:
    """Runs the named scripts, or all, and writes their output to the record.

    Raises:
        RuntimeError: a script succeeded or failed unexpectedly.
    """
    found = recorded()
    for path in sorted(LAB.glob("*.py")):
        if path.stem == "lab" or (names and path.stem not in names):
            continue
        print(path.stem, flush=True)
        outputs = {"broken": _run(path, fails=True), "fixed": _run(path, "--fixed", fails=False)}
        found[path.stem] = {**outputs, **records.stamp()}
        records.save(NAME, found)


def _run(script: Path, *arguments: str, fails: bool) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        command = ["--standalone", "--nproc-per-node", "2", "--redirects", "3", "--log-dir", folder, str(script)]
        done = records.torchrun([*command, *arguments], MINIFSDP_LEDGER_DIR=folder)
        words = [_words_of(Path(folder), rank) for rank in range(2)]
    if bool(done.returncode) is not fails:
        raise RuntimeError(f"{script.name} ended with {done.returncode}\n{words}\n{done.stderr}")
    return words


def _words_of(folder: Path, rank: int) -> str:
    """The output of a rank: first its warnings, then its standard output."""
    files = [path for name in ("stderr.log", "stdout.log") for path in folder.glob(f"*/attempt_0/{rank}/{name}")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    # The folder, and the process number and random letters in the name of the ledger's file.
    text = re.sub(rf"{re.escape(str(folder))}/(minifsdp-ledger-rank\d)-\d+-\w+(\.json)", r"\1\2", text)
    return LOGGED.sub("", text).replace(f"{ROOT}/", "").strip()


if __name__ == "__main__":
    record(sys.argv[1:])
