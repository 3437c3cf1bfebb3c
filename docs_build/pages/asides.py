"""The text below the prose of a row, and above a module: links to pages of Learn and to tests, and detected breaks."""

from pathlib import Path

from markupsafe import Markup
from mkdocs.utils import get_relative_url as relative

from docs_build.reading import mentions
from docs_build.reading.breaks import breaks_of
from docs_build.reading.order import ROOT
from docs_build.reading.source import Module, Row
from docs_build.reading.text import words_of
from docs_build.recording.results import all_rows
from docs_build.templates import PAGES


def of_row(module: Module, row: Row, start: str) -> tuple[str, str]:
    """For a row of the page ``start``: the pages of Learn that show it, and the tests that fail when it is broken."""
    learn = _learn(mentions.pages_on_function(module.name, row.anchor), start)
    broken = [one for line in row.lines for one in breaks_of(module.name).get(line, [])]
    where = {row: relative(f"spec.html#{row}", start) for one in broken for row in one.red}
    return learn, PAGES.broken(broken, where, all_rows()) if broken else ""


def _learn(pages: list[tuple[str, str]], start: str) -> Markup:
    links = [Markup('<a href="{}">{}</a>').format(relative(page, start), title) for page, title in pages]
    return Markup("Explained in Learn: {}").format(Markup(", ").join(links)) if links else Markup()


def of_module(module: Module, start: str) -> list[str]:
    """The sentences above the code: the pages of Learn for the module, and the files that test it."""
    learn = _learn(mentions.pages_on_module(module.name), start)
    files = Markup(", ").join(Markup("<code>{}</code>").format(file) for file in _test_files(module.name))
    notes = "Text next to a dotted line is a note that is not in the file" if any(r.note for r in module.rows) else ""
    return [part for part in (learn, Markup("Tested in {}").format(files) if files else "", notes) if part]


def _test_files(name: str) -> list[str]:
    """The test file of the same name, and those with tests that failed when the module was broken."""
    folder, _, file = name.rpartition("/")
    same = (Path("spec_tests") / folder / f"test_{file}").as_posix()
    noticed = {words_of(test)[0] for ones in breaks_of(name).values() for one in ones for test in one.red.values()}
    return [same] * (ROOT / same).exists() + sorted(noticed - {same})
