"""The teacher's pack: its texts, and its slides in a browser."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import string
import subprocess
from pathlib import Path
from typing import Any

import pytest

from docs_build.reading.order import ROOT
from docs_build.tests.browser import Tab
from docs_build.tests.contrast import contrasts
from docs_build.tests.test_print import squeezed
from minifsdp_tools.learn.exercises import exercises as learner_exercises

pytest.importorskip("mkdocs", reason="the slides need the documentation's packages")

from docs_build.pages import exercises, slides, teach

FOLDER = ROOT / "docs" / "teach"
DECKS = {lecture: slides.slides_of(lecture) for lecture in slides.LECTURES}
ALL = [(lecture, slide) for lecture, deck in DECKS.items() for slide in deck]
IDS = [f"{lecture}-{slide.number}" for lecture, slide in ALL]
DIRECTIVE = re.compile(r"^\{\{ (\w+) ?(.*?) \}\}$", re.MULTILINE)
of_slide = pytest.mark.parametrize(("lecture", "slide"), ALL, ids=IDS)
of_lecture = pytest.mark.parametrize("lecture", slides.LECTURES)

# Names that contain a digit.
NAMES = re.compile(
    r"\b(?:float32|float16|bfloat16|FSDP[12]|ZeRO-[123]|BSD 3-Clause|[Ll]ecture [12]|[Rr]ank 0|[Ee]xercise \d+)\b"
)
WORDS = re.compile(
    r"\b(?:three|four|five|six|seven|eight|nine|ten|twelve|twice|half|doubled?|thirds?|quarters?|dozens?|hundreds?"
    r"|thousands?|millions?|billions?)\b",
    re.IGNORECASE,
)


def prose_of(page: str) -> str:
    """The text of a page without its front matter, code, addresses and directives; captions remain."""
    _, _, text = page.removeprefix("---\n").partition("\n---\n")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = DIRECTIVE.sub(lambda found: found[2].partition(" | ")[2], text)
    text = re.sub(r"\{\{ value [\w-]+ \}\}|`[^`]*`|<[^>]*>", "", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def typed(prose: str) -> list[str]:
    """The figures in a text."""
    rest = NAMES.sub("", prose)
    return re.findall(r"\S*\d\S*", rest) + WORDS.findall(rest)


# ---- the texts ----


@pytest.mark.spec("TEACH-01")
@of_lecture
def test_lecture_has_about_fifteen_to_twenty_slides(lecture: str) -> None:
    deck = DECKS[lecture]
    assert 15 <= len(deck) <= 20
    assert [slide.number for slide in deck] == list(range(1, len(deck) + 1))
    assert len({slide.title for slide in deck}) == len(deck)


@pytest.mark.spec("TEACH-01")
@of_slide
def test_slide_is_short_and_has_notes(lecture: str, slide: slides.Slide) -> None:
    shown = DIRECTIVE.findall(slide.text)
    assert len(shown) <= 1
    text = DIRECTIVE.sub("", slide.text).strip()
    points = re.findall(r"^\* ", text, re.MULTILINE)
    sentences = re.findall(r"[.?:](?=\s|$)", text)
    assert shown or points
    assert len(points) <= 4 if points else len(sentences) <= 2
    assert len(text.split()) <= 70
    assert len(slide.title) <= 45
    assert 15 <= len(slide.notes.split()) <= 90
    # A question is alone on its slide, and its answer is not on it.
    assert not slide.question or not text


@pytest.mark.spec("TEACH-01")
@of_slide
def test_code_on_a_slide_is_readable_from_the_last_row(lecture: str, slide: slides.Slide) -> None:
    from docs_build.pages.fragments import fragment

    for verb, rest in DIRECTIVE.findall(slide.text):
        if verb == "code":
            assert fragment(*rest.split(), "teach/lecture-1.html").count("\n") <= 22


@pytest.mark.spec("TEACH-02")
@pytest.mark.parametrize("page", sorted(path.name for path in FOLDER.glob("*.md")))
def test_page_contains_no_typed_figure(page: str) -> None:
    assert typed(prose_of((FOLDER / page).read_text(encoding="utf-8"))) == []


@pytest.mark.spec("TEACH-02")
def test_questions_of_the_lab_contain_no_typed_figure() -> None:
    entries = exercises.ENTRY.findall((ROOT / "docs_build" / "pages" / "teach.md").read_text(encoding="utf-8"))
    assert len(entries) == len(teach.lab_questions())
    found = {}
    for name, question, answer in entries:
        template = re.sub(r"`[^`{]*`", "", f"{question} {answer}")
        found[name] = typed("".join(literal for literal, *_ in string.Formatter().parse(template)))
    assert {name: figures for name, figures in found.items() if figures} == {}


@pytest.mark.spec("TEACH-02")
def test_typed_figures_are_found() -> None:
    assert typed("Rank 0 stores **16 GB** in float32.") == ["**16"]
    assert typed("It sends three times as much.") == ["three"]
    page = "---\na: 1\n---\n{{ sketch weight | On 4 ranks. }}\n\n[7](x-8.md) `9` {{ value teach-bytes }}\n"
    assert typed(prose_of(page)) == ["4", "[7]"]


@pytest.mark.spec("TEACH-02")
def test_every_value_of_the_pack_is_used_and_computed() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md"))
    assert set(re.findall(r"\{\{ value ([\w-]+) \}\}", pages)) == set(teach.VALUES)
    assert all(re.match(r"\d", str(make())) for make in teach.VALUES.values())


@pytest.mark.spec("TEACH-03")
@of_lecture
def test_parts_of_a_session_take_its_minutes_and_contain_each_slide(lecture: str) -> None:
    parts = teach.parts_of(lecture)
    assert sum(part["minutes"] for part, _, _ in parts) == teach.plan()["minutes"] == 90
    assert [slide for _, shown, _ in parts for slide in shown] == list(DECKS[lecture])
    assert [begin for _, _, begin in parts] == [sum(p["minutes"] for p, _, _ in parts[:n]) for n in range(len(parts))]


@pytest.mark.spec("TEACH-03")
@of_lecture
def test_plan_shows_questions_and_links_of_each_part(lecture: str) -> None:
    table = teach.session_table(lecture)
    for slide in DECKS[lecture]:
        assert not slide.question or slide.title.removeprefix("Question: ") in table
    for part, shown, _ in teach.parts_of(lecture):
        assert f"{lecture}.md#slide-{shown[0].number}" in table
        assert all(f"(../lab/{name}.md)" in table for name in part["lab"])
    numbers = [number for part, _, _ in teach.parts_of(lecture) for number in part.get("exercises", [])]
    linked = re.findall(r"\[exercise (\d+)\]\(\.\./learn/exercises/([\w-]+)\.md\)", table)
    pages = {exercise.number: Path(exercise.page).stem for exercise in learner_exercises()}
    assert linked == [(str(number), pages[number]) for number in numbers]


@pytest.mark.spec("TEACH-04")
def test_lab_has_the_exercises_of_the_package() -> None:
    listed = [(one["name"], one["title"]) for one in teach.plan()["exercise"]]
    assert listed == [(exercise.name, exercise.title) for exercise in learner_exercises()]


@pytest.mark.spec("TEACH-03")
def test_each_exercise_belongs_to_one_part() -> None:
    found = [n for lecture in DECKS for part, _, _ in teach.parts_of(lecture) for n in part.get("exercises", [])]
    assert sorted(found) == list(range(1, len(teach.plan()["exercise"]) + 1))


@pytest.mark.spec("TEACH-04")
def test_points_have_the_sum_100() -> None:
    listed = teach.plan()["exercise"]
    assert len(listed) == 10
    assert sum(one["points"] for one in listed) == teach.plan()["points"] == 100
    assert "**100**" in teach.points_table().splitlines()[-1]
    assert [line.split("|")[5].strip() for line in teach.points_table().splitlines()[2:-1]] == [
        str(one["points"]) for one in listed
    ]


@pytest.mark.spec("TEACH-04")
def test_each_exercise_has_questions_with_answers() -> None:
    used = [name for one in teach.plan()["exercise"] for name in one["questions"]]
    assert sorted(used) == sorted(teach.lab_questions())
    assert all(len(one["questions"]) >= 2 for one in teach.plan()["exercise"])
    asked = teach.lab(with_answers=False)
    answered = teach.lab(with_answers=True)
    for question, answer in teach.lab_questions().values():
        assert question in asked
        assert question in answered
        assert answer in answered
        assert answer not in asked
        assert not re.search(r"[{}]", question + answer)


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
    assert (tmp_path / "handed-in" / "ben" / "2.txt").read_text() == "check 2\n"


@pytest.mark.spec("TEACH-05")
def test_answers_contain_each_question_of_the_slides() -> None:
    page = (FOLDER / "answers.md").read_text(encoding="utf-8")
    assert "This page is public" in page
    assert "{{ lab_answers }}" in page
    for lecture, deck in DECKS.items():
        assert f"{{{{ answers {lecture} }}}}" in page
        text = teach.answers_of(lecture)
        names = [slide.question for slide in deck if slide.question]
        assert len(names) >= 5
        assert all(exercises.exercise(name)[0] in text and exercises.exercise(name)[1] in text for name in names)


# ---- the slides, in a browser ----

browser = [pytest.mark.docs, pytest.mark.needs("mkdocs")]
SHOWN = "[...document.querySelectorAll('.slides > .slide')].filter(e => e.getClientRects().length).length"
NUMBER = "document.querySelector('.slides-position').textContent"
NOTES = "[...document.querySelectorAll('.slide.is-shown .notes')].filter(e => e.getClientRects().length).length"
SCROLLED = "document.documentElement.scrollWidth"


def at(tab: Tab, address: str, lecture: str, hash_: str = "") -> None:
    tab.open("about:blank")
    tab.open(f"{address}teach/{lecture}.html{hash_}")


@pytest.mark.spec("TEACH-05")
@browser[0]
@browser[1]
def test_search_does_not_find_the_answers(site: Path) -> None:
    text = (site / "search" / "documents.js").read_text(encoding="utf-8")
    documents: list[dict[str, Any]] = json.loads(text.removeprefix("var minifsdpDocuments = ").rstrip().rstrip(";"))
    found = {document["location"].partition("#")[0] for document in documents}
    assert "teach/lab.html" in found
    assert "teach/answers.html" not in found


@pytest.mark.spec("TEACH-06")
@browser[0]
@browser[1]
@of_lecture
def test_page_without_scripts_is_a_document(site: Path, tab: Tab, lecture: str) -> None:
    tab.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        at(tab, site.as_uri() + "/", lecture, "#slide-7")
        assert tab.look("document.querySelectorAll('.slides-start, .slides-bar').length") == 0
        assert tab.look(SHOWN) == len(DECKS[lecture])
        visible = "[...document.querySelectorAll('{}')].filter(e => e.getClientRects().length).length"
        assert tab.look(visible.format(".slide .notes")) == len(DECKS[lecture])
        titles = tab.look("[...document.querySelectorAll('.slide > h2')].map(e => e.firstChild.textContent)")
        # A term of the glossary ends the first text of a headline.
        assert all(slide.title.startswith(title.strip()) for slide, title in zip(DECKS[lecture], titles, strict=True))
        assert all(title.strip() for title in titles)
        top = tab.look("document.getElementById('slide-7').getBoundingClientRect().top")
        assert 0 <= top < 300
    finally:
        tab.send("Emulation.setScriptExecutionDisabled", value=False)


@pytest.mark.spec("TEACH-07")
@browser[0]
@browser[1]
@pytest.mark.parametrize("place", ["server", "disk"])
def test_keys_change_the_slide(site: Path, address: str, tab: Tab, place: str) -> None:
    at(tab, address if place == "server" else site.as_uri() + "/", "lecture-1")
    total = len(DECKS["lecture-1"])
    # Before the slides are shown, the keys have no effect.
    tab.press("ArrowRight")
    assert tab.look(SHOWN) == total
    tab.click(".slides-start")
    presses = ["ArrowRight", "PageDown", " ", "ArrowLeft", "PageUp", "End", "ArrowRight", "Home", "ArrowLeft"]
    numbers = [2, 3, 4, 3, 2, total, total, 1, 1]
    tab.look("document.activeElement.blur()")
    for key, number in zip(presses, numbers, strict=True):
        tab.press(key)
        assert tab.look(NUMBER) == f"{number} / {total}", key
        assert tab.look("location.hash") == f"#slide-{number}"
        assert tab.look(SHOWN) == 1
        assert tab.look("document.querySelector('.slide.is-shown > h2').id") == f"slide-{number}"
    tab.press("ArrowRight")
    tab.send("Input.dispatchKeyEvent", type="keyDown", key=" ", code="Space", windowsVirtualKeyCode=32, modifiers=8)
    assert tab.look(NUMBER) == f"1 / {total}"
    # The theme opens the next page when "n" is pressed.
    for expected in (1, 0, 1):
        tab.press("n")
        assert tab.look(NOTES) == expected
    tab.press("ArrowRight")
    assert tab.look(NOTES) == 1
    tab.press("Escape")
    assert tab.look(SHOWN) == total
    assert tab.look("location.hash") == ""
    assert 0 <= tab.look("document.getElementById('slide-2').getBoundingClientRect().top") < 300
    assert tab.look("document.documentElement.style.fontSize") == ""
    assert tab.look("location.pathname").endswith("teach/lecture-1.html")
    assert tab.problems() == []


@pytest.mark.spec("TEACH-07")
@browser[0]
@browser[1]
def test_buttons_change_the_slide(address: str, tab: Tab) -> None:
    at(tab, address, "lecture-2")
    total = len(DECKS["lecture-2"])
    tab.click(".slides-start")
    assert tab.look("document.querySelector('.slides-previous').disabled")
    for number in (2, 3):
        tab.click(".slides-next")
        assert tab.look(NUMBER) == f"{number} / {total}"
    # The space bar presses the focused button once, and does not change the slide in addition.
    tab.look("document.querySelector('.slides-next').focus()")
    tab.press(" ")
    assert tab.look(NUMBER) == f"4 / {total}"
    tab.click(".slides-previous")
    assert tab.look(NUMBER) == f"3 / {total}"
    pressed = "document.querySelector('.slides-notes').getAttribute('aria-pressed')"
    assert tab.look(pressed) == "false"
    tab.click(".slides-notes")
    assert tab.look(pressed) == "true"
    assert tab.look(NOTES) == 1
    tab.click(".slides-leave")
    assert tab.look(SHOWN) == total
    names = tab.look("[...document.querySelectorAll('.slides-bar button')].map(e => e.getAttribute('aria-label'))")
    assert all(len(name) > 10 for name in names)
    assert tab.problems() == []


@pytest.mark.spec("TEACH-07")
@browser[0]
@browser[1]
def test_address_names_the_slide(address: str, tab: Tab) -> None:
    total = len(DECKS["lecture-1"])
    at(tab, address, "lecture-1", "#slide-7")
    assert tab.look(NUMBER) == f"7 / {total}"
    assert tab.look(SHOWN) == 1
    tab.look("location.hash = '#slide-3'; new Promise(done => setTimeout(done, 100))")
    assert tab.look(NUMBER) == f"3 / {total}"
    at(tab, address, "lecture-1", "#slide-99")
    assert tab.look(NUMBER) == f"{total} / {total}"


@pytest.mark.spec("TEACH-08")
@browser[0]
@browser[1]
@of_lecture
def test_slides_fit_on_a_phone_and_on_a_projector(address: str, tab: Tab, lecture: str) -> None:
    sizes = "((s) => {})(document.querySelector('.slide.is-shown'))"
    wide = sizes.format("[s.scrollWidth - s.clientWidth, document.documentElement.scrollWidth - innerWidth]")
    high = sizes.format("[s.scrollHeight - s.clientHeight, parseFloat(getComputedStyle(s).fontSize)]")
    try:
        tab.resize(390, 844)
        at(tab, address, lecture)
        assert tab.look(SCROLLED) <= 390
        tab.click(".slides-start")
        buttons = "[...document.querySelectorAll('.slides-bar button')].map(e => e.getBoundingClientRect())"
        assert tab.look(f"{buttons}.every(b => b.width >= 40 && b.height >= 40 && b.left >= 0 && b.right <= 390)")
        tab.press("n")
        found = {}
        for slide in DECKS[lecture]:
            found[slide.number] = max(tab.look(wide))
            tab.press("ArrowRight")
        assert {number: pixels for number, pixels in found.items() if pixels > 0} == {}
        tab.resize(1280, 720)
        at(tab, address, lecture, "#slide-1")
        for slide in DECKS[lecture]:
            too_high, size = tab.look(high)
            assert too_high <= 0, slide.title
            assert size >= 16, slide.title
            tab.press("ArrowRight")
    finally:
        tab.resize(1280, 900)


@pytest.mark.spec("TEACH-08")
@browser[0]
@browser[1]
@pytest.mark.parametrize("scheme", ["default", "slate"])
@of_lecture
def test_slides_and_notes_have_readable_colours(address: str, tab: Tab, lecture: str, scheme: str) -> None:
    at(tab, address, lecture)
    tab.look(f"document.body.setAttribute('data-md-color-scheme', '{scheme}'); true")
    ground = "getComputedStyle(document.querySelector(s)).backgroundColor"
    grounds = f"['.slide.is-shown', '.slides-bar'].map(s => {ground})"
    low = [
        one for one in contrasts(tab, ".slides p, .slides li, .slides h2, .notes, .slide-question p") if one[0] < 4.5
    ]
    assert low == []
    tab.click(".slides-start")
    tab.press("n")
    assert [one for one in contrasts(tab, ".slide.is-shown *, .slides-bar *:not(:disabled)") if one[0] < 4.5] == []
    light = [sum(map(int, re.findall(r"\d+", ground)[:3])) for ground in tab.look(grounds)]
    assert all(one > 600 for one in light) if scheme == "default" else all(one < 200 for one in light)


def sheets(tab: Tab) -> list[str]:
    """The text of each page of the PDF."""
    from pypdf import PdfReader

    data = tab.send("Page.printToPDF", preferCSSPageSize=True, paperWidth=210 / 25.4, paperHeight=297 / 25.4)["data"]
    return [squeezed(page.extract_text()) for page in PdfReader(io.BytesIO(base64.b64decode(data))).pages]


@pytest.mark.spec("TEACH-09")
@browser[0]
@browser[1]
@pytest.mark.needs("pypdf")
@pytest.mark.parametrize("hash_", ["", "#slide-5"])
@of_lecture
def test_paper_has_one_slide_with_notes_on_each_sheet(site: Path, tab: Tab, lecture: str, hash_: str) -> None:
    at(tab, site.as_uri() + "/", lecture, hash_)
    first, *pages = sheets(tab)
    assert squeezed("Slides for the") in first
    assert len(pages) == len(DECKS[lecture])
    for slide, page in zip(DECKS[lecture], pages, strict=True):
        assert page.startswith(squeezed(slide.title)), slide.title
        # The notes are below the slide. The first words of the notes come before a link or a value.
        head, found, _ = page.partition(squeezed("Speaker notes"))
        assert found or squeezed(re.split(r"[\[`{*]", slide.notes)[0])[:30] in page[len(slide.title) :]
        assert squeezed("Show as slides") not in head
