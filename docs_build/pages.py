"""A module as a page: prose left, code right, an anchor at each row, and links to the next and previous page."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from html import escape

from docs_build.asides import around_module, beside_row
from docs_build.codeblock import code_block
from docs_build.generator import relative
from docs_build.markup import highlight_lines, to_html
from docs_build.order import PACKAGE, reading_order
from docs_build.source import Module, Row, read_module

__all__ = ["address", "index_page", "linker", "module_page", "page_of", "side_by_side", "toc_of", "way_through"]


def page_of(name: str) -> str:
    """The file of a page: ``read/engine/unit.html`` for ``engine/unit.py``; a tutorial's is in its folder."""
    folder = "" if name.startswith("tutorials/") else "read/"
    return f"{folder}{name.removesuffix('.py')}.html"


def address(start: str, name: str, anchor: str = "") -> str:
    """The relative link from the page ``start`` to a module's page."""
    return relative(page_of(name), start) + (f"#{anchor}" if anchor else "")


def linker(module: Module, start: str) -> Callable[[str, str], str | None]:
    """Returns a function that looks up names in the module's code: its definitions, and imports from the package."""

    def link(owner: str, name: str) -> str | None:
        if owner:
            target = module.imported.get(owner)
            return address(start, *_anchored(target[0], name)) if target and not target[1] else None
        if name in module.imported:
            where, attribute = module.imported[name]
            return address(start, *_anchored(where, attribute))
        return address(start, module.name, name) if name in module.defined else None

    return link


def _anchored(name: str, attribute: str) -> tuple[str, str]:
    """The module and anchor of a definition; names that a package re-exports are resolved."""
    if not attribute:
        return name, ""
    module = read_module(name)
    if attribute in module.defined:
        return name, attribute
    if attribute in module.imported:
        return _anchored(*module.imported[attribute])
    return name, ""


def toc_of(module: Module) -> list[dict[str, object]]:
    """The headings of a module's page, in the format of mkdocs' table of contents."""
    children: list[dict[str, object]] = []
    for row in module.rows:
        if row.kind in ("class", "function"):
            children.append({"level": 2, "id": row.anchor, "name": row.name, "children": []})
        elif row.kind == "method" and children:
            children[-1]["children"].append({"level": 3, "id": row.anchor, "name": row.name, "children": []})  # type: ignore[attr-defined]
    return [{"level": 1, "id": "top", "name": module.name, "children": children}]


@cache
def _steps() -> tuple[list[str], dict[str, tuple[int, str]]]:
    """All modules in reading order, and the number and section of each."""
    order: list[str] = []
    place = {}
    for title, _, names in reading_order():
        for name in names:
            order.append(name)
            place[name] = (len(order), title)
    return order, place


def module_page(name: str) -> str:
    """The HTML of a module's page."""
    return side_by_side(read_module(name), f"<code>{name}</code>", _way(name, page_of(name)))


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
    paragraphs = module.essay.split("\n\n", 1)
    essay = to_html(paragraphs[1]) if len(paragraphs) > 1 else ""
    title = to_html(" ".join(paragraphs[0].split())).removeprefix("<p>").removesuffix("</p>")
    parts = [
        # The width for two columns. `:has` in the style sheet would also work, but makes large pages slow to load.
        "<style>.md-grid{max-width:88rem}.md-content{max-width:none}.md-content__inner{margin:0 1rem}</style>",
        f'<link rel="stylesheet" href="{relative("assets/css/read.css", start)}">',
        '<div class="sbs-page">',
        way,
        f'<header class="sbs-head"><h1 id="top">{headline}</h1>',
        f'<p class="sbs-title">{title}</p></header>',
        f'<div class="sbs-essay">{essay}</div>',
        between,
        around_module(module, start),
        _contents(module),
        '<div class="sbs">',
        *[_row(module, row, code) for row in module.rows],
        "</div>",
        way,
        "</div>",
        f'<script src="{relative("assets/js/read.js", start)}" defer></script>',
    ]
    return "\n".join(parts)


def _way(name: str, start: str) -> str:
    order, place = _steps()
    number, section = place[name]
    index = relative("read/index.html", start)
    plain = section.replace("`", "")
    middle = f'<a href="{index}">{number} of {len(order)} in reading order</a><br><small>{plain}</small>'
    return way_through({one: one for one in order}, name, middle)


def way_through(titles: dict[str, str], name: str, middle: str) -> str:
    """Links to the pages before and after ``name``, with ``middle`` between them; ``titles`` are in order."""
    order, start = list(titles), page_of(name)
    number = order.index(name)
    before = order[number - 1] if number else None
    after = order[number + 1] if number + 1 < len(order) else None
    left = (
        f'<a rel="prev" href="{address(start, before)}">&larr; {escape(titles[before])}</a>'
        if before
        else "<span></span>"
    )
    right = (
        f'<a rel="next" href="{address(start, after)}">{escape(titles[after])} &rarr;</a>' if after else "<span></span>"
    )
    return f'<nav class="sbs-way" aria-label="Reading order">{left}<span>{middle}</span>{right}</nav>'


def _contents(module: Module) -> str:
    names = [row for row in module.rows if row.kind in ("class", "function")]
    if len(names) < 2:
        return ""
    links = " ".join(f'<a href="#{row.anchor}"><code>{row.name}</code></a>' for row in names)
    return f'<p class="sbs-contents">On this page: {links}</p>'


def _row(module: Module, row: Row, code: list[str]) -> str:
    if row.kind == "banner":
        return f'<div class="sbs-banner" id="{row.anchor}"><span>{escape(row.name)}</span></div>'
    lines = f"{row.lines[0]}" if row.lines else ""
    block = code_block(row.lines, code, module.recording)
    if row.kind == "imports":
        block = f"<details><summary>imports</summary>{block}</details>"
    prose = _prose(row) + beside_row(module, row, page_of(module.name))
    mark = f'<a class="sbs-mark" href="#{row.anchor}" title="Link to this row, line {lines}">#</a>'
    return (
        f'<section class="sbs-row sbs-{row.kind}" id="{row.anchor}"><div class="sbs-prose">{mark}{prose}</div>'
        f'<div class="sbs-code">{block}</div></section>'
    )


def _prose(row: Row) -> str:
    parts = []
    if row.kind in ("class", "function"):
        parts.append(f"<h2><code>{row.name}</code></h2>")
    elif row.kind == "method":
        parts.append(f"<h3><code>{row.name}</code></h3>")
    if row.docstring:
        parts.append(to_html(row.docstring))
    if row.comment:
        parts.append(f'<div class="sbs-why">{to_html(row.comment)}</div>')
    if row.note:
        parts.append(f'<div class="sbs-note">{to_html(row.note)}</div>')
    return "".join(parts)


def index_page() -> str:
    """The map: every module in reading order with its first sentence."""
    start = "read/index.html"
    parts = [
        "# Read the code",
        "",
        "Each page shows one module, with docstrings and comments on the left and the code on the right. Names in the",
        "code are links to their definitions. The pages of the core modules contain additional notes, marked with a",
        "dotted line. Code that only records, for pictures and for the collective log, is folded. A line number is a",
        "link to the line; a click copies it. Below a block are the requirements of the [spec](../spec.md) whose tests",
        "failed when the block was broken on purpose.",
        "",
        f"There are {len(_steps()[0])} modules with {_num_lines():,} lines, prose included. The first {_num(0)} are a "
        f"complete FSDP2, and the next {_num(1)} add",
        "FSDP1. The file of the same name under `spec_tests/` tests a module.",
        "[Break it](../learn/index.md#break-it) shows how to watch a test fail.",
        "",
    ]
    for title, line, names in reading_order():
        number = _steps()[1][names[0]][0]
        parts += [f"## {title}", "", line, "", f'<ol class="read-list" start="{number}">']
        for name in names:
            sentence = to_html(read_module(name).title).removeprefix("<p>").removesuffix("</p>")
            parts.append(f'<li><a href="{address(start, name)}"><code>{name}</code></a> <span>{sentence}.</span></li>')
        parts += ["</ol>", ""]
    return "\n".join(parts)


def _num(section: int) -> str:
    names = reading_order()[section][2]
    return ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")[len(names)]


def _num_lines() -> int:
    return sum(len((PACKAGE / name).read_text().splitlines()) for name in _steps()[0])
