"""The lines in double braces, and their replacements."""

import re
from collections.abc import Callable
from functools import partial

from mkdocs.utils import get_relative_url as relative

from docs_build.drawing import pictures, shardmaps, sketches
from docs_build.pages import (
    badges,
    counterfactual,
    evidence,
    exercises,
    failures,
    fragments,
    lessonpage,
    modulepage,
    myths,
    paste,
    streams,
    troubles,
    values,
    verbs,
    wrong,
)
from docs_build.pages.raw import raw
from docs_build.problems import chapters
from docs_build.reading.order import ROOT
from docs_build.reading.text import counted
from docs_build.recording import lessons, results
from docs_build.templates import PAGES

LINE = re.compile(r"^(?P<indent> *)\{\{ (?P<verb>\w+) ?(?P<rest>.*?) \}\}$", re.MULTILINE)
INLINE = re.compile(r"\{\{ value ([\w-]+) \}\}")

# Makes Markdown from the text after the verb and from the address of the page.
Verb = Callable[[str, str], str]


def expand(markdown: str, start: str) -> str:
    """Replaces every line in double braces in a page.

    Args:
        markdown: the page.
        start: its address, for links.

    Raises:
        KeyError: a line has an unknown verb, or refers to something that does not exist.
    """
    markdown = INLINE.sub(lambda found: str(values.VALUES[found[1]]()), markdown)
    # All timelines of a page with the same number of ranks have the same axes.
    keys = [re.split(r"[ |]", found["rest"])[0] for found in LINE.finditer(markdown) if found["verb"] == "timeline"]
    known = {**VERBS, "timeline": _pictured(partial(_timeline, keys))}
    return LINE.sub(lambda found: f"\n{known[found['verb']](found['rest'].strip(), start)}\n", markdown)


def _pictured(make: Callable[[str, str], str]) -> Verb:
    """A verb that has a name and a caption."""

    def verb(rest: str, _: str) -> str:
        name, _, caption = rest.partition(" | ")
        return raw(make(name.strip(), caption.strip()))

    return verb


def _timeline(keys: list[str], name: str, caption: str) -> str:
    key, _, num = name.partition(" ")
    focus: list[str] = []
    if caption.startswith("focus="):
        kinds, _, caption = caption.removeprefix("focus=").partition(" | ")
        focus = kinds.split()
    return pictures.timeline_figure(key, caption, int(num or 1), pictures.comparable(key, keys), focus)


def _map(name: str, caption: str) -> str:
    draw = {"layouts": shardmaps.layouts, "checkpoints": shardmaps.checkpoints}[name]
    return pictures.figure(draw(), caption, "Drawn from the package's own layouts.")


def _asset(name: str, caption: str) -> str:
    """A picture from the repository; it is part of the page, so that it follows the light and the dark theme."""
    svg = (ROOT / "docs" / "assets" / f"{name}.svg").read_text(encoding="utf-8")
    return pictures.figure(pictures.described(svg), caption, lessons.where(lessons.FIRST_PAGE))


def _proof(rest: str, start: str) -> str:
    """Requirements as a folded table."""
    rows = [results.all_rows()[name] for name in rest.split()]
    num_tests = len({test for row in rows for test in row.tests})
    head = f"Tested here: {counted(len(rows), 'requirement')}, {counted(num_tests, 'test')}"
    shown = (
        (row, relative(f"spec.html#{row.id}", start), badges.badges(row), row.tests and counted(len(row.tests), "test"))
        for row in rows
    )
    return raw(PAGES.proof(head, badges.where_proven(rows), shown))


def _wrong(name: str, start: str) -> str:
    """A case in which torch is wrong, with its program and the requirements for the correct behaviour."""
    case = wrong.find(name)
    return wrong.prose(case) + raw(wrong.program(case)) + _proof(" ".join(case.rows), start)


VERBS: dict[str, Verb] = {
    "answers": lambda rest, _: exercises.answers_of(rest),
    "asset": _pictured(_asset),
    "breaks": lambda _, start: raw(streams.breaks()),
    "chapters": lambda _, start: chapters.contents(),
    "code": lambda rest, start: raw(fragments.fragment(*rest.split(), start)),
    "counterfactual": lambda _, start: raw(counterfactual.section(start)),
    "evidence": lambda _, start: raw(evidence.figures()),
    "exercise": lambda name, _: raw(PAGES.exercise(*exercises.texts()[name])),
    "failure": lambda name, _: failures.what_happens(name),
    "failures": lambda _, start: failures.table(),
    "findings": lambda _, start: streams.findings(),
    "follows": lambda rest, _: paste.quoted(rest, is_first=False),
    "launcher": lambda rest, _: paste.quoted(rest, is_first=False),
    "modules": lambda _, start: modulepage.module_list(start),
    "fix": lambda name, _: failures.fix(name),
    "myths": lambda _, start: raw(myths.page()),
    "path": lambda _, start: raw(verbs.call_path(start)),
    "picture": _pictured(_map),
    "problems": lambda name, _: chapters.chapter(name),
    "proof": _proof,
    "question": lambda name, _: raw(PAGES.slide_question(exercises.texts()[name][0])),
    "says": lambda rest, _: paste.quoted(rest, is_first=True),
    "simulated": _pictured(streams.figure),
    "sketch": _pictured(sketches.draw),
    "table": lambda rest, _: values.made(*rest.split()),
    "timeline": _pictured(partial(_timeline, [])),
    "troubles": lambda _, start: troubles.page(start),
    "tutorials": lambda _, start: raw(lessonpage.lesson_list()),
    "verbs": lambda _, start: raw(verbs.verb_table(start)),
    "wrong": _wrong,
}
