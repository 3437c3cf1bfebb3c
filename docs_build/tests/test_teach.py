"""The teacher's pack: its texts, and its slides in a browser."""

from __future__ import annotations

import base64
import io
import os
import re
import string
import subprocess
import unicodedata
from pathlib import Path

import pytest

from docs_build.reading.order import ROOT
from docs_build.tests.browser import Tab
from docs_build.tests.figures import typed
from minifsdp_tools.learn.exercises import exercises as learner_exercises

pytest.importorskip("mkdocs", reason="the slides need the documentation's packages")

from docs_build.pages import exercises, slides, teach

FOLDER = ROOT / "docs" / "teach"
DECKS = {lecture: slides.slides_of(lecture) for lecture in slides.LECTURES}
DIRECTIVE = re.compile(r"^\{\{ (\w+) ?(.*?) \}\}$", re.MULTILINE)
of_lecture = pytest.mark.parametrize("lecture", slides.LECTURES)


def prose_of(page: str) -> str:
    """The text of a page without its front matter, code, addresses and directives; captions remain."""
    _, _, text = page.removeprefix("---\n").partition("\n---\n")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = DIRECTIVE.sub(lambda found: found[2].partition(" | ")[2], text)
    text = re.sub(r"\{\{ value [\w-]+ \}\}|`[^`]*`|<[^>]*>", "", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


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


@pytest.mark.spec("TEACH-02")
def test_texts_contain_no_typed_figure() -> None:
    texts = {path.name: prose_of(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.md")}
    entries = exercises.ENTRY.findall((ROOT / "docs_build" / "pages" / "teach.md").read_text(encoding="utf-8"))
    assert len(entries) == len(teach.lab_questions())
    for name, *both in entries:
        template = re.sub(r"`[^`{]*`", "", " ".join(both))
        texts[name] = "".join(literal for literal, *_ in string.Formatter().parse(template))
    assert {name: figures for name, text in texts.items() if (figures := typed(text))} == {}


@pytest.mark.spec("TEACH-03")
@of_lecture
def test_parts_of_a_session_take_its_minutes_and_contain_each_slide(lecture: str) -> None:
    parts, table = teach.parts_of(lecture), teach.session_table(lecture)
    assert sum(part["minutes"] for part, _, _ in parts) == teach.plan()["minutes"] == 90
    assert [slide for _, shown, _ in parts for slide in shown] == list(DECKS[lecture])
    for slide in DECKS[lecture]:
        assert not slide.question or slide.title.removeprefix("Question: ") in table
    for part, shown, _ in parts:
        assert f"{lecture}.md#slide-{shown[0].number}" in table
        assert all(f"(../lab/{name}.md)" in table for name in part["lab"])


@pytest.mark.spec("TEACH-04")
def test_lab_has_points_and_questions_for_each_exercise_of_the_package() -> None:
    listed = teach.plan()["exercise"]
    assert [one["name"] for one in listed] == [exercise.name for exercise in learner_exercises()]
    assert sum(one["points"] for one in listed) == teach.plan()["points"] == 100
    assert sorted(name for one in listed for name in one["questions"]) == sorted(teach.lab_questions())
    asked, answered = (teach.lab(with_answers=with_answers) for with_answers in (False, True))
    for question, answer in teach.lab_questions().values():
        assert question in asked
        assert answer in answered
        assert answer not in asked


@pytest.mark.spec("TEACH-04")
def test_commands_of_the_lab_write_the_result_of_each_check(tmp_path: Path) -> None:
    page = (FOLDER / "lab.md").read_text(encoding="utf-8")
    commands = next(block for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "grades.csv" in block)
    # Replaces Python: the result of a check is the number in the student's file.
    (tmp_path / "python").write_text('#!/bin/sh\necho "check $4"; exit "$(cat "$6/result")"\n')
    (tmp_path / "python").chmod(0o755)
    results = {"anna": 0, "ben": 1, "chris": 2}
    for name, result in results.items():
        (tmp_path / "handed-in" / name).mkdir(parents=True)
        (tmp_path / "handed-in" / name / "result").write_text(str(result))
    command = commands.replace("{{ value teach-num-exercises }}", "2")
    path = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env=path, check=True, timeout=60)
    expected = [f"{name},{number},{result}" for name, result in results.items() for number in (1, 2)]
    assert (tmp_path / "grades.csv").read_text().split() == expected


# `test_search.py` checks that the search does not find the page.
@pytest.mark.spec("TEACH-05")
@of_lecture
def test_answers_contain_each_question_of_the_slides(lecture: str) -> None:
    page = (FOLDER / "answers.md").read_text(encoding="utf-8")
    assert "This page is public" in page
    assert "{{ lab_answers }}" in page
    assert f"{{{{ answers {lecture} }}}}" in page
    names = [slide.question for slide in DECKS[lecture] if slide.question]
    assert len(names) >= 5
    assert all(part in teach.answers_of(lecture) for name in names for part in exercises.exercise(name))


# ---- the slides, in a browser ----


@pytest.mark.spec("TEACH-06")
@of_lecture
def test_page_without_scripts_is_a_document(site: Path, tab: Tab, lecture: str) -> None:
    tab.send("Emulation.setScriptExecutionDisabled", value=True)
    tab.open(f"{site.as_uri()}/teach/{lecture}.html")
    shown = [len(tab.each(selector)) for selector in (".slides-start", ".slides > .slide", ".slide .notes")]
    tab.send("Emulation.setScriptExecutionDisabled", value=False)
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
    data = tab.send("Page.printToPDF", preferCSSPageSize=True, paperWidth=210 / 25.4, paperHeight=297 / 25.4)["data"]
    first, *sheets = [squeezed(page.extract_text()) for page in PdfReader(io.BytesIO(base64.b64decode(data))).pages]
    assert squeezed("Slides for the") in first
    for slide, sheet in zip(DECKS[lecture], sheets, strict=True):
        assert sheet.startswith(squeezed(slide.title)), slide.title
        # The first words of the notes come before a link or a value.
        assert squeezed(re.split(r"[\[`{*]", slide.notes)[0])[:30] in sheet[len(slide.title) :]
