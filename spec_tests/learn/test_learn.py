"""``python -m minifsdp_tools.learn``: its commands, and the verdicts about right and wrong solutions."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from minifsdp_tools.learn import checks_communication, checks_layout, checks_state, checks_step
from minifsdp_tools.learn.__main__ import main
from minifsdp_tools.learn.exercises import Exercise, common_feedback, exercises
from minifsdp_tools.learn.grader import grade, load
from spec_tools.learn.grading import PACKAGE, SOLUTION, STUB, cases, wrong_solutions

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
EXERCISES = {exercise.name: exercise for exercise in exercises()}
each_exercise = pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
Verdicts = dict[tuple[int, str], dict[str, Any]]


@pytest.fixture(scope="module")
def verdicts() -> Verdicts:
    """The verdicts about all cases, from a process that has not run a backward, so that it can fork."""
    command = [sys.executable, "-m", "spec_tools.learn.grading", *map(str, range(1, len(EXERCISES) + 1))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    # The functions of a wrong solution may print, too.
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(line["exercise"], line["about"]): line for line in lines}


def package_function(place: str) -> Any:
    module, _, path = place.partition(":")
    return reduce(getattr, path.split("."), importlib.import_module(f"minifsdp.{module}"))


@pytest.mark.spec("LEARN-03")
@each_exercise
def test_package_and_solution_pass(exercise: Exercise, verdicts: Verdicts) -> None:
    for about in (PACKAGE, SOLUTION):
        assert verdicts[exercise.number, about]["entry"] is None, verdicts[exercise.number, about]["text"]


@pytest.mark.spec("LEARN-04")
@each_exercise
def test_stub_fails_with_the_name_of_a_function(exercise: Exercise, verdicts: Verdicts) -> None:
    verdict = verdicts[exercise.number, STUB]
    assert verdict["entry"] == "not-written"
    assert any(f"`{name}` is not written yet" in verdict["text"] for name in exercise.places)


@pytest.mark.spec("LEARN-04")
@each_exercise
def test_wrong_solutions_fail_with_the_message_about_the_mistake(exercise: Exercise, verdicts: Verdicts) -> None:
    wrong = wrong_solutions(exercise)
    assert len(wrong) >= 4
    found = {each["about"]: verdicts[exercise.number, each["about"]]["entry"] for each in wrong}
    assert found == {each["about"]: each["entry"] for each in wrong}
    for each in wrong:
        assert len(verdicts[exercise.number, each["about"]]["text"]) > 60


@pytest.mark.spec("LEARN-04")
def test_each_case_was_graded(verdicts: Verdicts) -> None:
    assert {(exercise.number, case.about) for exercise in exercises() for case in cases(exercise)} == set(verdicts)


@pytest.mark.spec("LEARN-04")
def test_checks_use_all_messages_and_no_other() -> None:
    used: dict[str, set[str]] = {}
    for module in (checks_communication, checks_layout, checks_step, checks_state):
        name = module.__name__.rpartition(".")[2]
        for function in ast.parse(inspect.getsource(module)).body:
            if isinstance(function, ast.FunctionDef):
                used[f"{name}:{function.name}"] = entries_in(function)
    for exercise in exercises():
        mine = set().union(*(entries_in_all(check.function, used) for check in exercise.checks))
        assert mine <= {*exercise.feedback, *common_feedback()}, exercise.name
        assert {*exercise.feedback} <= mine, exercise.name


def entries_in(function: ast.AST) -> set[str]:
    """The entries in the calls of ``expect`` and ``NotMetError`` in a function, and the functions that it calls."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.add(f"call {node.func.id}")
            if node.func.id in ("expect", "NotMetError"):
                given = node.args[0]
                for entry in given.keys if isinstance(given, ast.Dict) else [given]:
                    if isinstance(entry, ast.JoinedStr):
                        # The names of calls, in `hook_order`.
                        found |= {f"no-{name.replace('_', '-')}" for name in checks_step.FIRST_CALL}
                    elif isinstance(entry, ast.Name):
                        # The first column of the table over which the function iterates.
                        (table,) = (loop.iter for loop in ast.walk(function) if isinstance(loop, ast.For))
                        found |= {ast.literal_eval(row.elts[0]) for row in table.elts}
                    else:
                        found.add(ast.literal_eval(entry))
    return found


def entries_in_all(function: str, used: dict[str, set[str]]) -> set[str]:
    """The entries of a check, and of the functions of its module that it calls."""
    module, found = function.partition(":")[0], used.get(function, set())
    called = {each.removeprefix("call ") for each in found if each.startswith("call ")}
    inner = (entries_in_all(f"{module}:{name}", used) for name in called if f"{module}:{name}" in used)
    return {each for each in found if not each.startswith("call ")}.union(*inner)


@pytest.mark.spec("LEARN-01")
@each_exercise
def test_stub_has_the_signatures_of_the_package(exercise: Exercise, tmp_path: Path) -> None:
    path = tmp_path / exercise.file_name
    path.write_text(exercise.stub)
    learner = load(path)
    for name, place in exercise.places.items():
        function = getattr(learner, name)
        assert [*inspect.signature(function).parameters] == [*inspect.signature(package_function(place)).parameters]
        assert len(function.__doc__) > 30
        assert "raise NotImplementedError" in inspect.getsource(function)


@pytest.mark.spec("LEARN-01")
def test_start_writes_the_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ["--folder", str(tmp_path / "mine")]
    assert main(["start", "1", *folder]) == 0
    path = tmp_path / "mine" / "01_flatten.py"
    assert path.read_text() == EXERCISES["flatten"].stub
    path.write_text("my work")
    assert main(["start", "1", *folder]) == 2
    assert path.read_text() == "my work"
    assert "exists already" in capsys.readouterr().out


@pytest.mark.spec("LEARN-02")
def test_hints_come_one_by_one_and_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2, 3, 3):
        assert main(["hint", "4", "--folder", str(tmp_path)]) == 0
        assert capsys.readouterr().out.count("Hint ") == number
    assert main(["progress", "--folder", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "hints" in line] == [
        next(line for line in lines if line.endswith("3 of 3 hints"))
    ]


@pytest.mark.spec("LEARN-02", "LEARN-03")
def test_check_prints_requirements_and_stores_progress(tmp_path: Path) -> None:
    solution = (ROOT / "spec_tools" / "learn" / "solutions" / "limiter.py").read_text()
    (tmp_path / "06_limiter.py").write_text(solution)
    command = [sys.executable, "-m", "minifsdp_tools.learn", "check", "6", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(\w+) .*\[(LIM-\d\d)", done.stdout, re.MULTILINE) == [
        ("passed", "LIM-02"),
        ("passed", "LIM-03"),
        ("passed", "LIM-02"),
        ("passed", "LIM-05"),
    ]
    assert "engine.lifetime.RateLimiter.throttle" in done.stdout
    assert json.loads((tmp_path / "progress.json").read_text())["solved"] == [6]


@pytest.mark.spec("LEARN-03")
def test_check_without_a_file_names_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "2", "--folder", str(tmp_path)]) == 2
    assert "python -m minifsdp_tools.learn start 2" in capsys.readouterr().out


@pytest.mark.spec("LEARN-03")
def test_changed_file_of_equal_size_and_time_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "01_flatten.py"
    for value in (1, 2):
        path.write_text(f"def shard_range(self, index):\n    return {value}\n")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        assert load(path).shard_range(None, 0) == value
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.spec("LEARN-06")
def test_loop_without_an_end_is_stopped_and_its_line_named(verdicts: Verdicts) -> None:
    verdict = verdicts[4, "a loop that does not end"]
    assert verdict["entry"] == "time-limit"
    assert re.search(r"rank 0 was in line \d+ of your file; rank 1 was in line \d+ of your file", verdict["text"])


@pytest.mark.spec("LEARN-06")
def test_check_leaves_the_package_of_this_process_unchanged(tmp_path: Path) -> None:
    exercise = EXERCISES["uneven"]
    before = {place: package_function(place) for place in exercise.places.values()}
    path = tmp_path / exercise.file_name
    path.write_text(exercise.stub)
    assert grade(exercise, path).entry == "not-written"
    assert {place: package_function(place) for place in exercise.places.values()} == before


@pytest.mark.spec("LEARN-05")
@each_exercise
def test_page_names_functions_and_commands(exercise: Exercise) -> None:
    text = (ROOT / exercise.page).read_text()
    assert f"# Exercise {exercise.number}: {exercise.title}" in text
    for needed in (*exercise.places, *(f"learn {name} {exercise.number}" for name in ("start", "check", "hint"))):
        assert needed in text
    assert exercise.file_name in text
    assert exercise.page in exercise.stub


@pytest.mark.spec("LEARN-03")
def test_requirements_of_checks_are_in_the_specification() -> None:
    known = set(
        re.findall(r"^\| ([A-Z0-9]+(?:-[A-Z]+)*-\d+) \|", (ROOT / "docs" / "spec.md").read_text(), re.MULTILINE)
    )
    named = {name for e in exercises() for check in e.checks for name in check.requirements.split(", ")}
    assert named <= known
    assert [exercise.number for exercise in exercises()] == [*range(1, 11)]
    assert all(len(exercise.hints) == 3 for exercise in exercises())
