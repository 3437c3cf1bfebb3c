"""The teacher's pack: the plan of the sessions, the points of the lab, and questions with their answers.

``teach.toml`` has the plan and the points, ``teach.md`` the questions of the lab. Questions on slides are exercises of
the learning pages, in ``exercises.md``.

Worked example, a line of the first plan on the page ``teach/index.md``::

    part: Units and layouts   slides: 9 to 12   minutes: 20, from 0:25   show: the step player
"""

import tomllib
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from docs_build.drawing.pictures import events_of
from docs_build.pages import answers, exercises, slides, teach_answers
from docs_build.pages.raw import raw
from docs_build.reading.markup import inline
from docs_build.reading.papers import zero_bytes
from docs_build.reading.text import table
from docs_build.recording.results import all_rows
from docs_build.templates import PAGES
from minifsdp.engine.lifetime import RateLimiter

HERE = Path(__file__).parent


@cache
def plan() -> Any:
    """The contents of ``teach.toml``."""
    return tomllib.loads((HERE / "teach.toml").read_text(encoding="utf-8"))


# ---- the sessions ----


def parts_of(lecture: str) -> list[tuple[dict[str, Any], list[slides.Slide], int]]:
    """The parts of a session: the entry of the file, its slides, and the minute at which it begins."""
    parts = next(one["part"] for one in plan()["session"] if one["lecture"] == lecture)
    deck = slides.slides_of(lecture)
    titles = [slide.title for slide in deck]
    first = [titles.index(part["first"]) for part in parts]
    begins = accumulate((part["minutes"] for part in parts), initial=0)
    ends = [*first[1:], len(deck)]
    return [(part, list(deck[a:b]), at) for part, a, b, at in zip(parts, first, ends, begins, strict=False)]


def session_table(lecture: str) -> str:
    """The plan of a session: a row for each part."""
    rows = []
    for part, shown, begin in parts_of(lecture):
        links = [f"[{slide.number}]({lecture}.md#slide-{slide.number})" for slide in shown]
        asked = [slide.title.removeprefix("Question: ") for slide in shown if slide.question]
        after = [f"[{_lab_title(name)}](../lab/{name}.md)" for name in part["lab"]]
        after += [f"[exercise {number}]({_page(number)}) (`{name_of(number)}`)" for number in part.get("exercises", [])]
        minutes = f"{part['minutes']}<br><small>from {begin // 60}:{begin % 60:02}</small>"
        slide_links = links[0] if len(links) == 1 else f"{links[0]} to {links[-1]}"
        rows.append(
            [part["title"], slide_links, minutes, part["show"], "<br>".join(asked) or "", "<br>".join(after) or ""]
        )
    return table(["part", "slides", "minutes", "show", "question", "failure lab and exercises"], rows)


def _lab_title(name: str) -> str:
    text = (slides.ROOT / "docs" / "lab" / f"{name}.md").read_text(encoding="utf-8")
    return next(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))


def myths(lecture: str) -> str:
    """Claims of the page of myths that students make in this session, with links to the correct statements."""
    rows = [all_rows()[name] for name in plan()["myths"][lecture]]
    claims = (
        f'<li><a href="../myths.html#{row.id}">{row.id}</a>: {inline(row.cells[0], is_markdown=True)}</li>'
        for row in rows
    )
    return raw(f"<ul>{''.join(claims)}</ul>")


# ---- the lab ----


def _exercise(number: int) -> Any:
    return plan()["exercise"][number - 1]


def name_of(number: int) -> str:
    """The name of an exercise."""
    return str(_exercise(number)["name"])


def _page(number: int) -> str:
    return f"../learn/exercises/{number:02}-{name_of(number).replace('_', '-')}.md"


def points_table() -> str:
    """The points of each exercise, and their sum."""
    rows = [
        [number, f"[{one['title']}]({_page(number)})", f"`{one['name']}`", one["module"], one["points"]]
        for number, one in enumerate(plan()["exercise"], 1)
    ]
    total = sum(one["points"] for one in plan()["exercise"])
    return table(
        ["exercise", "title", "name", "module", "points"], [*rows, ["", "**all**", "", "", f"**{total}**"]], "rlllr"
    )


@cache
def lab_questions() -> dict[str, tuple[str, str]]:
    """Question and answer by name, both Markdown with computed values."""
    text = (HERE / "teach.md").read_text(encoding="utf-8")
    found = {}
    for name, *both in exercises.ENTRY.findall(text):
        values = getattr(teach_answers, name, dict)()
        question, answer = (" ".join(one.format_map(values).split()) for one in both)
        found[name] = question, answer
    return found


def lab(*, with_answers: bool) -> str:
    """The questions of understanding for each exercise, with or without answers."""
    lines = []
    for number, one in enumerate(plan()["exercise"], 1):
        lines += [f"### Exercise {number}: [{one['title']}]({_page(number)})", ""]
        for place, name in enumerate(one["questions"], 1):
            question, answer = lab_questions()[name]
            lines += [f"{place}. {question}", *(["", f"    **Answer.** {answer}"] if with_answers else []), ""]
    return "\n".join(lines)


# ---- the slides ----


def question(name: str) -> str:
    """The question of an exercise of the learning pages, without its answer."""
    return raw(PAGES.slide_question(exercises.exercise(name)[0]))


def answers_of(lecture: str) -> str:
    """The questions on the slides of a lecture, with their answers."""
    lines = []
    for slide in slides.slides_of(lecture):
        if slide.question:
            asked, answer = exercises.exercise(slide.question)
            title = slide.title.removeprefix("Question: ")
            lines += [f"### [Slide {slide.number}]({lecture}.md#slide-{slide.number}): {title}", "", asked, ""]
            lines += [f"**Answer.** {answer}", ""]
    return "\n".join(lines)


def _gathers(kind: str) -> int:
    return sum(event.kind == "AG" for event in events_of(f"fsdp1-{kind}-pre-block-2-wide")[0])


VALUES: dict[str, Callable[[], object]] = {
    "teach-bytes": lambda: f"{zero_bytes(1, 1, 0, low=4, optimizer=8):g}",
    "teach-bytes-float32": lambda: teach_answers.torch.float32.itemsize,
    "teach-in-flight": lambda: RateLimiter(enabled=True).num_in_flight,
    "teach-gathers-full": lambda: _gathers("full"),
    "teach-gathers-zero2": lambda: _gathers("zero2"),
    "teach-peak-full": lambda: teach_answers.peak("full-pre"),
    "teach-peak-post": lambda: teach_answers.peak("full-post"),
    "teach-peak-zero2": lambda: teach_answers.peak("zero2-pre"),
    "teach-sent-full": lambda: f"{answers.strategy_bytes()['full']:.3f}",
    "teach-sent-zero2": lambda: f"{answers.strategy_bytes()['zero2']:g}",
    "teach-sent-none": lambda: f"{answers.strategy_bytes()['none']:g}",
    "teach-whole": lambda: teach_answers.whole_model(),
    "teach-num-exercises": lambda: len(plan()["exercise"]),
    "teach-num-questions": lambda: len(lab_questions()),
    "teach-points": lambda: sum(one["points"] for one in plan()["exercise"]),
    "teach-minutes": lambda: plan()["minutes"],
    "teach-num-slides": lambda: " and ".join(str(len(slides.slides_of(one))) for one in slides.LECTURES),
}
VERBS: dict[str, Callable[[str, str], str]] = {
    "answers": lambda rest, _: answers_of(rest),
    "lab_answers": lambda _, start: lab(with_answers=True),
    "lab_points": lambda _, start: points_table(),
    "lab_questions": lambda _, start: lab(with_answers=False),
    "question": lambda rest, _: question(rest),
    "session": lambda rest, _: session_table(rest),
    "wrong_answers": lambda rest, _: myths(rest),
}
