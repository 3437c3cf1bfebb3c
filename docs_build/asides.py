"""The text below the prose of a row: pages of Learn about it, and tests that fail when it is broken."""

from __future__ import annotations

from html import escape
from pathlib import Path

from docs_build import mentions, results
from docs_build.breaks import Break, breaks_of
from docs_build.generator import relative
from docs_build.markup import to_html
from docs_build.order import ROOT
from docs_build.source import Module, Row

__all__ = ["around_module", "beside_row", "spec_link"]


def beside_row(module: Module, row: Row, start: str) -> str:
    """The text for one row of the page ``start``."""
    learn = _learn(mentions.pages_on_function(module.name, row.anchor), start)
    broken = [one for line in row.lines for one in breaks_of(module.name).get(line, [])]
    # Not for the search, because these words belong to other pages.
    parts = [f'<p class="sbs-learn" data-search-exclude>{learn}</p>' if learn else "", _broken(broken, start)]
    return "".join(parts)


def _learn(pages: list[tuple[str, str]], start: str) -> str:
    links = [f'<a href="{relative(page, start)}">{escape(title)}</a>' for page, title in pages]
    return f"Explained in Learn: {', '.join(links)}" if links else ""


def _broken(broken: list[Break], start: str) -> str:
    if not broken:
        return ""
    rows = sorted({row for one in broken for row in one.red})
    ways = "".join(_way(one, start) for one in broken)
    number = "one mutation" if len(broken) == 1 else f"{len(broken)} mutations"
    return (
        '<div class="sbs-red" data-search-exclude><p>If this code is broken, tests of these requirements fail: '
        f"{' '.join(spec_link(row, start) for row in rows)}</p>"
        f"<details><summary>{number} of this code</summary><ul>{ways}</ul></details></div>"
    )


def _way(one: Break, start: str) -> str:
    what = to_html(one.what).removeprefix("<p>").removesuffix("</p>")
    tests = "".join(f"<br>{spec_link(row, start, says=False)} by {_words(test)}" for row, test in one.red.items())
    return f"<li>{what}{tests}</li>"


def _words(test: str) -> str:
    """The name of a test as words, without its variant, and its file."""
    file, _, name = test.partition("::")
    words = name.partition("[")[0].removeprefix("test_").replace("_", " ")
    return f"<q>{escape(words)}</q>, <small>{escape(file)}</small>"


def spec_link(row: str, start: str, *, says: bool = True) -> str:
    """A link to a requirement; with ``says``, its statement is shown on hover."""
    known = results.all_rows().get(row) if says else None
    title = f' title="{escape(known.statement)}"' if known else ""
    return f'<a href="{relative("spec.html", start)}#{row}"{title}>{row}</a>'


def around_module(module: Module, start: str) -> str:
    """The text above the code: the pages of Learn for the module, and the files that test it."""
    learn = _learn(mentions.pages_on_module(module.name), start)
    files = ", ".join(f"<code>{escape(file)}</code>" for file in _test_files(module.name))
    notes = "Text next to a dotted line is a note that is not in the file" if any(r.note for r in module.rows) else ""
    parts = [learn, f"Tested in {files}" if files else "", notes]
    return f'<p class="sbs-around" data-search-exclude>{". ".join(filter(None, parts))}.</p>' if any(parts) else ""


def _test_files(name: str) -> list[str]:
    """The test file of the same name, and those with tests that failed when the module was broken."""
    folder, _, file = name.rpartition("/")
    same = Path("spec_tests") / folder / f"test_{file}"
    broken = [one for ones in breaks_of(name).values() for one in ones]
    noticed = {test.partition("::")[0] for one in broken for test in one.red.values()}
    first = [same.as_posix()] if (ROOT / same).exists() else []
    return first + sorted(noticed - set(first))
