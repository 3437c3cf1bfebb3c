"""Every tutorial is a page with the record of a run."""

from __future__ import annotations

import re

import pytest

from docs_build.lessons import LESSONS, Lesson, recorded
from docs_build.order import ROOT


def test_every_script_that_the_tutorials_page_lists_is_a_lesson() -> None:
    listed = re.findall(r"^\| `(\w+\.py)`", (ROOT / "tutorials" / "README.md").read_text(), re.MULTILINE)
    assert sorted(f"tutorials/{name}" for name in listed) == sorted(lesson.name for lesson in LESSONS)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_a_lesson_was_run_and_its_words_and_pictures_are_kept(lesson: Lesson) -> None:
    run = recorded()[lesson.name]
    assert len(run["output"].splitlines()) > 3
    assert "Traceback" not in run["output"]
    assert bool(run["pictures"]) is ("svg" in lesson.arguments or "--folder" in lesson.arguments)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"])
    assert "torch" in run["machine"]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_the_command_is_the_one_that_the_lesson_gives(lesson: Lesson) -> None:
    text = (ROOT / lesson.name).read_text()
    assert f"--nproc-per-node {lesson.num_ranks} {lesson.name}" in text
