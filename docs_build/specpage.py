"""The page of the spec: every requirement with its tests and their last results, with a filter."""

from __future__ import annotations

import re
from collections import Counter
from html import escape

from docs_build import badges, directives, results
from docs_build.markup import to_html
from docs_build.results import LINE, SpecRow

__all__ = ["expand"]


def expand(markdown: str) -> str:
    """The page's Markdown, with each table of requirements replaced by rows that can be filtered."""
    out: list[str] = []
    table: list[SpecRow] = []
    rows = results.all_rows()
    for line in [*markdown.splitlines(), ""]:
        found = LINE.match(line)
        if found:
            table.append(rows[found[1]])
            continue
        if table:
            while out and out[-1].startswith("|"):
                out.pop()
            out += ["", directives._raw("".join(map(_row, table))), ""]
            table = []
        out.append(line)
    text = "\n".join(out)
    title, rest = text.split("\n", 1)
    title = "# Spec: numbered behaviours"
    head, first, tail = rest.partition("\n## CTOR")
    folded = _folded(head)
    return "\n".join([title, "", _summary(), "", directives._raw(_controls()), "", folded, first + tail])


def _folded(head: str) -> str:
    return '??? note "How the IDs are used, and which document wins"\n\n' + "\n".join(
        "    " + re.sub(r"^## ", "**", line) + ("**" if line.startswith("## ") else "") for line in head.splitlines()
    )


def _summary() -> str:
    rows = results.all_rows().values()
    lines = [
        f"The {len(rows)} requirements define the behaviour of minifsdp. Each test names the requirements that it",
        "tests. A requirement without a passed test on a backend is *open* on this backend.",
        "",
        "Each requirement shows where and how it was tested. Green means that tests checked the whole behaviour. A",
        "requirement with `[cuda]` can only be checked completely on CUDA; a CPU checks it *in part*. The [simulated",
        "accelerator](streams.md) checks order, memory and waits of the CPU, but neither kernels nor time. Some tests",
        "check *only* the *order* of operations, some check a formula without the package, and some check the text of",
        "a page.",
        "",
        f"| backend | proven completely | in part | {' | '.join(results.KINDS[1:])} | failed | open | last run |",
        "|---" * (len(results.KINDS) + 5) + "|",
    ]
    lines += [_summary_of(backend, list(rows)) for backend in results.BACKENDS]
    runs = results.recorded()["runs"]
    lines += ["", *(f"* {results.WHERE[backend]}: {runs[backend]['machine']}" for backend in runs)]
    new = sum(not row.is_recorded for row in rows)
    if new:
        lines.append(f"* {new} requirements are newer than the last recorded run and count as open")
    return "\n".join(lines)


def _summary_of(backend: str, rows: list[SpecRow]) -> str:
    """A line of the summary table."""
    verdicts = Counter(row.results.get(backend) for row in rows)
    kinds = Counter(row.kinds.get(backend) for row in rows)
    behaviour = [row for row in rows if row.kinds.get(backend) == results.KINDS[0]]
    whole = sum(badges.is_whole(row, backend) for row in behaviour)
    counts = [whole, len(behaviour) - whole, *(kinds[kind] for kind in results.KINDS[1:])]
    run = results.recorded()["runs"].get(backend)
    when = run["date"] if run else "**never run**"
    cells = [results.WHERE[backend], *map(str, counts), str(verdicts["failed"]), str(verdicts["unproven"]), when]
    return f"| {' | '.join(cells)} |"


def _controls() -> str:
    sections = "".join(f'<option value="{_key(s)}">{escape(s)}</option>' for s in results.sections())
    shown = Counter(tag for row in results.all_rows().values() for tag in badges.tags(row))
    verdicts = "".join(
        f'<option value="{tag}">{words} ({shown[tag]})</option>' for tag, words in badges.FILTERS.items()
    )
    return (
        '<form class="spec-filter" onsubmit="return false"><label>Section <select id="spec-section">'
        f'<option value="">all</option>{sections}</select></label>'
        f'<label>Show <select id="spec-verdict"><option value="">all rows</option>{verdicts}</select></label>'
        '<label>Words <input id="spec-words" type="search" placeholder="prefetch, root, SHARD-04"></label>'
        '<output id="spec-count"></output></form>'
    )


def _key(section: str) -> str:
    return section.split(":")[0]


def _row(row: SpecRow) -> str:
    more = "".join(f"<span>{_small(cell)}</span>" for cell in row.cells[1:] if cell)
    head = directives.counted(len(row.tests), "test")
    folded = f'<details class="spec-tests"><summary>{head}</summary>{_tests(row)}</details>' if row.tests else ""
    tags = " ".join(badges.tags(row))
    return (
        f'<div class="spec-row" id="{row.id}" data-section="{_key(row.section)}" data-tags="{tags}">'
        f'<div class="spec-id"><a href="#{row.id}">{row.id}</a>{badges.badges(row)}</div>'
        f'<div class="spec-what">{to_html(row.statement, is_markdown=True)}'
        f'<p class="spec-more">{more}</p>{folded}</div></div>'
    )


def _small(cell: str) -> str:
    return to_html(cell, is_markdown=True).removeprefix("<p>").removesuffix("</p>")


def _tests(row: SpecRow) -> str:
    """The names of a requirement's tests, grouped by outcome and then by file."""
    together: dict[str, dict[str, list[str]]] = {}
    for name, outcomes in sorted(row.tests.items()):
        file, _, test = name.partition("::")
        names = together.setdefault(_outcomes(outcomes), {}).setdefault(file, [])
        names.append(escape(test.removeprefix("test_").replace("_", " ")))
    lists = {outcomes: "".join(_file(*item) for item in files.items()) for outcomes, files in together.items()}
    return "".join(f"<p>{outcomes}</p><ul>{items}</ul>" for outcomes, items in lists.items())


def _file(name: str, tests: list[str]) -> str:
    return f"<li><small>{escape(name)}</small><br>{'<br>'.join(tests)}</li>"


def _outcomes(outcomes: dict[str, str]) -> str:
    """A badge for each backend on which a test ran; the requirement's own badges show the missing ones."""
    ran = {backend: outcome for backend, outcome in outcomes.items() if outcome != "not run"}
    shown = ran or outcomes
    return " ".join(
        f'<span class="badge badge-{results.css_class(outcome)}">{outcome}<i>{results.WHERE[backend]}</i></span>'
        for backend, outcome in shown.items()
    )
