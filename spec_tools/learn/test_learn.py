"""The commands of the exercises, the grader, and the typical wrong solutions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minifsdp import learn
from minifsdp.engine.lifetime import RateLimiter
from spec_tests.harness.accounting import ROOT
from spec_tools.learn import typical
from spec_tools.learn.__main__ import PROGRESS, main
from spec_tools.learn.exercises import EXERCISES, Exercise, statement_of
from spec_tools.learn.grade import grade
from spec_tools.learn.solution import SolutionError, stub, with_solution
from spec_tools.learn.typical import WRONG, solution_of, wrong_solution

pytestmark = pytest.mark.pure


def written(folder: Path, number: int, text: str) -> None:
    (folder / EXERCISES[number].file_name).write_text(text)


# ---- commands ----


@pytest.mark.spec("LEARN-01")
def test_command_lists_ten_exercises(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minifsdp.learn", "list"]
    # In a folder of the learner, outside of the repository.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [str(number) for number in range(1, 11)]
    assert lines[5].split("  ")[1].strip() == "The rate limiter"


@pytest.mark.spec("LEARN-01")
def test_installed_package_without_the_repository_explains_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learn, "ROOT", tmp_path)
    assert learn.main() == 2
    assert "Clone the repository" in capsys.readouterr().err


@pytest.mark.spec("LEARN-01")
@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=lambda exercise: exercise.title)
def test_each_exercise_has_a_page_hints_and_lessons(exercise: Exercise) -> None:
    page = (ROOT / "docs" / exercise.page).read_text(encoding="utf-8")
    assert f"\n# Exercise {exercise.number}: {exercise.title}\n" in page
    assert f"**Task.** Write `{exercise.place}(" in page
    assert f"python -m minifsdp.learn check {exercise.number}\n" in page
    assert f"]({exercise.number:02}.md)" in (ROOT / "docs" / "exercises" / "index.md").read_text(encoding="utf-8")
    assert len(set(exercise.hints)) == 3
    for row in exercise.lessons:
        assert statement_of(row)
    # The page explains the task. It does not contain the solution.
    body = [line.strip() for line in solution_of(exercise).splitlines()[3:] if len(line.strip()) > 30]
    assert sum(line in page for line in body) <= len(body) / 4


@pytest.mark.spec("LEARN-02")
def test_start_writes_the_signature_and_keeps_an_existing_file(tmp_path: Path) -> None:
    assert main(["start", "6", "--folder", str(tmp_path)]) == 0
    path = tmp_path / "exercise_06.py"
    text = path.read_text()
    assert "def throttle(self, unit_name: str) -> None:" in text
    assert text.rstrip().endswith("raise NotImplementedError")
    assert "popleft" not in text
    path.write_text("mine")
    assert main(["start", "6", "--folder", str(tmp_path)]) == 1
    assert path.read_text() == "mine"


@pytest.mark.spec("LEARN-02")
def test_each_call_of_hint_prints_one_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for _ in range(4):
        assert main(["hint", "8", "--folder", str(tmp_path)]) == 0
        counts.append(len(capsys.readouterr().out.splitlines()))
    assert counts == [1, 2, 3, 3]


@pytest.mark.spec("LEARN-01", "LEARN-03")
def test_check_stores_the_progress_in_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "8", "--folder", str(tmp_path)]) == 1
    assert "start 8" in capsys.readouterr().err
    written(tmp_path, 8, wrong_solution(EXERCISES[8], "The quotient is rounded down"))
    assert main(["check", "8", "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "FS2-05 is not met: " in said and EXERCISES[8].lessons["FS2-05"] in said and "Test: spec_tests/" in said
    assert main(["list", "--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[7].endswith("started")
    written(tmp_path, 8, solution_of(EXERCISES[8]))
    assert main(["check", "8", "--folder", str(tmp_path)]) == 0
    assert "Exercise 8 is solved" in capsys.readouterr().out
    assert json.loads((tmp_path / PROGRESS).read_text())["8"] == {"hints": 0, "checks": 2, "solved": True}


# ---- the grader ----


@pytest.mark.spec("LEARN-03")
def test_check_ends_if_the_function_does_not_return_and_changes_no_installed_function() -> None:
    before = RateLimiter.throttle
    path = Path(sys.modules[RateLimiter.__module__].__file__ or "")
    text = path.read_text()
    result = grade(EXERCISES[6], "def throttle(self, unit_name):\n    import time\n    time.sleep(1000)\n", limit=30.0)
    assert not result.is_solved and result.text
    assert RateLimiter.throttle is before and path.read_text() == text


@pytest.mark.spec("LEARN-05")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def throttle(self:\n", "not valid Python: line 1"),
        ("def other(self):\n    pass\n", "no function throttle()"),
        ("def throttle(self):\n    pass\n", r"must have the arguments \(self, unit_name\)"),
        (stub(EXERCISES[6]), "still raises NotImplementedError"),
    ],
    ids=["syntax error", "other function", "other arguments", "no body"],
)
def test_unsuitable_file_gives_a_message(text: str, problem: str) -> None:
    with pytest.raises(SolutionError, match=problem.replace("()", r"\(\)")):
        with_solution(EXERCISES[6], text)
    result = grade(EXERCISES[6], text)
    assert not result.is_solved and re.search(problem.replace("()", r"\(\)"), result.text)


@pytest.mark.spec("LEARN-03")
def test_solution_may_have_imports_and_functions_of_its_own() -> None:
    text = "import math\n\ndef rows(size, n):\n    return math.ceil(size / n)\n\n" + (
        "def shard_range(size, num_shards, index):\n    most = rows(size, num_shards)\n"
        "    return range(min(index * most, size), min((index + 1) * most, size))\n"
    )
    changed = with_solution(EXERCISES[8], text).text
    names: dict[str, object] = {}
    exec(compile(changed, "shards.py", "exec"), names)
    find = names["shard_range"]
    assert callable(find) and [find(5, 4, index) for index in range(4)] == [
        range(2),
        range(2, 4),
        range(4, 5),
        range(5, 5),
    ]


# ---- typical solutions ----


@pytest.mark.spec("LEARN-04")
def test_record_has_a_failed_requirement_for_each_wrong_solution() -> None:
    found = json.loads(typical.RECORD.read_text())
    assert found
    for number, mistakes in found.items():
        assert set(mistakes) == set(WRONG[int(number)])
        for rows in mistakes.values():
            assert rows and set(rows) <= set(EXERCISES[int(number)].lessons)


@pytest.mark.spec("LEARN-04")
@pytest.mark.parametrize("mistake", WRONG[8])
def test_typical_wrong_solution_fails_with_its_lesson(mistake: str) -> None:
    exercise = EXERCISES[8]
    result = grade(exercise, wrong_solution(exercise, mistake))
    assert result.failed and not result.is_solved
    for row in result.failed:
        assert f"{row} is not met: {statement_of(row)}\n  {exercise.lessons[row]}\n  Test: spec_tests/" in result.text


@pytest.mark.spec("LEARN-04")
def test_every_solution_and_every_mistake_applies_to_the_package() -> None:
    for number, exercise in EXERCISES.items():
        assert with_solution(exercise, solution_of(exercise)).text
        texts = {with_solution(exercise, wrong_solution(exercise, mistake)).text for mistake in WRONG[number]}
        assert len(texts) == 4
