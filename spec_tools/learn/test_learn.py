"""``python -m minifsdp_tools.learn``: its commands, and the verdicts about right and wrong solutions."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from minifsdp_tools.learn.__main__ import main
from minifsdp_tools.learn.exercises import Exercise, exercises
from minifsdp_tools.learn.grader import grade, load
from spec_tools.learn.grading import PACKAGE, SOLUTION, STUB, wrong_solutions

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


@pytest.mark.spec("LEARN-03", "LEARN-04")
@each_exercise
def test_each_solution_gets_the_message_about_its_mistake(exercise: Exercise, verdicts: Verdicts) -> None:
    for about in (PACKAGE, SOLUTION):
        assert verdicts[exercise.number, about]["entry"] is None, verdicts[exercise.number, about]["text"]
    stub = verdicts[exercise.number, STUB]
    assert stub["entry"] == "not-written"
    assert any(f"`{name}` is not written yet" in stub["text"] for name in exercise.places)
    wrong = wrong_solutions(exercise)
    assert len(wrong) >= 4
    for each in wrong:
        verdict = verdicts[exercise.number, each["about"]]
        assert verdict["entry"] == each["entry"]
        assert len(verdict["text"]) > 60


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
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "hints" in line)
    assert line.endswith("3 of 3 hints")


@pytest.mark.spec("LEARN-02", "LEARN-03")
def test_check_prints_requirements_and_stores_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "6", "--folder", str(tmp_path)]
    assert main(arguments) == 2
    assert "python -m minifsdp_tools.learn start 6" in capsys.readouterr().out
    solution = (ROOT / "spec_tools" / "learn" / "solutions" / "limiter.py").read_text()
    (tmp_path / "06_limiter.py").write_text(solution)
    command = [sys.executable, "-m", "minifsdp_tools.learn", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^(\w+) .*\[(LIM-\d\d)", done.stdout, re.MULTILINE)
    assert found == [("passed", f"LIM-0{number}") for number in (2, 3, 2, 5)]
    assert "engine.lifetime.RateLimiter.throttle" in done.stdout
    assert json.loads((tmp_path / "progress.json").read_text())["solved"] == [6]


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
