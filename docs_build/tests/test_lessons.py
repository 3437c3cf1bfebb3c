"""Every tutorial has a page with the recorded output of a run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs_build.reading.order import ROOT
from docs_build.recording import lessons
from docs_build.recording.lessons import EVEN, FIRST_PAGE, LESSONS, Lesson, recorded, unevenness


def test_every_script_that_the_tutorials_page_lists_is_a_lesson() -> None:
    listed = re.findall(r"^\| `(\w+\.py)`", (ROOT / "tutorials" / "README.md").read_text(), re.MULTILINE)
    assert sorted(f"tutorials/{name}" for name in listed) == sorted(lesson.name for lesson in LESSONS)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_lesson_record_keeps_output_and_pictures(lesson: Lesson) -> None:
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
def test_index_shows_requirements_and_results_of_lessons() -> None:
    from docs_build.pages.lessonpage import lesson_list

    cards = lesson_list().split("<li>")[1:]
    for lesson, card in zip(LESSONS, cards, strict=True):
        facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", card))
        assert lesson.title in card
        assert facts["ranks"] == str(lesson.num_ranks)
        assert facts["time"].startswith(f"{recorded()[lesson.name]['seconds']} seconds")
        assert facts["needs"] == (", ".join(lesson.extras) or "nothing else")
        assert len(facts["output"]) > 50


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_lesson_title_is_short_and_readable(lesson: Lesson) -> None:
    assert ".py" not in lesson.title
    assert 8 <= len(lesson.title) <= 48
    assert lesson.title in re.sub(r"[`*]", "", (ROOT / lesson.name).read_text().split("\n")[0])


def test_lesson_extras_equal_list_of_scripts() -> None:
    text = (ROOT / "tutorials" / "README.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+\.py)` \|.*\| *(.*?) *\|$", text, re.MULTILINE))
    assert {f"tutorials/{name}": said for name, said in listed.items()} == {
        lesson.name: ", ".join(lesson.extras) for lesson in LESSONS
    }


# Phrases of the tutorials for a running time, with the seconds that each may stand for on an otherwise idle machine.
WORDS = {
    "a few seconds": range(2, 11),
    "some seconds": range(5, 21),
    "about a quarter of a minute": range(8, 24),
    "about half a minute": range(20, 46),
    "about a minute": range(40, 91),
    "about a minute and a half": range(60, 135),
}


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_documented_time_equals_recorded_run(lesson: Lesson) -> None:
    said = re.search(r"^It takes (.+?) on two CPU cores", (ROOT / lesson.name).read_text(), re.MULTILINE)
    run = recorded()[lesson.name]
    assert said
    # If other programs used a whole core during the run, its time is not meaningful.
    assert run["others"] < 1
    assert run["seconds"] in WORDS[said[1]]


def test_cpu_time_of_other_processes_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from docs_build.recording import busy

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


def test_missing_system_statistics_give_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from docs_build.recording import busy

    monkeypatch.setattr(busy, "STAT", tmp_path / "none")
    assert busy.Others().cores() is None


def timeline_of(*lengths: float) -> str:
    boxes = [f"<title>B {n}, at {n}.000 ms, for {length:.3f} ms</title>" for n, length in enumerate(lengths)]
    return "<svg>" + "".join(boxes) + "<title>B root, at 0.000 ms, for 90.000 ms</title></svg>"


def test_unevenness_compares_equal_blocks_and_not_their_containers() -> None:
    assert unevenness(timeline_of(3.0, 2.0, 2.5)) == 1.5
    assert unevenness("<svg></svg>") == 1.0


def test_a_run_whose_pictures_are_uneven_is_repeated_and_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lesson, tries = Lesson("tutorials/overlap.py"), iter([timeline_of(1, 5), timeline_of(1, 1.5), timeline_of(1, 1)])
    monkeypatch.setattr(lessons, "_run", lambda _: {"pictures": {"a": next(tries)}})
    assert lessons._run_evenly(lesson)["pictures"]["a"] == timeline_of(1, 1.5)
    monkeypatch.setattr(lessons, "_run", lambda _: {"pictures": {"a": timeline_of(1, 1), "b": timeline_of(1, 5)}})
    with pytest.raises(RuntimeError, match=r"overlap\.py: equal blocks differ by a factor of at least 5\.0"):
        lessons._run_evenly(lesson)


def test_watched_script_runs_normally_and_records_arrivals(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("HERE = 'found'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, threading, beside\n"
        "from minifsdp import trace\n"
        "with trace.record() as recorder:\n"
        "    looking = threading.active_count()\n"
        "print(__name__, beside.HERE, *sys.argv[1:], looking, type(recorder).__name__)\n"
    )
    command = [sys.executable, "-m", "docs_build.recording.watched", str(script), "--folder", "x"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    # The second thread looks up a module when data arrives.
    assert done.stdout.split() == ["__main__", "found", "--folder", "x", "2", "Recorder"], done.stderr


@pytest.mark.needs("mkdocs")
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_no_tutorials_page_shows_equal_blocks_as_unequal(lesson: Lesson) -> None:
    from docs_build.pages.lessonpage import lesson_page

    assert [svg for svg in lesson_page(lesson.name).split("<svg")[1:] if unevenness(svg) > EVEN] == []


@pytest.mark.needs("mkdocs")
def test_page_shows_titles_of_itself_and_adjacent_lessons() -> None:
    from docs_build.pages.lessonpage import lesson_page

    titles = [lesson.title for lesson in LESSONS]
    for number, lesson in enumerate(LESSONS):
        page = lesson_page(lesson.name)
        assert f'<h1 id="top">{lesson.title} <code class="sbs-file">{Path(lesson.name).name}</code></h1>' in page
        ways = {rel: re.findall(rf'rel="{rel}" href="[^"]*">(.*?)</a>', page) for rel in ("prev", "next")}
        # The links are above the script and below it.
        assert ways["prev"] == [f"&larr; {title}" for title in titles[:number][-1:]] * 2
        assert ways["next"] == [f"{title} &rarr;" for title in titles[number + 1 :][:1]] * 2


@pytest.mark.needs("mkdocs")
def test_stored_pictures_have_a_description_with_the_order_of_events() -> None:
    from docs_build.pages.lessonpage import lesson_page

    page = lesson_page("tutorials/overlap.py")
    described = re.findall(r"<title>([^<]*)</title>\s*<desc>([^<]*)</desc>", page)
    assert len(described) == page.count('class="minifsdp-timeline"') > 0
    for title, words in described:
        assert f'role="region" aria-label="{title}"' in page
        assert words.startswith("Order on rank 0: all-gather 0, ")
        assert words.count("backward 0") == 1


def test_stored_description_is_that_of_a_new_picture() -> None:
    from docs_build.drawing import pictures
    from minifsdp_tools import timeline

    events = pictures.events_of("fsdp1-full-off-block-2-wide")
    new = timeline.svg(events)
    old = re.sub(r"<desc>.*?</desc>\n", "", new)
    assert old != new
    assert pictures.described(old) == pictures.described(new) == new


def test_first_picture_is_even_and_has_recording_date() -> None:
    picture = (ROOT / "docs" / "assets" / "timeline.svg").read_text(encoding="utf-8")
    assert len(lessons.BOX.findall(picture)) == 2 * 2 * 3
    assert unevenness(picture) <= EVEN
    said = lessons.where(FIRST_PAGE)
    assert re.fullmatch(r"Recorded on \d{4}-\d\d-\d\d; .*cores.*\.", said)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"Recorded on {recorded()[FIRST_PAGE]['date']}" in readme
