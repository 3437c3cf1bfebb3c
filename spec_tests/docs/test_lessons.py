"""Every tutorial is a page with the record of a run."""

from __future__ import annotations

import os
import re
from pathlib import Path

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


@pytest.mark.needs("mkdocs")
def test_the_index_says_of_each_lesson_what_it_needs_and_what_comes_out() -> None:
    from docs_build.lessonpage import index_page

    cards = index_page().split("<li>")[1:]
    for lesson, card in zip(LESSONS, cards, strict=True):
        facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", card))
        assert lesson.title in card
        assert facts["ranks"] == str(lesson.num_ranks)
        assert facts["time"].startswith(f"{recorded()[lesson.name]['seconds']} seconds")
        assert facts["needs"] == (", ".join(lesson.extras) or "nothing else")
        assert len(facts["out comes"]) > 50


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_a_lessons_title_is_short_and_for_people(lesson: Lesson) -> None:
    assert ".py" not in lesson.title
    assert 8 <= len(lesson.title) <= 48
    assert lesson.title in re.sub(r"[`*]", "", (ROOT / lesson.name).read_text().split("\n")[0])


def test_what_a_lesson_needs_is_what_the_list_of_scripts_says() -> None:
    text = (ROOT / "tutorials" / "README.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+\.py)` \|.*\| *(.*?) *\|$", text, re.MULTILINE))
    assert {f"tutorials/{name}": said for name, said in listed.items()} == {
        lesson.name: ", ".join(lesson.extras) for lesson in LESSONS
    }


# What the essays say, with the seconds that may be meant by it on a machine that does nothing else.
WORDS = {
    "a few seconds": range(2, 11),
    "some seconds": range(5, 21),
    "about a quarter of a minute": range(8, 24),
    "about a minute": range(40, 91),
    "about a minute and a half": range(60, 135),
}


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_the_time_that_an_essay_says_is_that_of_the_recorded_run(lesson: Lesson) -> None:
    said = re.search(r"^It takes (.+?) on two CPU cores", (ROOT / lesson.name).read_text(), re.MULTILINE)
    run = recorded()[lesson.name]
    assert said
    # A run on a machine that others took wholly says nothing about the time.
    assert run["others"] < 1
    assert run["seconds"] in WORDS[said[1]]


def test_others_are_those_who_work_beside_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from docs_build import busy

    stat, seconds = tmp_path / "stat", iter([100.0, 110.0])
    monkeypatch.setattr(busy, "STAT", stat)
    monkeypatch.setattr(busy, "_ours", iter([1.0, 13.0]).__next__)
    monkeypatch.setattr(busy.time, "monotonic", seconds.__next__)
    ticks = os.sysconf("SC_CLK_TCK")
    stat.write_text(f"cpu {50 * ticks} 0 0 {99 * ticks} 0 0 0 0 0 0\n")
    others = busy.Others()
    stat.write_text(f"cpu {60 * ticks} 0 {7 * ticks} {999 * ticks} 0 0 0 0 0 0\n")
    # The cores have worked 17 seconds of these ten, we 12.
    assert others.cores() == 0.5


def test_where_the_system_does_not_count_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from docs_build import busy

    monkeypatch.setattr(busy, "STAT", tmp_path / "none")
    assert busy.Others().cores() is None
