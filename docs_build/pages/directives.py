"""The lines in double braces, and their replacements."""

import re
from collections.abc import Callable
from functools import partial

from markupsafe import Markup
from mkdocs.utils import get_relative_url as relative

from docs_build.drawing import holdings, hooksteps, linkbytes, memorycurve, oneweight, pictures, shardmaps
from docs_build.pages import (
    badges,
    counterfactual,
    evidence,
    exercises,
    failures,
    lessonpage,
    modulepage,
    paste,
    troubles,
    verbs,
)
from docs_build.pages.fragments import fragment
from docs_build.pages.raw import raw
from docs_build.pages.tables import TABLES
from docs_build.problems import chapters
from docs_build.reading.markup import highlight_lines
from docs_build.reading.order import ROOT
from docs_build.recording import gpu, lessons, results
from docs_build.recording.records import load
from docs_build.templates import MARKDOWN, PAGES
from spec_tools.torch_is_wrong import cases

LINE = re.compile(r"^ *\{\{ (?P<verb>\w+) ?(?P<rest>.*?) \}\}$", re.MULTILINE)
INLINE = re.compile(r"\{\{ value ([\w-]+) \}\}")
SIMULATED = "Simulated: the order and the waits come from the log of a step. This was not measured on a GPU."
FINDINGS = ROOT / "spec_tools" / "torch_streams" / "torch-findings.md"

# Makes HTML or Markdown from the text after the verb and from the address of the page.
Verb = Callable[[str, str], str]
VALUES: dict[str, Callable[[], object]] = {
    # The same sentences about GPUs on all pages.
    "gpu-where": lambda: gpu.sentences()["where"],
    "gpu-minutes": lambda: gpu.sentences()["minutes"],
    "gpu-tests": lambda: gpu.sentences()["tests"],
    "gpu-requirements": lambda: gpu.sentences()["requirements"],
    "gpu-evidence": gpu.table_of_evidence,
    "num-modules": lambda: len(modulepage.steps()),
    "num-lines": lambda: f"{modulepage.num_lines():,}",
    "noticed-mutants": lambda: evidence.mutants()[0],
    "num-mutants": lambda: evidence.mutants()[1],
    "mutated-rows": lambda: evidence.mutants()[2],
}


def expand(markdown: str, start: str) -> str:
    """Replaces every line in double braces in a page.

    Args:
        markdown: the page.
        start: its address, for links.

    Raises:
        KeyError: a line has an unknown verb, or refers to something that does not exist.
    """
    markdown = INLINE.sub(lambda found: str(VALUES[found[1]]()), markdown)
    # All timelines of a page with the same number of ranks have the same axes.
    keys = [re.split(r"[ |]", found["rest"])[0] for found in LINE.finditer(markdown) if found["verb"] == "timeline"]
    known = {**VERBS, "timeline": _pictured(partial(_timeline, keys))}

    def replaced(found: re.Match[str]) -> str:
        made = known[found["verb"]](found["rest"].strip(), start)
        return f"\n{raw(made) if isinstance(made, Markup) else made}\n"

    return LINE.sub(replaced, markdown)


def _pictured(make: Callable[[str, str], str]) -> Verb:
    """A verb that has a name and a caption."""

    def verb(rest: str, _: str) -> str:
        name, _, caption = rest.partition(" | ")
        return Markup(make(name.strip(), caption.strip()))

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
    """A recorded timeline; it is part of the page, so that it follows the light and the dark theme."""
    return pictures.figure(pictures.described(_svg(name)), caption, lessons.where(lessons.FIRST_PAGE))


def _simulated(name: str, caption: str) -> str:
    """A picture of a step that was logged on the simulated accelerator (``spec_tests.streams.pictures``)."""
    return pictures.figure(_svg(f"streams/{name}"), caption, SIMULATED)


def _svg(name: str) -> str:
    return (ROOT / "docs" / "assets" / f"{name}.svg").read_text(encoding="utf-8")


def _sketch(name: str, caption: str) -> str:
    return SKETCHES[name](caption)


def _proof(rest: str, start: str) -> str:
    """Requirements as a folded table."""
    rows = [results.all_rows()[name] for name in rest.split()]
    num_tests = len({test for row in rows for test in row.tests})
    shown = [(row, relative(f"spec.html#{row.id}", start), badges.badges(row)) for row in rows]
    return PAGES.proof(num_tests, badges.where_proven(rows), shown)


def _wrong(name: str, start: str) -> str:
    """A case in which torch is wrong, with its program and the requirements for the correct behaviour.

    The site build does not run the program. Its docstring contains its output, and tests compare it.
    """
    case = {case.name: case for case in cases()}[name]
    program = PAGES.program(case, highlight_lines(case.code))
    return MARKDOWN.wrong(case) + raw(program) + raw(_proof(" ".join(case.rows), start))


def _myths() -> str:
    return PAGES.myths([(row, badges.badges(row)) for row in results.all_rows().values() if row.id.startswith("MYTH")])


def _findings() -> str:
    """The findings of the stream checker in torch's own FSDPs, with headings below those of the page."""
    return FINDINGS.read_text(encoding="utf-8").partition("\n")[2].replace("\n## ", "\n### ").strip()


SKETCHES: dict[str, Callable[[str], str]] = {
    "holdings": holdings.draw_holdings,
    "bars": holdings.draw_bars,
    "weight": oneweight.draw,
    "links": linkbytes.draw,
    "activations": memorycurve.draw,
    "hooks": hooksteps.storyboard,
    **hooksteps.STEPS,
}
VERBS: dict[str, Verb] = {
    "answers": lambda lecture, _: exercises.answers_of(lecture),
    "asked": lambda texts, _: paste.questions(texts),
    "asset": _pictured(_asset),
    "breaks": lambda *_: PAGES.breaks(load("stream-breaks")),
    "chapters": lambda *_: chapters.contents(),
    "code": lambda rest, start: fragment(*rest.split(), start),
    "counterfactual": lambda _, start: counterfactual.section(start),
    "evidence": lambda *_: evidence.figures(),
    "exercise": lambda name, _: PAGES.exercise(*exercises.texts()[name]),
    "failure": lambda name, _: failures.what_happens(name),
    "failures": lambda *_: failures.table(),
    "findings": lambda *_: _findings(),
    "fix": lambda name, _: failures.fix(name),
    "follows": lambda texts, _: paste.quoted(texts, is_first=False),
    "launcher": lambda texts, _: paste.quoted(texts, is_first=False),
    "modules": lambda _, start: modulepage.module_list(start),
    "myths": lambda *_: _myths(),
    "path": lambda _, start: verbs.call_path(start),
    "picture": _pictured(_map),
    "problems": lambda name, _: chapters.chapter(name),
    "proof": _proof,
    "question": lambda name, _: PAGES.slide_question(exercises.texts()[name][0]),
    "says": lambda texts, _: paste.quoted(texts, is_first=True),
    "simulated": _pictured(_simulated),
    "sketch": _pictured(_sketch),
    "table": lambda rest, _: str(getattr(TABLES, rest.split()[0])(*rest.split()[1:])),
    "timeline": _pictured(partial(_timeline, [])),
    "troubles": lambda _, start: troubles.page(start),
    "tutorials": lambda *_: lessonpage.lesson_list(),
    "verbs": lambda _, start: verbs.verb_table(start),
    "wrong": _wrong,
}
