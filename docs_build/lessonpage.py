"""The page of a tutorial: its essay, the output and pictures of a recorded run, and the script next to its prose."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from docs_build import linkbytes
from docs_build.generator import relative
from docs_build.lessons import EVEN, LESSONS, Lesson, recorded, unevenness
from docs_build.markup import to_html
from docs_build.pages import page_of, side_by_side, way_through
from docs_build.source import read_module

__all__ = ["index_page", "lesson_page"]


def lesson_page(name: str) -> str:
    """The HTML of a lesson's page.

    Raises:
        KeyError: the lesson was never recorded.
    """
    number, lesson = next((at, one) for at, one in enumerate(LESSONS, 1) if one.name == name)
    index = relative("tutorials/index.html", page_of(name))
    middle = f'<a href="{index}">{number} of {len(LESSONS)} tutorials</a>'
    way = way_through({one.name: one.title for one in LESSONS}, name, middle)
    headline = f'{escape(lesson.title)} <code class="sbs-file">{Path(name).name}</code>'
    return side_by_side(read_module(name), headline, way, _what_it_said(lesson))


def _what_it_said(lesson: Lesson) -> str:
    run = recorded()[lesson.name]
    pictures = _pictures(lesson)
    return (
        f'<section class="lesson-run"><h2 id="run">A recorded run</h2><pre><code>$ {escape(lesson.command)}\n\n'
        f"{escape(run['output'].rstrip())}\n</code></pre>{pictures}"
        f"<p><small>{run['date']}, {_time(lesson)}; {escape(run['machine'])}</small></p></section>"
    )


def _pictures(lesson: Lesson) -> str:
    """The pictures of the run, unless equal blocks look unequal in them."""
    run = recorded()[lesson.name]
    pictures = run["pictures"].values()
    if lesson.name == "tutorials/hybrid.py":
        return linkbytes.draw_table(run["output"], f"Recorded on {run['date']} with {lesson.num_ranks} ranks.")
    if any(unevenness(svg) > EVEN for svg in pictures):
        return (
            "<p>Equal blocks took unequal times in this run. Its pictures would mainly show that, so they are omitted. "
            'Better recordings of the same settings are on <a href="../learn/schedule.html">Prefetching</a>.</p>'
        )
    about = f"<p>{lesson.about_pictures}</p>" if lesson.about_pictures else ""
    return about + "".join(f'<figure class="lesson-picture">{_scalable(svg)}</figure>' for svg in pictures)


def _scalable(svg: str) -> str:
    """The picture with the full width of the page, without the lines before its ``<svg>`` element."""
    whole = svg[svg.index("<svg") :]
    return re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r'\1 style="width:100%;height:auto"', whole, count=1)


def index_page() -> str:
    """All lessons: their first sentences, requirements, times and output."""
    cards = "".join(_card(lesson) for lesson in LESSONS)
    return (
        "# Tutorials\n\n"
        "Each tutorial is a script with an introduction, the code, and assertions of every statement at the end. A "
        "page shows the script next to its prose, and the output and pictures of a recorded run. The scripts run on "
        "two CPU cores or on GPUs.\n\n"
        "Times are those of recorded runs, from the start of the launcher to its end. They depend on the machine and "
        "on other programs, so each time is shown with the number of cores that other programs used.\n\n"
        f'<ol class="lessons">{cards}</ol>\n\n'
        f"<p><small>{escape(_where())}</small></p>\n"
    )


def _card(lesson: Lesson) -> str:
    page = Path(lesson.name).with_suffix(".html").name
    sentence = to_html(read_module(lesson.name).title).removeprefix("<p>").removesuffix("</p>")
    out = to_html(lesson.comes_out).removeprefix("<p>").removesuffix("</p>")
    extras = ", ".join(lesson.extras) or "nothing else"
    return (
        f'<li><p><a href="{page}">{escape(lesson.title)}</a> <code>{Path(lesson.name).name}</code></p>'
        f"<p>{sentence}.</p>"
        f"<dl><dt>ranks</dt><dd>{lesson.num_ranks}</dd><dt>time</dt><dd>{_time(lesson)}</dd>"
        f"<dt>needs</dt><dd>{escape(extras)}</dd><dt>output</dt><dd>{out}</dd></dl></li>"
    )


def _time(lesson: Lesson) -> str:
    run = recorded()[lesson.name]
    others = "unknown" if run["others"] is None else f"{run['others']:g} cores"
    return f"{run['seconds']} seconds (other programs: {others})"


def _where() -> str:
    runs = [recorded()[lesson.name] for lesson in LESSONS]
    dates, machines = sorted({run["date"] for run in runs}), sorted({run["machine"] for run in runs})
    return f"Recorded from {dates[0]} to {dates[-1]}; {'; '.join(machines)}."
