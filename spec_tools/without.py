"""``python -m spec_tools.without CASE...``: removes a case from a copy of the package and shows which tests then fail.

A case is a module of ``minifsdp/cases``. The command deletes the module and its lines in ``all_cases.py`` or
``of_fully_shard.py``, and runs all tests of the files that test the requirements of the case. The last line of the
module's docstring names them. A case that a front end calls by name is in neither list, and cannot be removed in this
way. The result is right if

* a test of each of these requirements fails: the case is needed, and its tests show it;
* no other test fails: nothing else depends on the case.

Worked example::

    $ python -m spec_tools.without returned_parameters
    returned_parameters: 4 failed, 33 passed in 48.54s
      PROG-32                fails, as it must

``--all`` runs the complete suite instead of these files. The command ends with exit status 1 if a result is wrong.

*In torch:* no such command.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

import pytest

from spec_tests.harness.accounting import ROOT
from spec_tools.mutants.runner import copied_to, files_of

__all__ = ["CASES", "failed_without", "main", "requirements_of"]

FOLDER = ROOT / "minifsdp" / "cases"
LISTS = ["all_cases.py", "of_fully_shard.py"]
# The class or the function of each module, as it stands in a list.
CASES = {
    module: name
    for path in LISTS
    for module, name in re.findall(r"^from minifsdp\.cases\.(\w+) import (\w+)$", (FOLDER / path).read_text(), re.M)
}
OUTPUT = "WITHOUT_OUTPUT"


def requirements_of(case: str) -> list[str]:
    """The requirements in the docstring of a case, for example ``["PROG-27", "PROG-28"]``."""
    docstring = ast.get_docstring(ast.parse((FOLDER / f"{case}.py").read_text())) or ""
    return re.findall(r"[A-Z0-9]+(?:-[A-Z]+)*-\d+", docstring.rpartition("Spec:")[2])


def failed_without(case: str, *, runs_all: bool = False) -> dict[str, list[str]]:
    """Runs the tests without a case. Returns the requirements of each test that fails."""
    with _copy_without(case) as folder:
        output = folder / "failed.txt"
        files = ["spec_tests"] if runs_all else files_of(requirements_of(case))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "spec_tools.without", *files]
        environment = {**os.environ, "PYTHONPATH": str(folder), OUTPUT: str(output), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        print(f"{case}: {ended.stdout.strip().rpartition(chr(10))[2]}")
        if ended.returncode not in (0, 1):
            raise RuntimeError(ended.stdout[-2000:] + ended.stderr[-2000:])
        lines = output.read_text().splitlines() if output.exists() else []
    return {test: rows.split() for test, _, rows in (line.partition("\t") for line in lines)}


@contextlib.contextmanager
def _copy_without(case: str) -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="without-") as name:
        folder = pathlib.Path(name)
        copied_to(folder)
        cases = folder / FOLDER.relative_to(ROOT)
        (cases / f"{case}.py").unlink()
        removed = {f"from minifsdp.cases.{case} import {CASES[case]}", f"{CASES[case]},"}
        for path in LISTS:
            lines = (cases / path).read_text().splitlines(keepends=True)
            (cases / path).write_text("".join(line for line in lines if line.strip() not in removed))
        yield folder


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Called by pytest in the copy: notes each test that fails, with its requirements."""
    if report.failed and OUTPUT in os.environ:
        rows = " ".join(row for name, rows in report.user_properties if name == "rows" for row in rows)
        with open(os.environ[OUTPUT], "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\t{rows}\n")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Called by pytest in the copy: notes the requirements of a test for its report."""
    rows = [row for marker in item.iter_markers("spec") for row in marker.args]
    item.user_properties.append(("rows", rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if, for each case, exactly its own tests fail."""
    parser = argparse.ArgumentParser(prog="python -m spec_tools.without", description=__doc__)
    parser.add_argument("cases", nargs="+", choices=[*CASES, "every"], help="modules of minifsdp/cases, or `every`")
    parser.add_argument("--all", action="store_true", help="run the complete suite")
    options = parser.parse_args(arguments)
    is_right = True
    for case in CASES if "every" in options.cases else options.cases:
        failed = failed_without(case, runs_all=options.all)
        required = requirements_of(case)
        for row in required:
            fails = any(row in rows for rows in failed.values())
            print(f"  {row:22} {'fails, as it must' if fails else 'PASSES: no test needs the case'}")
            is_right &= fails
        for test, rows in failed.items():
            if set(required).isdisjoint(rows):
                print(f"  {test} FAILS, for another requirement: {' '.join(rows)}")
                is_right = False
    return int(not is_right)


if __name__ == "__main__":
    raise SystemExit(main())
