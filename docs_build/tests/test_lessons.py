"""Every tutorial has a page with the recorded output of a run."""

from __future__ import annotations

import re

import pytest

from docs_build.reading.order import ROOT
from docs_build.recording.lessons import EVEN, LESSONS, Lesson, recorded, unevenness

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
    extras = {lesson.name.removeprefix("tutorials/"): ", ".join(lesson.extras) for lesson in LESSONS}
    assert listed == extras


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_text_of_the_lesson_agrees_with_its_record(lesson: Lesson) -> None:
    run, text = recorded()[lesson.name], (ROOT / lesson.name).read_text()
    assert len(run["output"].splitlines()) > 3
    assert "Traceback" not in run["output"]
    assert f"--nproc-per-node {lesson.num_ranks} {lesson.name}" in text
    (said,) = re.findall(r"^It takes (.+?) on two CPU cores", text, re.MULTILINE)
    assert run["seconds"] in WORDS[said]
    # A picture of equal blocks that take unequal times would mainly show another program.
    assert [name for name, svg in run["pictures"].items() if unevenness(svg) > EVEN] == []
