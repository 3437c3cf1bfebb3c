"""Whole test sessions in their own process: collection, the result file, and the end of all processes.

The session that is ended by Ctrl-C is a real command. The others are forked from the fork server.
"""

from __future__ import annotations

import functools
import importlib
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
import torch

from spec_tests.harness.accounting import ROOT, TEST_FOLDERS, Accounting, kind_of_proof, read_rows, section_of, verdict
from spec_tests.harness.programs import run_module, start_module
from spec_tests.harness.session import choose_rows
from spec_tests.waiting import comes_true

HANGING = """
import os, pathlib, time
from spec_tests.harness import ranks

@ranks(2)
def test_that_hangs():
    pathlib.Path(f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(600)
"""

CARRYING = """
import pytest
from spec_tests.harness import ranks

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

@pytest.mark.needs("torch>=2.11")
@pytest.mark.spec("CTOR-08")
def test_with_this_version(): pass
"""


def options(folder: pathlib.Path, test: str, *arguments: str) -> list[str]:
    (folder / "test_it.py").write_text(test)
    return [
        *("-p", "conftest", "-p", "no:cacheprovider"),
        *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "test_it.py", *arguments),
    ]


ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def run_session(folder: pathlib.Path, test: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_module("pytest", *options(folder, test, *arguments), folder=folder, environment=ENVIRONMENT)


def test_unknown_requirement_stops_collection_with_test_name(tmp_path: pathlib.Path) -> None:
    test = "import pytest\n@pytest.mark.spec('CTOR-999')\ndef test_it(): pass\ndef test_other(): pass\n"
    session = run_session(tmp_path, test, "-k", "other")
    assert session.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_it.py::test_it has the marker 'CTOR-999'" in session.stderr
    assert "passed" not in session.stdout


def test_session_writes_proven_requirements_and_counts_gpu_tests_as_not_run(tmp_path: pathlib.Path) -> None:
    session = run_session(tmp_path, CARRYING)
    assert "1 tests of real GPUs not run (--device cpu)" in session.stdout
    assert "because a test failed: CTOR-02" in session.stdout
    results = json.loads((tmp_path / "build" / "spec-results.json").read_text())
    assert list(results) == list(read_rows())
    said = {row: results[row]["results"]["cpu-gloo"] for row in ("CTOR-01", "CTOR-02", "CTOR-03", "CTOR-04")}
    assert said == {"CTOR-01": "proven", "CTOR-02": "failed", "CTOR-03": "unproven", "CTOR-04": "unproven"}
    assert results["CTOR-02"]["tests"]["test_it.py::test_bad"] == {"cpu-gloo": "failed"}
    assert results["CTOR-04"]["tests"]["test_it.py::test_on_gpu"] == {"cpu-gloo": "not run"}
    assert results["CTOR-05"]["tests"]["test_it.py::test_with_text_proof"] == {"cpu-gloo": "passed (text)"}
    assert [results[row]["kinds"] for row in ("CTOR-01", "CTOR-05")] == [
        {"cpu-gloo": "behaviour"},
        {"cpu-gloo": "text"},
    ]
    assert "2 by behaviour, 1 by text" in session.stdout
    for requirement in ("no_such_package", "torch>=99"):
        assert f"1 tests not run ({requirement} is not installed)\n" in session.stdout
    assert "so not proven here: CTOR-06, CTOR-07\n" in session.stdout
    assert results["CTOR-01"]["statement"].startswith("The constructor takes")


def test_selected_requirements_run_their_tests() -> None:
    class Item:
        def __init__(self, *rows: str) -> None:
            self.rows = rows

        def iter_markers(self, name: str) -> list[pytest.Mark]:
            return [pytest.mark.spec(*self.rows).mark] if self.rows and name == "spec" else []

    def chosen(*asked: str) -> list[Any]:
        left: list[Any] = list(items)
        config: Any = SimpleNamespace(getoption={"--spec": list(asked)}.get, hook=hook)
        choose_rows(config, left)
        return left

    items = one, two, _ = Item("CTOR-01"), Item("CTOR-02", "CTOR-03"), Item()
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    assert chosen("CTOR-03") == [two]
    assert chosen("CTOR-03", "CTOR-01") == [one, two]
    assert chosen() == list(items)
    with pytest.raises(pytest.UsageError, match="no row CTOR-999"):
        chosen("CTOR-01", "CTOR-999")


QUICK = """
import pytest
from spec_tests.harness import ranks

@pytest.mark.spec("CTOR-01")
@ranks(4)
def test_on_four_ranks(): pass

@pytest.mark.spec("CTOR-02")
@ranks(2)
def test_first(): pass

@pytest.mark.spec("CTOR-03")
@ranks(2)
def test_second(): pass

@pytest.mark.spec("CTOR-03", "DEV-01")
@ranks(2)
def test_of_another_section_too(): pass

@pytest.mark.spec("DEV-01")
def test_without_ranks(): pass
"""


def test_quick_form_runs_one_test_of_each_section_on_two_ranks(tmp_path: pathlib.Path) -> None:
    session = run_session(tmp_path, QUICK, "--quick", "-v")
    assert re.findall(r"::(\w+) PASSED", session.stdout) == [
        "test_first",
        "test_of_another_section_too",
    ]
    assert "3 tests not in the quick form not run (--quick)" in session.stdout


VARIANTS = """
import pytest

@pytest.mark.spec("CTOR-01")
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("kind", "is_even"), [("a", True), ("a", False)])
def test_it(kind, is_even, size): pass

def test_other(): pass
"""


@pytest.mark.parametrize(
    ("arguments", "left_out", "num_run"),
    [
        ([], 0, 7),
        (["--variants", "each"], 3, 4),
        (["--variants", "others"], 4, 3),
        (["--variants", "2"], 4, 3),
        (["--variants", "all"], 0, 7),
    ],
)
def test_chosen_variants_run(tmp_path: pathlib.Path, arguments: list[str], left_out: int, num_run: int) -> None:
    session = run_session(tmp_path, VARIANTS, "-v", *arguments)
    passed = re.findall(r"::(\w+)(?:\[([^]]+)\])? PASSED", session.stdout)
    assert len(passed) == num_run
    assert (f"{left_out} variants of tests not run" in session.stdout) == bool(left_out)
    if arguments[-1:] == ["each"]:
        # Each size, and each pair of the two arguments that are parametrized together.
        variants = [variant.split("-") for name, variant in passed if name == "test_it"]
        assert {variant[-1] for variant in variants} == {"1", "2", "3"}
        assert {tuple(variant[:-1]) for variant in variants} == {("a", "True"), ("a", "False")}
    assert "rows have their tests in other files" not in session.stdout
    if arguments[-1:] != ["others"]:
        assert re.search(r"^all +1 / ", session.stdout, re.MULTILINE)


def test_a_folder_runs_each_value_and_a_file_runs_all_variants(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_it.py").write_text(VARIANTS)
    arguments = [*options(tmp_path, VARIANTS), "--collect-only", "-q"]
    counts = []
    for what in ("test_it.py", "."):
        arguments[arguments.index("test_it.py") if "test_it.py" in arguments else arguments.index(".")] = what
        session = run_module("pytest", *arguments, folder=tmp_path, environment=ENVIRONMENT)
        counts.append(session.stdout.count("test_it.py::"))
    assert counts == [7, 4]


def test_tests_run_on_the_cpu_unless_another_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    defaults: dict[str, Any] = {}
    note: Any = SimpleNamespace(addoption=lambda name, default=None, **_: defaults.update({name: default}))
    importlib.import_module("conftest").pytest_addoption(note)
    assert defaults["--device"] == "cpu"


def is_running(process: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for_its_ranks(folder: pathlib.Path) -> list[int]:
    """The rank processes of a session that hangs."""
    files = [folder / "rank-0", folder / "rank-1"]
    assert comes_true(lambda: all(file.exists() and file.read_text() for file in files), 60)
    return [int(file.read_text()) for file in files]


def test_all_ranks_end_when_ctrl_c_ends_their_session(tmp_path: pathlib.Path) -> None:
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options(tmp_path, HANGING)],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A shell starts background processes with SIGINT ignored, and children inherit that.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        processes = wait_for_its_ranks(tmp_path)
        os.killpg(session.pid, signal.SIGINT)  # like Ctrl-C: to all processes in the foreground
        session.wait(60)
        assert comes_true(lambda: not any(map(is_running, processes)), 20)
    finally:
        if session.poll() is None:
            session.kill()
            session.wait()


def test_all_ranks_end_when_their_session_is_killed(tmp_path: pathlib.Path) -> None:
    arguments = options(tmp_path, HANGING)
    session = start_module("pytest", *arguments, folder=tmp_path, environment=ENVIRONMENT, output=tmp_path)
    try:
        processes = wait_for_its_ranks(tmp_path)
    finally:
        session.kill()
        session.join(60)
    assert comes_true(lambda: not any(map(is_running, processes)), 20)


# ---- the accounting -------------------------------------------------------------------------------------------------


def test_spec_has_each_requirement_once() -> None:
    rows = read_rows()
    lines = (ROOT / "docs" / "spec.md").read_text().splitlines()
    assert len(rows) == sum(line.startswith("| ") and not line.startswith("| ID |") for line in lines)
    assert rows["CTOR-08"].startswith("An unknown keyword raises")
    assert [section_of(row) for row in ("CTOR-01", "OSD-LOAD-04", "FS2-PREF-01")] == ["CTOR", "OSD-LOAD", "FS2-PREF"]


def test_duplicate_requirement_in_spec_raises_error(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "spec.md"
    page.write_text("| ID | B |\n|---|---|\n| A-01 | one |\n| A-01 | two |\n")
    with pytest.raises(ValueError, match="A-01"):
        read_rows(page)


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
        ({"a": "passed (text)", "b[1]": "passed", "b[2]": "skipped"}, "proven", "text"),
    ],
)
def test_requirement_is_proven_if_all_test_variants_passed(
    outcomes: dict[str, str | None], word: str, kind: str | None
) -> None:
    assert verdict(outcomes) == word
    assert kind_of_proof(outcomes) == kind


def account(root: pathlib.Path, device: str, outcomes: dict[str, str], carried: dict[str, list[str]]) -> dict[str, Any]:
    (root / "test_it.py").touch()
    accounting = Accounting(device, root)
    accounting.outcomes, accounting.carried = outcomes, carried
    accounting.complete_files = {"test_it.py"}
    return accounting.write()


def test_run_on_one_backend_keeps_results_of_other(tmp_path: pathlib.Path) -> None:
    carried = {"test_it.py::test_a": ["CTOR-01"]}
    account(tmp_path, "cuda", {"test_it.py::test_a": "passed"}, carried)
    row = account(tmp_path, "cpu", {"test_it.py::test_a": "failed"}, carried)["CTOR-01"]
    assert row["results"] == {"cpu-gloo": "failed", "simulated": "unproven", "cuda-nccl": "proven"}


def test_partial_run_keeps_results_of_other_tests(tmp_path: pathlib.Path) -> None:
    carried = {"test_it.py::test_a": ["CTOR-01"], "test_it.py::test_b": ["CTOR-02"]}
    account(tmp_path, "cpu", {"test_it.py::test_a": "passed", "test_it.py::test_b": "passed"}, carried)
    results = account(tmp_path, "cpu", {"test_it.py::test_b": "failed"}, carried)
    assert [results[row]["results"]["cpu-gloo"] for row in ("CTOR-01", "CTOR-02")] == ["proven", "failed"]


@pytest.mark.parametrize("now", [{}, {"test_it.py::test_a": ["CTOR-02"]}])
def test_missing_or_unmarked_test_proves_no_requirement(now: dict[str, list[str]], tmp_path: pathlib.Path) -> None:
    account(tmp_path, "cpu", {"test_it.py::test_a": "passed"}, {"test_it.py::test_a": ["CTOR-01"]})
    row = account(tmp_path, "cpu", dict.fromkeys(now, "passed"), now)["CTOR-01"]
    assert row["tests"] == {}
    assert row["results"]["cpu-gloo"] == "unproven"


def test_every_test_module_imports_with_the_test_extra_alone(tmp_path: pathlib.Path) -> None:
    placeholder = ("mkdocs", "markdown", "mkdocstrings", "transformers", "sklearn", "pytest_benchmark")
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({placeholder!r}))\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    arguments = (
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        str(ROOT / "pyproject.toml"),
        *(str(ROOT / folder) for folder in TEST_FOLDERS),
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env=ENVIRONMENT | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "tests not run (mkdocs is not installed)" in done.stdout
