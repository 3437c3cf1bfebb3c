"""The page of the spec: every requirement with its tests and their last results, with a filter."""

import re
from collections import Counter
from typing import Any

from docs_build.pages import badges
from docs_build.pages.raw import raw
from docs_build.reading.text import counted, table, words_of
from docs_build.recording import results
from docs_build.recording.results import KINDS, SpecRow, all_rows
from docs_build.templates import PAGES

TABLE = re.compile(rf"(?:^\|.*\n)+(?={results.LINE.pattern})(?:^\|.*\n?)+", re.MULTILINE)


def expand(markdown: str) -> str:
    """The page's Markdown, with each table of requirements replaced by rows that can be filtered."""
    head, first, tail = markdown.partition("\n## CTOR")
    folded = "\n".join("    " + re.sub(r"^## (.*)", r"**\1**", line) for line in head.splitlines()[1:])
    tail = TABLE.sub(_rows, tail)
    about = '??? note "How the IDs are used, and which document applies"\n'
    return "\n".join([_summary(), raw(_controls()), "", about, folded, first + tail])


def _rows(table: re.Match[str]) -> str:
    found = filter(None, map(results.LINE.match, table[0].splitlines()))
    return f"\n{raw(PAGES.spec_rows(_row(all_rows()[line[1]]) for line in found))}\n"


def _summary() -> str:
    rows, runs = all_rows().values(), results.recorded()["runs"]
    heads = ["backend", "proven completely", "in part", *KINDS[1:], "failed", "open", "last run"]
    summary = table(heads, [_summary_of(backend, list(rows)) for backend in results.BACKENDS])
    machines = [(results.WHERE[backend], run["machine"]) for backend, run in runs.items()]
    return str(PAGES.spec_head(len(rows), summary, machines, sum(not row.is_recorded for row in rows)))


def _summary_of(backend: str, rows: list[SpecRow]) -> list[object]:
    """A line of the summary table."""
    verdicts = Counter(row.results.get(backend) for row in rows)
    kinds = Counter(row.kinds.get(backend) for row in rows)
    whole = sum(row.kinds.get(backend) == KINDS[0] and badges.is_whole(row, backend) for row in rows)
    run = results.recorded()["runs"].get(backend)
    partly = [kinds[KINDS[0]] - whole, *(kinds[kind] for kind in KINDS[1:])]
    when = run["date"] if run else "**never run**"
    return [results.WHERE[backend], whole, *partly, verdicts["failed"], verdicts["unproven"], when]


def _controls() -> str:
    shown = Counter(tag for row in all_rows().values() for tag in badges.tags(row))
    sections = dict.fromkeys(row.section for row in all_rows().values())
    return PAGES.spec_filter(sections, [(tag, words, shown[tag]) for tag, words in badges.FILTERS.items()])


def _row(row: SpecRow) -> tuple[Any, ...]:
    """A requirement with its tags, badges and tests; these are grouped by outcome and then by file.

    One outcome of all tests is part of the headline. Labels are a quarter of the page's size.
    """
    together: dict[tuple[tuple[str, str], ...], dict[str, list[str]]] = {}
    for name, outcomes in sorted(row.tests.items()):
        file, words = words_of(name)
        # The requirement's own badges show the backends on which no test ran.
        ran = {backend: outcome for backend, outcome in outcomes.items() if outcome != "not run"} or outcomes
        file = file.removeprefix("spec_tests/").removesuffix(".py")
        together.setdefault(tuple(ran.items()), {}).setdefault(file, []).append(words)
    headline = counted(len(row.tests), "test")
    if len(together) == 1:
        ((outcomes, files),) = together.items()
        headline += "".join(f", {outcome} ({badges.SHORT[backend]})" for backend, outcome in outcomes)
        return row, badges.tags(row), badges.badges(row), headline, {"": files}
    shown = {badges.outcomes(outcomes): files for outcomes, files in together.items()}
    return row, badges.tags(row), badges.badges(row), headline, shown
