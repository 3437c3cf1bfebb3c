"""Whole test sessions in their own process: which tests run, the result file, and the end of all processes."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from spec_tests.harness import session
from spec_tests.harness.accounting import ROOT, TEST_FOLDERS, Accounting, kind_of_proof, read_rows, verdict
from spec_tests.harness.programs import run_module
from spec_tests.waiting import comes_true

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def options(folder: pathlib.Path, test: str, *arguments: str) -> list[str]:
    (folder / "test_it.py").write_text(test)
    return [
        *("-p", "conftest", "-p", "no:cacheprovider"),
        *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "test_it.py", *arguments),
    ]


def run_session(folder: pathlib.Path, test: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_module("pytest", *options(folder, test, *arguments), folder=folder, environment=ENVIRONMENT)


# ---- results --------------------------------------------------------------------------------------------------------

CARRYING = """
import pytest

@pytest.mark.spec("CTOR-01", "CTOR-02")
def test_good(): pass

@pytest.mark.spec("CTOR-02")
def test_bad(): assert False

@pytest.mark.spec("CTOR-03")
def test_skipped(): pytest.skip("not today")

@pytest.mark.gpu
@pytest.mark.spec("CTOR-04")
def test_on_gpu(): pass

@pytest.mark.proof("text")
@pytest.mark.spec("CTOR-05")
def test_with_text_proof(): pass

@pytest.mark.needs("no_such_package")
@pytest.mark.spec("CTOR-06")
def test_in_need(): pass

@pytest.mark.needs("torch>=99")
@pytest.mark.spec("CTOR-07")
def test_in_need_of_a_version(): pass
"""


def test_session_writes_which_requirements_are_proven(tmp_path: pathlib.Path) -> None:
    session = run_session(tmp_path, CARRYING)
    assert "1 tests of real GPUs not run (--device cpu)" in session.stdout
    assert "1 tests not run (no_such_package is not installed)\n" in session.stdout
    assert "so not proven here: CTOR-06, CTOR-07\n" in session.stdout
    results = json.loads((tmp_path / "build" / "spec-results.json").read_text())
    assert list(results) == list(read_rows())
    said = [results[f"CTOR-0{number}"]["results"]["cpu-gloo"] for number in range(1, 8)]
    assert said == ["proven", "failed", "unproven", "unproven", "proven", "unproven", "unproven"]
    assert results["CTOR-02"]["tests"]["test_it.py::test_bad"] == {"cpu-gloo": "failed"}
    assert results["CTOR-04"]["tests"]["test_it.py::test_on_gpu"] == {"cpu-gloo": "not run"}
    assert results["CTOR-05"]["kinds"] == {"cpu-gloo": "text"}


def test_unknown_requirement_stops_the_session_with_the_name_of_the_test(tmp_path: pathlib.Path) -> None:
    test = "import pytest\n@pytest.mark.spec('CTOR-999')\ndef test_it(): pass\ndef test_other(): pass\n"
    session = run_session(tmp_path, test, "-k", "other")
    assert session.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_it.py::test_it has the marker 'CTOR-999'" in session.stderr


@pytest.mark.parametrize(
    ("outcomes", "word", "kind"),
    [
        ({}, "unproven", None),
        ({"a": None, "b": "skipped", "c": "not run"}, "unproven", None),
        ({"a": "passed", "b": "skipped", "c": "not run", "d": None}, "proven", "behaviour"),
        ({"a": "passed", "b": "failed"}, "failed", "behaviour"),
        ({"a[1]": "passed", "a[2]": "not run"}, "unproven", None),
        ({"a[1]": "passed", "a[2]": "passed"}, "proven", "behaviour"),
        ({"a": "passed (text)", "b": "passed (order only)"}, "proven", "order only"),
    ],
)
def test_requirement_is_proven_if_all_variants_of_a_test_passed(
    outcomes: dict[str, str | None], word: str, kind: str | None
) -> None:
    assert verdict(outcomes) == word
    assert kind_of_proof(outcomes) == kind


def account(root: pathlib.Path, device: str, outcomes: dict[str, str], carried: dict[str, list[str]]) -> dict[str, Any]:
    """Writes the results of a session, and returns those of CTOR-01."""
    (root / "test_it.py").touch()
    accounting = Accounting(device, root)
    accounting.outcomes, accounting.carried = outcomes, carried
    accounting.complete_files = {"test_it.py"}
    return accounting.write()["CTOR-01"]


def test_later_session_keeps_results_of_other_backends_and_tests_and_removes_missing_tests(
    tmp_path: pathlib.Path,
) -> None:
    one, two = "test_it.py::test_one", "test_it.py::test_two"
    both = {one: ["CTOR-01"], two: ["CTOR-02"]}
    account(tmp_path, "cuda", {one: "passed", two: "passed"}, both)
    row = account(tmp_path, "cpu", {one: "failed", two: "passed"}, both)
    assert row["results"] == {"cpu-gloo": "failed", "simulated": "unproven", "cuda-nccl": "proven"}
    row = account(tmp_path, "cpu", {two: "passed"}, both)
    assert row["results"]["cpu-gloo"] == "failed"
    row = account(tmp_path, "cpu", {two: "passed"}, {two: ["CTOR-02"]})
    assert row["tests"] == {}


# ---- which tests run ------------------------------------------------------------------------------------------------

TESTS = """
import pytest
from spec_tests.harness import ranks

@pytest.mark.spec("CTOR-01")
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("kind", "is_even"), [("a", True), ("a", False)])
def test_variants(kind, is_even, size): pass

@pytest.mark.in_turn(2)
@pytest.mark.parametrize("number", range(5))
def test_in_turn(number): pass

@pytest.mark.spec("CTOR-02")
@ranks(2)
def test_on_ranks(): pass

@pytest.mark.spec("CTOR-03")
@ranks(2)
def test_of_the_same_section(): pass
"""


@pytest.mark.parametrize(
    ("arguments", "num_variants", "num_others"),
    [
        # A file runs all variants.
        ((), 6, 2),
        # Each size, and each pair of the two arguments that are parametrized together.
        (("--variants", "each"), 3, 2),
        (("--variants", "others"), 3, 0),
        (("--variants", "2"), 2, 2),
        (("--spec", "CTOR-01"), 6, 0),
        (("--spec", "CTOR-02", "--spec", "CTOR-03"), 0, 2),
        # No test of this file has noticed a break.
        (("--quick",), 0, 0),
    ],
)
def test_options_choose_tests(
    tmp_path: pathlib.Path, arguments: tuple[str, ...], num_variants: int, num_others: int
) -> None:
    listed = run_session(tmp_path, TESTS, "--collect-only", "-q", *arguments).stdout
    assert listed.count("::test_variants[") == num_variants
    if "each" in arguments:
        assert listed.count("::test_in_turn[") == 2
    assert len(re.findall(r"::test_o\w+$", listed, re.MULTILINE)) == num_others


def test_variants_of_a_slow_test_run_in_turn() -> None:
    mark = pytest.mark.in_turn(2).mark
    variants: list[Any] = [SimpleNamespace(name=name, iter_markers=lambda _: iter([mark])) for name in "abcde"]

    days = ["".join(one.name for one in session.in_turn(variants, day)) for day in range(5)]

    assert days == ["ab", "cd", "ea", "bc", "de"]


def test_every_test_module_imports_with_the_test_extra_alone(tmp_path: pathlib.Path) -> None:
    placeholder = ("mkdocs", "markdown", "mkdocstrings", "transformers", "sklearn", "pytest_benchmark")
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({placeholder!r}))\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    arguments = ["--collect-only", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    arguments += [str(ROOT / folder) for folder in TEST_FOLDERS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env=ENVIRONMENT | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "tests not run (mkdocs is not installed)" in done.stdout


# ---- the end of a session -------------------------------------------------------------------------------------------

HANGING = """
import os, pathlib, time
from spec_tests.harness import ranks

@ranks(2)
def test_that_hangs():
    pathlib.Path(f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(600)
"""


def is_running(process: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_all_ranks_end_with_their_session(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options(tmp_path, HANGING)],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A shell starts background processes with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    files = [tmp_path / "rank-0", tmp_path / "rank-1"]
    try:
        assert comes_true(lambda: all(file.exists() and file.read_text() for file in files), 200)
    finally:
        session.send_signal(number)
        session.wait(60)
    assert comes_true(lambda: not any(is_running(int(file.read_text())) for file in files), 20)
