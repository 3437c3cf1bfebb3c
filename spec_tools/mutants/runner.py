"""Runs one mutant: copies the repository, changes one file of the copy, and runs pytest on the requirements' tests.

::

    repository ---- copy (0.2 s) ----> folder: minifsdp/engine/reduce.py changed
                                       pytest --rows HYB-05 spec_tests/fsdp1/test_hybrid.py ...
                    <---- red.json ----

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
from dataclasses import asdict, dataclass, field

from spec_tests.harness.accounting import ROOT, test_files
from spec_tests.harness.edit import Edited
from spec_tools.mutants.mutant import Mutant, broken

__all__ = ["Result", "copied_to", "files_of", "run"]

LIMIT = 300.0  # seconds for one mutant; longer than several timeouts of the test harness
COPIED = (
    "README.md",
    "conftest.py",
    "docs",
    "docs_build",
    "minifsdp",
    "minifsdp_gloo",
    "minifsdp_tools",
    "mkdocs.yml",
    "pyproject.toml",
    "spec_tests",
    "spec_tools",
    "tutorials",
)


@dataclass(frozen=True)
class Result:
    """The result of one mutant.

    Attributes:
        name: name of the mutant.
        red: the requirements that detected it, each with its first failed test.
        blind: the requirements that did not detect it, but must.
        end: ``""``, or why pytest did not finish.
    """

    name: str
    red: dict[str, str] = field(default_factory=dict)
    blind: list[str] = field(default_factory=list)
    end: str = ""

    def as_line(self) -> str:
        """The result as a line of JSON."""
        return json.dumps(asdict(self))


def run(mutant: Mutant, limit: float = LIMIT) -> Result:
    """Runs the tests of the mutant's requirements on the changed package."""
    with _copy(broken(mutant)) as folder:
        end = _pytest(mutant, folder, limit)
        path = folder / "red.json"
        said = json.loads(path.read_text()) if path.exists() else {"red": {}, "green": []}
    return Result(mutant.name, said["red"], [row for row in mutant.row_list if row not in said["red"]], end)


def copied_to(folder: pathlib.Path) -> None:
    """Copies the repository to ``folder``."""
    for part in COPIED:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part)
        else:
            shutil.copy2(ROOT / part, folder / part)


@contextlib.contextmanager
def _copy(change: Edited) -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = pathlib.Path(name)
        copied_to(folder)
        path = folder / change.path.relative_to(ROOT)
        path.write_text(change.text, encoding="utf-8")
        # Python compares file times in seconds, so it could use the cached bytecode of the unchanged module.
        for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):
            stale.unlink()
        yield folder


def _pytest(mutant: Mutant, folder: pathlib.Path, limit: float) -> str:
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "spec_tools.mutants.watch", "--device", mutant.device]
    arguments += ["--rows", ",".join(mutant.row_list), "--red", str(folder / "red.json")]
    if mutant.device != "cpu":
        arguments.append("--every-row")
    request = {"folder": str(folder), "arguments": [*arguments, *files_of(mutant.row_list)], "limit": limit}
    pipes = _server()
    assert pipes.stdin is not None and pipes.stdout is not None
    pipes.stdin.write(json.dumps(request) + "\n")
    pipes.stdin.flush()
    code = int(pipes.stdout.readline())
    if code == -1:
        return f"not over in {limit:g} s"
    # 0 and 1: tests passed or failed. Any other exit code, or a missing red.json, is an error of the run itself.
    is_answered = code in (0, 1) and (folder / "red.json").exists()
    return "" if is_answered else _last_lines((folder / "output.txt").read_text())


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that starts pytest, see ``server.py``; it ends together with this process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, str(pathlib.Path(__file__).with_name("server.py"))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-15:])


@functools.cache
def _test_files() -> dict[str, str]:
    """The text of each test file that can have requirements."""
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in test_files()}


def files_of(rows: Collection[str]) -> list[str]:
    """The files with tests of at least one of the requirements ``rows``."""
    return [path for path, text in _test_files().items() if any(f'"{row}"' in text for row in rows)]
