"""The lines in double braces, and their replacements."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from html import escape

from docs_build import (
    badges,
    evidence,
    exercises,
    failures,
    fragments,
    growth,
    lessons,
    pictures,
    races,
    results,
    streams,
    values,
    wrong,
)
from docs_build.generator import relative
from docs_build.markup import to_html
from docs_build.order import ROOT

__all__ = ["counted", "expand", "put_back"]

LINE = re.compile(r"^(?P<indent> *)\{\{ (?P<verb>\w+) ?(?P<rest>.*?) \}\}$", re.MULTILINE)
INLINE = re.compile(r"\{\{ value ([\w-]+) \}\}")


def expand(markdown: str, start: str) -> str:
    """Replaces every line in double braces in a page.

    Args:
        markdown: the page.
        start: its address, for links.

    Raises:
        KeyError: a line refers to something that does not exist.
    """
    markdown = INLINE.sub(lambda found: values.value(found[1]), markdown)
    # All timelines of a page have the same axis.
    keys = [re.split(r"[ |]", found["rest"])[0] for found in LINE.finditer(markdown) if found["verb"] == "timeline"]
    verbs = {**VERBS, "timeline": partial(_timeline, pictures.longest(keys))}
    return LINE.sub(lambda found: _one(verbs, found["verb"], found["rest"], start), markdown)


def _one(verbs: Mapping[str, Callable[[str, str], str]], verb: str, rest: str, start: str) -> str:
    if verb not in verbs:
        raise KeyError(f"{start}: there is no {{{{ {verb} }}}}; there are {', '.join(verbs)}")
    return "\n" + verbs[verb](rest, start) + "\n"


def _code(rest: str, start: str) -> str:
    name, qualified = rest.split()
    return _raw(fragments.fragment(name, qualified, start))


def _timeline(seconds: float | None, rest: str, _: str) -> str:
    key, _, caption = rest.partition(" | ")
    key, _, num = key.strip().partition(" ")
    return _raw(pictures.timeline_figure(key, caption.strip(), int(num or 1), seconds))


def _proof(rest: str, start: str) -> str:
    """Requirements as a folded table."""
    rows = [results.all_rows()[name] for name in rest.split()]
    num_tests = len({test for row in rows for test in row.tests})
    body = "".join(_proof_row(row, start) for row in rows)
    head = f"Tested here: {counted(len(rows), 'requirement')}, {counted(num_tests, 'test')}"
    head += f"<small>{escape(badges.where_proven(rows))}</small>"
    return _raw(
        f'<details class="proof"><summary>{head}</summary><table class="proof-rows"><thead><tr><th>ID</th>'
        f"<th>requirement</th><th>last result</th></tr></thead><tbody>{body}</tbody></table></details>"
    )


def _proof_row(row: results.SpecRow, start: str) -> str:
    where = relative("spec.html", start) + f"#{row.id}"
    statement = to_html(row.statement, is_markdown=True).removeprefix("<p>").removesuffix("</p>")
    tests = f"<small>{counted(len(row.tests), 'test')}</small>" if row.tests else ""
    return f'<tr><td><a href="{where}">{row.id}</a></td><td>{statement}</td><td>{badges.badges(row)} {tests}</td></tr>'


def counted(number: int, word: str) -> str:
    """``1 test``, ``2 tests``."""
    return f"{number} {word}" + ("" if number == 1 else "s")


def _exercise(rest: str, start: str) -> str:
    question, answer = exercises.exercise(rest.strip())
    return _raw(
        f'<div class="exercise"><p class="exercise-head">Exercise</p>{to_html(question, is_markdown=True)}'
        f"<details><summary>Answer</summary>{to_html(answer, is_markdown=True)}"
        f"<p class='exercise-source'>Computed while this page was built, by <code>{rest.strip()}</code> in "
        "<code>docs_build/exercises.py</code>.</p></details></div>"
    )


def _picture(rest: str, _: str) -> str:
    from docs_build import shardmaps

    name, _, caption = rest.partition(" | ")
    return _raw(pictures.figure(shardmaps.draw(name.strip()), caption.strip(), "Drawn from the package's own layouts."))


def _sketch(rest: str, _: str) -> str:
    from docs_build import sketches

    name, _, caption = rest.partition(" | ")
    return _raw(sketches.draw(name.strip(), caption.strip()))


def _table(rest: str, start: str) -> str:
    return values.table(rest.strip())


def _simulated(rest: str, _: str) -> str:
    name, _, caption = rest.partition(" | ")
    return _raw(streams.figure(name.strip(), caption.strip()))


def _asset(rest: str, _: str) -> str:
    """A picture from the repository; it is part of the page, so that it follows the light and the dark theme."""
    name, _, caption = rest.partition(" | ")
    svg = (ROOT / "docs" / "assets" / f"{name.strip()}.svg").read_text(encoding="utf-8")
    return _raw(pictures.figure(svg, caption.strip(), lessons.where(lessons.FIRST_PAGE)))


def _growth(rest: str, _: str) -> str:
    name, _, caption = rest.partition(" | ")
    return _raw(growth.figure(name.strip(), caption.strip()))


def _raced(rest: str, _: str) -> str:
    name, _, caption = rest.partition(" | ")
    return _raw(races.figure(name.strip(), caption.strip()))


def _wrong(rest: str, start: str) -> str:
    """A case in which torch is wrong, with its program and the requirements for the correct behaviour."""
    case = wrong.find(rest.strip())
    return wrong.prose(case) + _raw(wrong.program(case)) + _proof(" ".join(case.rows), start)


def _paste(rest: str, _: str) -> str:
    from docs_build import paste

    return _raw(paste.box())


def _quoted(is_first: bool, rest: str, _: str) -> str:
    from docs_build import paste

    return _raw(paste.quoted(rest, is_first))


def _html(name: str) -> Callable[[str, str], str]:
    def make(rest: str, start: str) -> str:
        from docs_build import myths, troubles, verbs

        makers = {"verbs": verbs.verb_table, "path": verbs.call_path, "myths": myths.page, "troubles": troubles.page}
        return makers[name](start)

    return make


# HTML that Markdown must not change is stored here while a page is converted.
_aside: list[str] = []


def _raw(html: str) -> str:
    _aside.append(html)
    return f'<div data-aside="{len(_aside) - 1}"></div>'


def put_back(html: str) -> str:
    """A converted page with all stored HTML inserted again."""
    return re.sub(r'<div data-aside="(\d+)"></div>', lambda found: _aside[int(found[1])], html)


VERBS: dict[str, Callable[[str, str], str]] = {
    "code": _code,
    "timeline": partial(_timeline, None),
    "proof": _proof,
    "exercise": _exercise,
    "picture": _picture,
    "sketch": _sketch,
    "table": _table,
    "simulated": _simulated,
    "asset": _asset,
    "evidence": lambda rest, start: _raw(evidence.figures()),
    "growth": _growth,
    "large": lambda rest, start: growth.large(),
    "raced": _raced,
    "breaks": lambda rest, start: _raw(streams.breaks()),
    "findings": lambda rest, start: streams.findings(),
    "wrong": _wrong,
    "failures": lambda rest, start: failures.table(),
    "failure": lambda rest, start: failures.what_happens(rest.strip()),
    "mend": lambda rest, start: failures.mend(rest.strip()),
    "verbs": _html("verbs"),
    "path": _html("path"),
    "myths": _html("myths"),
    "troubles": _html("troubles"),
    "paste": _paste,
    "says": partial(_quoted, True),
    "follows": partial(_quoted, False),
}
