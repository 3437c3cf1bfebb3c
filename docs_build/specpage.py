"""The page of the spec: every row with its tests and their last results, to be filtered."""

from __future__ import annotations

import re
from collections import Counter
from html import escape

from docs_build import directives, results
from docs_build.markup import to_html
from docs_build.results import LINE, SpecRow

__all__ = ["expand"]


def expand(markdown: str) -> str:
    """The page's Markdown with each table of rows replaced by rows that can be filtered."""
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
    runs = results.recorded()["runs"]
    lines = [
        f"Every behaviour that minifsdp promises, in {len(rows)} rows. A test names the rows that it proves; a row",
        "that no test has proven on any backend is *unproven* and shown so.",
        "",
        "Most proofs show the behaviour. Some see only what is asked for, and in which order; some compute, or ask",
        "torch, and no line of minifsdp takes part; some read a page.",
        "",
        f"| backend | proven | {' | '.join(f'by {kind}' for kind in results.KINDS)} | failed | unproven | last run |",
        "|---" * (len(results.KINDS) + 5) + "|",
    ]
    for backend in results.BACKENDS:
        verdicts = Counter(row.results.get(backend) for row in rows)
        kinds = Counter(row.kinds.get(backend) for row in rows)
        by_kind = " | ".join(str(kinds[kind]) for kind in results.KINDS)
        run = runs.get(backend)
        when = f"{run['date']}; {run['machine']}" if run else "no run is recorded"
        counts = f"{verdicts['proven']} | {by_kind} | {verdicts['failed']} | {verdicts['unproven']}"
        lines.append(f"| `{backend}` | {counts} | {when} |")
    return "\n".join(lines)


def _controls() -> str:
    options = "".join(f'<option value="{_key(s)}">{escape(s)}</option>' for s in results.sections())
    return (
        '<form class="spec-filter" onsubmit="return false"><label>Section <select id="spec-section">'
        f'<option value="">all</option>{options}</select></label>'
        '<label>Show <select id="spec-verdict"><option value="">all rows</option>'
        '<option value="unproven">unproven</option>'
        '<option value="failed">failed</option><option value="proven">proven</option></select></label>'
        '<label>Words <input id="spec-words" type="search" placeholder="prefetch, root, SHARD-04"></label>'
        '<output id="spec-count"></output></form>'
    )


def _key(section: str) -> str:
    return section.split(":")[0]


def _row(row: SpecRow) -> str:
    verdicts = {row.results.get(b, "unproven") for b in results.BACKENDS}
    verdict = "failed" if "failed" in verdicts else "proven" if "proven" in verdicts else "unproven"
    more = "".join(f"<span>{_small(cell)}</span>" for cell in row.cells[1:] if cell)
    tests = "".join(_test(name, outcomes) for name, outcomes in sorted(row.tests.items()))
    head = directives.counted(len(row.tests), "test")
    folded = f"<details><summary>{head}</summary><ul>{tests}</ul></details>" if tests else ""
    return (
        f'<div class="spec-row" id="{row.id}" data-section="{_key(row.section)}" data-verdict="{verdict}">'
        f'<div class="spec-id"><a href="#{row.id}">{row.id}</a>{directives.badges(row)}</div>'
        f'<div class="spec-what">{to_html(row.statement, is_markdown=True)}'
        f'<p class="spec-more">{more}</p>{folded}</div></div>'
    )


def _small(cell: str) -> str:
    return to_html(cell, is_markdown=True).removeprefix("<p>").removesuffix("</p>")


def _test(name: str, outcomes: dict[str, str]) -> str:
    file, _, test = name.partition("::")
    words = escape(test.removeprefix("test_").replace("_", " "))
    shown = " ".join(
        f'<span class="badge badge-{results.css_class(o)}">{o}<i>{b}</i></span>' for b, o in outcomes.items()
    )
    return f"<li>{words} {shown}<br><small>{escape(file)}</small></li>"
