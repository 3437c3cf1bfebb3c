"""A module as a page: prose left, code right, an anchor at each row, and links to the next and previous page."""

from collections.abc import Callable, Set
from functools import cache
from itertools import groupby
from typing import Any

from markupsafe import Markup
from mkdocs.utils import get_relative_url as relative

from docs_build.pages import asides
from docs_build.reading.markup import highlight_lines
from docs_build.reading.order import path_of, reading_order
from docs_build.reading.source import Module, read_module
from docs_build.templates import PAGES


def page_of(name: str) -> str:
    """The file of a page: ``read/engine/unit.html`` for ``engine/unit.py``. A tutorial's page is in its folder."""
    folder = "" if name.startswith("tutorials/") else "read/"
    return f"{folder}{name.removesuffix('.py')}.html"


def address(start: str, name: str, anchor: str = "") -> str:
    """The relative link from the page ``start`` to a module's page."""
    return relative(page_of(name), start) + (f"#{anchor}" if anchor else "")


def row_address(start: str, name: str, anchor: str) -> str:
    """The link to a row; to its page if the row does not exist any more, or ``""`` if the module does not."""
    if not path_of(name).exists():
        return ""
    return address(start, name, anchor if anchor in {row.anchor for row in read_module(name).rows} else "")


def linker(module: Module, start: str) -> Callable[[str, str], str | None]:
    """Returns a function that looks up names in the module's code: its definitions, and imports from the package."""

    def link(owner: str, name: str) -> str | None:
        if owner:
            target = module.imported.get(owner)
            return address(start, *_anchored(target[0], name)) if target and not target[1] else None
        if name in module.imported:
            return address(start, *_anchored(*module.imported[name]))
        return address(start, module.name, name) if name in module.defined else None

    return link


def _anchored(name: str, attribute: str) -> tuple[str, str]:
    """The module and anchor of a definition; names that a package re-exports are resolved."""
    module = read_module(name)
    if attribute in module.imported and attribute not in module.defined:
        return _anchored(*module.imported[attribute])
    return name, attribute if attribute in module.defined else ""


def toc_of(module: Module) -> list[dict[str, Any]]:
    """The headings of a module's page, in the format of mkdocs' table of contents."""
    levels = {"class": 2, "function": 2, "method": 3}
    page: dict[str, Any] = {"level": 1, "id": "top", "name": module.name, "children": []}
    for row in module.rows:
        if row.kind in levels:
            level = levels[row.kind]
            owner = page if level == 2 else page["children"][-1]
            owner["children"].append({"level": level, "id": row.anchor, "name": row.name, "children": []})
    return [page]


@cache
def steps() -> dict[str, tuple[int, str]]:
    """The number and section of each module, in reading order."""
    places = [(name, title) for title, _, names in reading_order() for name in names]
    return {name: (number, title) for number, (name, title) in enumerate(places, 1)}


def module_page(name: str) -> str:
    """The HTML of a module's page."""
    number, section = steps()[name]
    index = relative("read/index.html", page_of(name))
    middle = PAGES.way_of_module(index, number, len(steps()), section.replace("`", ""))
    way = way_through({one: one for one in steps()}, name, middle)
    return side_by_side(read_module(name), Markup("<code>{}</code>").format(name), way)


def side_by_side(module: Module, headline: str, way: str, between: str = "") -> str:
    """A page's HTML.

    Args:
        module: the module to show.
        headline: of the page, as HTML.
        way: links to the previous and the next page.
        between: HTML between the essay and the code.
    """
    start = page_of(module.name)
    code = highlight_lines(module.text, linker(module, start))
    first, _, rest = module.essay.partition("\n\n")
    parts = [
        (row, code_block(row.lines, code, module.recording), *asides.of_row(module, row, start)) for row in module.rows
    ]
    above = asides.of_module(module, start)
    assets = relative("assets", start)
    return str(PAGES.side_by_side(module, headline, " ".join(first.split()), rest, way, between, above, parts, assets))


def way_through(titles: dict[str, str], name: str, middle: str) -> str:
    """Links to the pages before and after ``name``, with ``middle`` between them; ``titles`` are in order."""
    order = [None, *titles, None]
    at = order.index(name)
    ways = ((address(page_of(name), one), titles[one]) if one else None for one in (order[at - 1], order[at + 1]))
    return PAGES.way(*ways, middle)


def code_block(numbers: list[int], code: list[str], recording: Set[int] = frozenset()) -> str:
    """The HTML of some lines, with a number before each line, and recording statements folded.

    A number is a link to its own line, ``unit.html#L172``. The style sheet draws it from ``data-n``, so neither a
    selection nor the search contains it.

    Args:
        numbers: of the lines, from 1.
        code: all lines of the module as HTML.
        recording: numbers of the lines that only record.
    """
    parts = []
    for only_records, group in groupby(numbers, lambda number: number in recording):
        lines = list(group)
        block = PAGES.code(f'<a id="L{n}" href="#L{n}" data-n="{n}"></a>{code[n - 1]}' for n in lines)
        where = f"line {lines[0]} only records" if len(lines) == 1 else f"lines {lines[0]} to {lines[-1]} only record"
        parts.append(PAGES.fold(where, block) if only_records else block)
    return Markup().join(parts)


def module_list(start: str) -> str:
    """Every module in reading order with its first sentence, as Markdown."""
    sections = [
        (title, line, steps()[names[0]][0], [(name, address(start, name), read_module(name).title) for name in names])
        for title, line, names in reading_order()
    ]
    return str(PAGES.modules(sections))


def num_lines() -> int:
    """The number of lines of the package, prose included."""
    return sum(len(path_of(name).read_text(encoding="utf-8").splitlines()) for name in steps())
