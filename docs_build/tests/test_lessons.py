"""Every tutorial has a page with the recorded output of a run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from docs_build.reading.order import ROOT
from docs_build.recording import busy, lessons
from docs_build.recording.lessons import EVEN, FIRST_PAGE, LESSONS, Lesson, recorded, unevenness

of_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
# Phrases of the tutorials for a running time, with the seconds that each may stand for on an otherwise idle machine.
WORDS = {
    "a few seconds": range(2, 11),
    "some seconds": range(5, 21),
    "about a quarter of a minute": range(8, 24),
    "about half a minute": range(20, 46),
    "about a minute": range(40, 91),
    "about a minute and a half": range(60, 135),
}


def test_every_script_that_the_tutorials_page_lists_is_a_lesson() -> None:
    text = (ROOT / "tutorials" / "README.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+\.py)` \|.*\| *(.*?) *\|$", text, re.MULTILINE))
    assert {f"tutorials/{name}": needs for name, needs in listed.items()} == {
        lesson.name: ", ".join(lesson.extras) for lesson in LESSONS
    }


@of_lesson
def test_text_of_the_lesson_agrees_with_its_record(lesson: Lesson) -> None:
    run, text = recorded()[lesson.name], (ROOT / lesson.name).read_text()
    assert len(run["output"].splitlines()) > 3
    assert "Traceback" not in run["output"]
    assert f"--nproc-per-node {lesson.num_ranks} {lesson.name}" in text
    said = re.search(r"^It takes (.+?) on two CPU cores", text, re.MULTILINE)
    assert said
    # If other programs used a whole core during the run, its time is not meaningful.
    assert run["others"] < 1
    assert run["seconds"] in WORDS[said[1]]


@pytest.mark.needs("mkdocs")
@of_lesson
def test_page_shows_title_pictures_and_adjacent_lessons(lesson: Lesson) -> None:
    from docs_build.pages.lessonpage import lesson_page

    page = lesson_page(lesson.name)
    titles = [None, *(one.title for one in LESSONS), None]
    number = titles.index(lesson.title)
    assert f'<h1 id="top">{lesson.title} <code' in page
    for shown, title in zip(("&larr; {}</a>", ">{} &rarr;</a>"), titles[number - 1 : number + 2 : 2], strict=True):
        # The links are above the script and below it.
        assert title is None or page.count(shown.format(title)) == 2
    assert [svg for svg in page.split("<svg")[1:] if unevenness(svg) > EVEN] == []
    # A reader who does not see a timeline gets the order of its events.
    assert page.count("<desc>Order on rank 0: ") == page.count('class="minifsdp-timeline"')


@pytest.mark.needs("mkdocs")
def test_index_shows_requirements_and_results_of_lessons() -> None:
    from docs_build.pages.lessonpage import lesson_list

    for lesson, card in zip(LESSONS, lesson_list().split("<li>")[1:], strict=True):
        facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", card))
        assert facts["ranks"] == str(lesson.num_ranks)
        assert facts["time"].startswith(f"{recorded()[lesson.name]['seconds']} seconds")
        assert facts["needs"] == (", ".join(lesson.extras) or "nothing else")


def test_cpu_time_of_other_processes_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, seconds = tmp_path / "stat", iter([100.0, 110.0])
    monkeypatch.setattr(busy, "STAT", stat)
    monkeypatch.setattr(busy, "_ours", iter([1.0, 13.0]).__next__)
    monkeypatch.setattr(busy.time, "monotonic", seconds.__next__)
    ticks = os.sysconf("SC_CLK_TCK")
    stat.write_text(f"cpu {50 * ticks} 0 0 {99 * ticks} 0 0 0 0 0 0\n")
    others = busy.Others()
    stat.write_text(f"cpu {60 * ticks} 0 {7 * ticks} {999 * ticks} 0 0 0 0 0 0\n")
    # In these ten seconds the cores worked 17 seconds in total, of which 12 were those of this process.
    assert others.cores() == 0.5


def timeline_of(*lengths: float) -> str:
    boxes = [f"<title>B {n}, at {n}.000 ms, for {length:.3f} ms</title>" for n, length in enumerate(lengths)]
    return "<svg>" + "".join(boxes) + "<title>B root, at 0.000 ms, for 90.000 ms</title></svg>"


def test_a_run_whose_pictures_are_uneven_is_repeated_and_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lesson, tries = Lesson("tutorials/overlap.py"), iter([timeline_of(1, 5), timeline_of(1, 1.5), timeline_of(1, 1)])
    monkeypatch.setattr(lessons, "_run", lambda _: {"pictures": {"a": next(tries)}})
    assert lessons._run_evenly(lesson)["pictures"]["a"] == timeline_of(1, 1.5)
    monkeypatch.setattr(lessons, "_run", lambda _: {"pictures": {"a": timeline_of(1, 1), "b": timeline_of(1, 5)}})
    with pytest.raises(RuntimeError, match=r"overlap\.py: equal blocks differ by a factor of at least 5\.0"):
        lessons._run_evenly(lesson)


def test_first_picture_is_even_and_has_recording_date() -> None:
    picture = (ROOT / "docs" / "assets" / "timeline.svg").read_text(encoding="utf-8")
    assert unevenness(picture) <= EVEN
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"Recorded on {recorded()[FIRST_PAGE]['date']}" in readme
    said = re.search(r"At most ([\d.]+ MB) of the model's", readme)
    assert said
    assert said[1] in picture
