"""The teacher's pack: its texts, and its slides in a browser."""

from __future__ import annotations

import io
import os
import re
import subprocess
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from docs_build.pages.exercises import answers_of, texts
from docs_build.pages.slides import LECTURES, slides_of
from docs_build.reading.order import ROOT
from docs_build.tests.browser import Tab
from minifsdp_tools.learn.exercises import exercises

FOLDER = ROOT / "docs" / "teach"
PLAN, LAB, ANSWERS = ((FOLDER / f"{name}.md").read_text(encoding="utf-8") for name in ("index", "lab", "answers"))
DECKS = {lecture: slides_of(lecture) for lecture in LECTURES}
DIRECTIVE = re.compile(r"^\{\{ (\w+) ?(.*?) \}\}$", re.MULTILINE)
of_lecture = pytest.mark.parametrize("lecture", LECTURES)


# ---- the texts ----


@pytest.mark.spec("TEACH-01")
@of_lecture
def test_lecture_has_short_slides_with_notes(lecture: str) -> None:
    assert 15 <= len(DECKS[lecture]) <= 20
    for slide in DECKS[lecture]:
        text = DIRECTIVE.sub("", slide.text).strip()
        assert len(DIRECTIVE.findall(slide.text)) <= 1, slide.title
        assert len(re.findall(r"^\* ", text, re.MULTILINE)) <= 4, slide.title
        assert len(text.split()) <= 70, slide.title
        assert 15 <= len(slide.notes.split()) <= 90, slide.title
        # A question is alone on its slide, and its answer is not on it.
        assert not slide.question or not text


@pytest.mark.spec("TEACH-03")
@of_lecture
def test_parts_of_a_session_take_its_minutes_and_contain_each_slide(lecture: str) -> None:
    rows = [line for line in PLAN.splitlines() if f"]({lecture}.md#slide-" in line and line.startswith("| ")]
    assert sum(int(minutes) for row in rows for minutes in re.findall(r"\| (\d+)<br>", row)) == 90
    # The first and the last slide of each part.
    parts = [[int(number) for number in re.findall(r"#slide-(\d+)", row)] for row in rows]
    shown = [number for part in parts for number in range(part[0], part[-1] + 1)]
    assert shown == [slide.number for slide in DECKS[lecture]]
    for row, part in zip(rows, parts, strict=True):
        asked = [slide.title for slide in DECKS[lecture][part[0] - 1 : part[-1]] if slide.question]
        assert all(title.removeprefix("Question: ") in row for title in asked), row
    assert any("(../lab/" in row for row in rows)


@pytest.mark.spec("TEACH-04")
def test_lab_has_points_and_questions_for_each_exercise_of_the_package() -> None:
    rows = re.findall(r"^\| \d+ \| .* \| `(\w+)` \| .* \| (\d+) \|$", LAB, re.MULTILINE)
    assert [name for name, _ in rows] == [exercise.name for exercise in exercises()]
    assert sum(int(points) for _, points in rows) == 100
    asked, answered = (text.partition("### Exercise 1:")[2].split("### Exercise") for text in (LAB, ANSWERS))
    assert len(asked) == len(answered) == len(rows)
    for questions, both in zip(asked, answered, strict=True):
        numbered = re.findall(r"^\d+\. (.*)$", questions, re.MULTILINE)
        assert numbered
        assert numbered == re.findall(r"^\d+\. (.*)$", both, re.MULTILINE)
        assert both.count("**Answer.**") == len(numbered)
        assert "**Answer.**" not in questions


@pytest.mark.spec("TEACH-04")
def test_commands_of_the_lab_write_the_result_of_each_check(tmp_path: Path) -> None:
    commands = next(block for block in re.findall(r"```bash\n(.*?)```", LAB, re.DOTALL) if "grades.csv" in block)
    # Replaces Python: the result of a check is the number in the student's file.
    (tmp_path / "python").write_text('#!/bin/sh\necho "check $4"; exit "$(cat "$6/result")"\n')
    (tmp_path / "python").chmod(0o755)
    results = {"anna": 0, "ben": 1, "chris": 2}
    for name, result in results.items():
        (tmp_path / "handed-in" / name).mkdir(parents=True)
        (tmp_path / "handed-in" / name / "result").write_text(str(result))
    command = commands.replace("$(seq 10)", "1 2")
    path = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env=path, check=True, timeout=60)
    expected = [f"{name},{number},{result}" for name, result in results.items() for number in (1, 2)]
    assert (tmp_path / "grades.csv").read_text().split() == expected


# `test_search.py` checks that the search does not find the page.
@pytest.mark.spec("TEACH-05")
@of_lecture
def test_answers_contain_each_question_of_the_slides(lecture: str) -> None:
    assert "This page is public" in ANSWERS
    assert f"{{{{ answers {lecture} }}}}" in ANSWERS
    names = [slide.question for slide in DECKS[lecture] if slide.question]
    assert len(names) >= 5
    assert all(part in answers_of(lecture) for name in names for part in texts()[name])


# ---- the slides, in a browser ----


@pytest.mark.spec("TEACH-06")
@of_lecture
def test_page_without_scripts_is_a_document(site: Path, chromium: Any, lecture: str) -> None:
    with chromium.new_page(java_script_enabled=False) as page:
        page.goto(f"{site.as_uri()}/teach/{lecture}.html")
        shown = [
            page.locator(f"{one}:visible").count() for one in (".slides-start", ".slides > .slide", ".slide .notes")
        ]
    assert shown == [0, len(DECKS[lecture]), len(DECKS[lecture])]


@pytest.mark.spec("TEACH-07")
@pytest.mark.parametrize("place", ["server", "disk"])
def test_keys_and_buttons_change_the_slide(site: Path, address: str, tab: Tab, place: str) -> None:
    tab.open(f"{address if place == 'server' else site.as_uri() + '/'}teach/lecture-1.html")
    total = len(DECKS["lecture-1"])
    # Before the slides are shown, the keys have no effect.
    tab.press("ArrowRight")
    assert len(tab.each(".slides > .slide")) == total
    tab.click(".slides-start")
    tab.look("document.activeElement.blur()")
    presses = ["ArrowRight", "PageDown", " ", "ArrowLeft", "PageUp", "End", "ArrowRight", "Home", "ArrowLeft"]
    for key, number in zip(presses, [2, 3, 4, 3, 2, total, total, 1, 1], strict=True):
        tab.press(key)
        assert tab.text(".slides-position") == f"{number} / {total}", key
        assert tab.look("location.hash") == f"#slide-{number}"
        assert tab.each(".slides > .slide", "e.querySelector('h2').id") == [f"slide-{number}"]
    tab.click(".slides-next")
    assert tab.text(".slides-position") == f"2 / {total}"
    tab.press("n")
    assert len(tab.each(".slide .notes")) == 1
    tab.click(".slides-notes")
    assert tab.each(".slide .notes") == []
    tab.press("Escape")
    assert len(tab.each(".slides > .slide")) == total
    assert tab.look("location.hash") == ""
    assert tab.problems() == []


@pytest.mark.spec("TEACH-07")
def test_address_names_the_slide(address: str, tab: Tab) -> None:
    total = len(DECKS["lecture-1"])
    for asked, shown in {7: 7, 99: total}.items():
        tab.open(f"{address}teach/lecture-1.html#slide-{asked}")
        assert tab.text(".slides-position") == f"{shown} / {total}"
        assert len(tab.each(".slides > .slide")) == 1


@pytest.mark.spec("TEACH-08")
@of_lecture
def test_slides_fit_on_a_phone_and_on_a_projector(address: str, tab: Tab, lecture: str) -> None:
    tab.resize(390, 844)
    tab.open(f"{address}teach/{lecture}.html#slide-1")
    buttons = tab.each(".slides-bar button", "Math.min(e.offsetWidth, e.offsetHeight)")
    assert min(buttons) >= 40
    tab.press("n")
    for slide in DECKS[lecture]:
        assert max(tab.each(".slide", "e.scrollWidth - e.clientWidth")) <= 0, slide.title
        tab.press("ArrowRight")
    tab.resize(1280, 720)
    tab.open(f"{address}teach/{lecture}.html#slide-1")
    for slide in DECKS[lecture]:
        assert tab.each(".slide", "e.scrollHeight - e.clientHeight") == [0], slide.title
        tab.press("ArrowRight")


def squeezed(text: str) -> str:
    # A PDF can break a line anywhere, and can store a pair of letters as one character.
    return re.sub(r"\s+", "", unicodedata.normalize("NFKC", text))


@pytest.mark.spec("TEACH-09")
@pytest.mark.needs("pypdf")
@pytest.mark.parametrize("hash_", ["", "#slide-5"])
@of_lecture
def test_paper_has_one_slide_with_notes_on_each_sheet(site: Path, tab: Tab, lecture: str, hash_: str) -> None:
    from pypdf import PdfReader

    tab.open(f"{site.as_uri()}/teach/{lecture}.html{hash_}")
    paper = tab.page.pdf(prefer_css_page_size=True, format="A4")
    first, *sheets = [squeezed(page.extract_text()) for page in PdfReader(io.BytesIO(paper)).pages]
    assert squeezed("Slides for the") in first
    for slide, sheet in zip(DECKS[lecture], sheets, strict=True):
        assert sheet.startswith(squeezed(slide.title)), slide.title
        # The first words of the notes come before a link or a value.
        assert squeezed(re.split(r"[\[`{*]", slide.notes)[0])[:30] in sheet[len(slide.title) :]
