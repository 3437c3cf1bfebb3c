"""The page of a tutorial: its essay, the output and pictures of a recorded run, and the script next to its prose."""

from pathlib import Path

from markupsafe import Markup
from mkdocs.utils import get_relative_url as relative

from docs_build.drawing import linkbytes, pictures
from docs_build.pages.modulepage import page_of, side_by_side, way_through
from docs_build.reading.source import read_module
from docs_build.recording.lessons import LESSONS, recorded
from docs_build.templates import PAGES


def lesson_page(name: str) -> str:
    """The HTML of a lesson's page.

    Raises:
        KeyError: the lesson was never recorded.
    """
    number, lesson = next((at, one) for at, one in enumerate(LESSONS, 1) if one.name == name)
    index = relative("tutorials/index.html", page_of(name))
    middle = Markup('<a href="{}">{} of {} tutorials</a>').format(index, number, len(LESSONS))
    way = way_through({one.name: one.title for one in LESSONS}, name, middle)
    headline = Markup('{} <code class="sbs-file">{}</code>').format(lesson.title, Path(name).name)
    run, drawn = recorded()[name], ""
    drawings = [svg[svg.index("<svg") :] for svg in run["pictures"].values()]
    shown = [pictures.scrolling(pictures.described(svg)) for svg in drawings]
    if name == "tutorials/hybrid.py":
        about = f"Recorded on {run['date']} with {lesson.num_ranks} ranks."
        drawn = Markup(linkbytes.draw_table(run["output"], about))
    return side_by_side(read_module(name), headline, way, PAGES.lesson(lesson, run, drawn, shown))


def lesson_list() -> str:
    """All lessons as HTML: their first sentences, requirements, times and output."""
    cards = [
        (one, Path(one.name).name, read_module(one.name).title, recorded()[one.name]["seconds"]) for one in LESSONS
    ]
    runs = [recorded()[lesson.name] for lesson in LESSONS]
    dates, machines = sorted({run["date"] for run in runs}), sorted({run["machine"] for run in runs})
    return PAGES.lessons(cards, f"Recorded from {dates[0]} to {dates[-1]}; {'; '.join(machines)}.")
