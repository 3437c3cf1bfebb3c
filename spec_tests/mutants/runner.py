"""Runs one mutant: a copy of the repository, one file of it changed, and one pytest on the tests of the rows.

::

    repository ---- copy (0.2 s) ----> folder: minifsdp/engine/reduce.py changed
                                       python -m pytest --rows HYB-05 spec_tests/fsdp1/test_hybrid.py ...
                    <---- red.json ----

The working tree is never touched. Which files to give to pytest is found by looking for the rows' names in them; which
tests of these files to run, pytest finds by their markers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field

from spec_tests.harness.accounting import ROOT
from spec_tests.mutants.mutant import Broken, Mutant, broken

__all__ = ["Result", "files_of", "run"]

LIMIT = 300.0  # seconds for one mutant; by then a hang has been reported by the harness a few times
COPIED = ("conftest.py", "docs", "minifsdp", "pyproject.toml", "README.md", "spec_tests", "tutorials")


@dataclass(frozen=True)
class Result:
    """What came of one mutant.

    Attributes:
        name: the mutant's.
        red: the rows that noticed, and by which test first.
        blind: the rows that did not, though they must.
        end: ``""``, or why pytest did not come to its end.
    """

    name: str
    red: dict[str, str] = field(default_factory=dict)
    blind: list[str] = field(default_factory=list)
    end: str = ""

    def as_line(self) -> str:
        """For a file of JSON lines."""
        return json.dumps(asdict(self))


def run(mutant: Mutant, limit: float = LIMIT) -> Result:
    """Runs the tests of the mutant's rows on the package as the mutant leaves it."""
    with _copy(broken(mutant)) as folder:
        end = _pytest(mutant, folder, limit)
        path = folder / "red.json"
        said = json.loads(path.read_text()) if path.exists() else {"red": {}, "green": []}
    if not said["red"] and not said["green"] and not end:
        end = "no test was run"
    return Result(mutant.name, said["red"], [row for row in mutant.row_list if row not in said["red"]], end)


@contextlib.contextmanager
def _copy(change: Broken) -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = pathlib.Path(name)
        for part in COPIED:
            if (ROOT / part).is_dir():
                shutil.copytree(ROOT / part, folder / part)
            else:
                shutil.copy2(ROOT / part, folder / part)
        (folder / change.path).write_text(change.text)
        # Python compares times by the second, and would take the intact module's code for the changed one's.
        for stale in (folder / change.path).parent.glob(f"__pycache__/{change.path.stem}.*"):
            stale.unlink()
        yield folder


def _pytest(mutant: Mutant, folder: pathlib.Path, limit: float) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "spec_tests.mutants.watch"]
    command += ["--device", mutant.device, "--rows", ",".join(mutant.row_list), "--red", "red.json"]
    if mutant.device != "cpu":
        command.append("--every-row")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [*command, *files_of(mutant.row_list)], cwd=folder, env=environment, stdout=output, stderr=output
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            _interrupt(process)
            return f"not over in {limit:g} s"
    # 0 and 1 are passed and failed, 5 is no test.
    return "" if code in (0, 1, 5) else _last_lines((folder / "output.txt").read_text())


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Lets pytest close its ranks, and ends it if it does not."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-15:])


@functools.cache
def _test_files() -> dict[str, str]:
    """The text of each file with tests that can carry a row."""
    paths = sorted((ROOT / "spec_tests").rglob("test_*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths if "benchmarks" not in path.parts}


def files_of(rows: Collection[str]) -> list[str]:
    """The files with tests that carry one of ``rows``."""
    return [path for path, text in _test_files().items() if any(f'"{row}"' in text for row in rows)]
