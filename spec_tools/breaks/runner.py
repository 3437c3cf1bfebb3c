"""Runs one break: copies the repository, changes one file of the copy, and runs tests or a program on the copy.

::

    repository ---- copy (0.2 s) ----> folder: minifsdp/engine/reduce.py changed
                                       pytest --spec HYB-05 spec_tests/meshes/test_hybrid.py ...
                    <---- failed.json ----

The working tree is never changed. The runner passes the test files that contain the requirement IDs to pytest, and
pytest selects the tests by their markers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from spec_tests.harness.accounting import ROOT, test_files
from spec_tests.streams import engines
from spec_tools.breaks.edits import Break, edited

LIMIT = 300  # seconds for the tests of one break; longer than several timeouts of the test harness
SCHEDULES = 8  # number of other orders that are tried for each program
COPIED = ["README.md", "conftest.py", "docs", "docs_build", "minifsdp", "minifsdp_gloo", "minifsdp_tools"]
COPIED += ["mkdocs.yml", "pyproject.toml", "spec_tests", "spec_tools", "tutorials"]


@dataclass(frozen=True)
class Result:
    """The result of one break.

    Attributes:
        red: what noticed it: requirements, each with its first failed test, or the ways in which a program noticed it,
            each with a report.
        blind: what must notice it, and did not.
        others: failed tests of other requirements, if none of them may fail.
        end: ``""``, or why pytest did not finish.
    """

    red: dict[str, str]
    blind: list[str]
    others: list[str] = field(default_factory=list)
    end: str = ""

    def __str__(self) -> str:
        noticed = f"NOT NOTICED by {' '.join(self.blind)}" if self.blind else "noticed"
        others = [f"FAILS for another requirement: {test}" for test in self.others]
        return "\n    ".join(filter(None, [noticed, *others, self.end]))


def run(one: Break) -> Result:
    """Runs the tests of the break's requirements, or its program, on the changed package."""
    return _run_program(one) if one.program else _run_tests(one)


def _run_program(one: Break) -> Result:
    with broken(one, ["minifsdp"]) as folder:
        red = engines.findings(engines.run(one.program, folder, SCHEDULES), intact(one.program))
    return Result(red, [] if one.by in red else [one.by])


@functools.cache
def intact(program: str) -> engines.Outcome:
    """The outcome of a program on the unchanged package."""
    return engines.run(program, num_schedules=SCHEDULES)


def _run_tests(one: Break) -> Result:
    chosen = [] if one.is_exact else [f"--spec={row}" for row in one.rows]
    arguments = [*chosen, "--device", one.device, *files_of(one.rows)]
    if one.device == "simulated":
        arguments.append("--every-row")
    with broken(one) as folder:
        failed, end = failed_tests(folder, arguments)
    red: dict[str, str] = {}
    for test, rows in failed.items():
        for row in set(rows).intersection(one.rows):
            red.setdefault(row, test)
    others = [test for test, rows in failed.items() if set(rows).isdisjoint(one.rows)]
    return Result(red, [row for row in one.rows if row not in red], others, end)


def failed_tests(folder: pathlib.Path, arguments: list[str]) -> tuple[dict[str, list[str]], str]:
    """Runs pytest in a folder. Returns the failed tests with their requirements, and why pytest did not finish."""
    failed = folder / "failed.json"
    plugin = ["-q", "-p", "no:cacheprovider", "-p", "spec_tools.breaks.watch", "--failed", str(failed)]
    # An interrupted pytest has some time to close its ranks before it is killed.
    limit = ["timeout", "--signal=INT", "--kill-after=20", str(LIMIT)]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("w+") as output:
        command = [*limit, sys.executable, "-m", "pytest", *plugin, *arguments]
        code = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ).returncode
        output.seek(0)
        last_lines = "".join(output.readlines()[-15:])
    # 0 and 1: tests passed or failed. Any other exit code is an error of the run itself.
    end = "" if code in (0, 1) else f"pytest ended with exit code {code}\n{last_lines}"
    return json.loads(failed.read_text()) if failed.exists() else {}, end


@contextlib.contextmanager
def broken(one: Break, parts: Collection[str] = COPIED) -> Iterator[pathlib.Path]:
    """A folder with a broken copy of parts of the repository; it is deleted at the end."""
    edit = edited(one)
    with tempfile.TemporaryDirectory(prefix="broken-", ignore_cleanup_errors=True) as name:
        folder = pathlib.Path(name)
        for part in parts:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
            copy(ROOT / part, folder / part)
        path = folder / edit.path.relative_to(ROOT)
        path.write_text(edit.after, encoding="utf-8")
        # Python compares file times in seconds, so it could use the cached bytecode of the unchanged module.
        os.utime(path, (0, 0))
        yield folder


@functools.cache
def _test_files() -> dict[str, str]:
    """The text of each test file that can have requirements."""
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in test_files()}


def files_of(rows: Collection[str]) -> list[str]:
    """The files with tests of at least one of the requirements ``rows``."""
    return [path for path, text in _test_files().items() if any(f'"{row}"' in text for row in rows)]
