"""The light markup of docstrings, turned into Markdown and then into HTML.

Docstrings here use a part of reStructuredText and Markdown: double backticks for code, single ones for names, literal
blocks after ``::``, tables between lines of ``=``, and sections such as ``Args:`` and ``Raises:``. Requirement IDs
become links.
"""

import re
from collections.abc import Callable, Iterator
from html import escape
from itertools import groupby
from textwrap import dedent

from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES, Token

from docs_build.reading.text import table

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Worked example):$")
TABLE = re.compile(r"^={3,}( +={3,})+$")
ITEM = re.compile(r"^(\d+\.|[*-]) ")
# Styles without a colour in any theme: names of all kinds, and blanks.
PLAIN = ("", "n", "w")
EXTENSIONS = ["tables", "fenced_code", "sane_lists", "attr_list"]


def to_markdown(text: str) -> str:
    """A docstring's body as Markdown."""
    return "\n".join(_blocks(text.splitlines()))


def _blocks(lines: list[str]) -> Iterator[str]:
    i, previous = 0, ""
    while i < len(lines):
        line = lines[i]
        i += 1
        if TABLE.match(line.strip()):
            end = max(n for n in range(i, len(lines)) if TABLE.match(lines[n].strip()))
            yield from ["", *_table([line, *lines[i:end]]).splitlines(), ""]
            i = end + 1
        elif line.rstrip().endswith("::"):
            head = line.rstrip()[:-2].rstrip()
            block, i = _indented(lines, i)
            yield from [_inline(_deepen(head + ":"))] if head else []
            yield from ["", "```text", *block, "```", ""]
        elif SECTION.match(line.strip()):
            block, i = _indented(lines, i)
            yield from ["", *_section(line.strip()[:-1], block), ""]
        else:
            # A list needs a blank line before it.
            if ITEM.match(line) and previous.strip() and not previous.startswith(" ") and not ITEM.match(previous):
                yield ""
            yield _inline(_deepen(line))
        previous = lines[i - 1]


def _deepen(line: str) -> str:
    """Continuation lines of a list item need four spaces in Markdown; docstrings have two or three."""
    return re.sub(r"^ {1,3}(?=\S)", "    ", line)


def _indented(lines: list[str], i: int) -> tuple[list[str], int]:
    """The indented block that begins at ``i``, without its indentation, and its end."""
    behind = (n for n in range(i, len(lines)) if lines[n].strip() and not lines[n].startswith(" "))
    end = next(behind, len(lines))
    return dedent("\n".join(lines[i:end])).strip("\n").splitlines(), end


def _section(title: str, block: list[str]) -> Iterator[str]:
    """A section such as ``Args:`` as a list, one entry per line."""
    if title in ("Returns", "Yields"):
        yield f"**{title}** " + _inline(" ".join(line.strip() for line in block))
        return
    yield from [f"**{title}**", ""]
    for entry in re.sub(r"\n +", " ", "\n".join(filter(str.strip, block))).splitlines():
        name, colon, rest = entry.strip().partition(": ")
        yield f"- `{name}`: {_inline(rest)}" if colon else f"- {_inline(name)}"


def _table(lines: list[str]) -> str:
    """A table from its lines; the first is a rule, and a row that begins with a blank cell continues the one above."""
    starts = [match.start() for match in re.finditer(r"=+", lines[0])]
    rows: list[list[str]] = []
    head = [""] * len(starts)
    for line in lines[1:]:
        row = [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
        if line.startswith("==="):
            # The rows above the second rule are the heads.
            head, rows = rows[0], []
        elif rows and not row[0]:
            rows[-1] = [f"{above} {cell}".strip() for above, cell in zip(rows[-1], row, strict=True)]
        else:
            rows.append(row)
    return table(head, ([_inline(cell) for cell in row] for row in rows))


def _inline(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text)


def to_html(text: str, *, is_markdown: bool = False) -> str:
    """A docstring, or Markdown, as HTML."""
    # Installed with the extra `docs` only. Tests without it import this module as well.
    import markdown

    return markdown.markdown(text if is_markdown else to_markdown(text), extensions=EXTENSIONS)


def inline(text: str, *, is_markdown: bool = False) -> str:
    """The same for a single paragraph, without its element."""
    return to_html(text, is_markdown=is_markdown).removeprefix("<p>").removesuffix("</p>")


# --- links ---

_PIECE = re.compile(r"(<[^>]*>)")


def link_words(html: str, pattern: re.Pattern[str], link: Callable[[str], str | None]) -> str:
    """Links matches of ``pattern`` in the text of ``html``, outside of links, headings, code blocks and SVG.

    Args:
        html: a page or a part of one.
        pattern: the pattern to find.
        link: returns the address for a match, or ``None`` for no link.
    """
    closed = ("a", "h1", "h2", "h3", "h4", "svg", "script", "style", "summary", "button", "label")
    out, depth = [], 0
    for piece in _PIECE.split(html):
        if piece.startswith("<"):
            tag = re.match(r"</?([a-zA-Z0-9]+)", piece)
            if tag and tag[1].lower() in closed and not piece.endswith("/>"):
                depth += -1 if piece.startswith("</") else 1
            out.append(piece)
        elif depth or not piece.strip():
            out.append(piece)
        else:
            out.append(pattern.sub(lambda m: _anchor(m[0], link(m[0])), piece))
    return "".join(out)


def _anchor(text: str, address: str | None) -> str:
    return text if address is None else f'<a href="{escape(address)}">{text}</a>'


# --- code ---


def highlight_lines(text: str, link: Callable[[str, str], str | None] = lambda owner, name: None) -> list[str]:
    """Python source as HTML, line by line, with the classes of Pygments.

    Args:
        text: the source.
        link: returns the address of a name, given the text before its dot (or ``""``); ``None`` for no link.
    """
    lines: list[str] = []
    current: list[tuple[str, str]] = []
    last = ["", "", ""]
    for kind, value in PythonLexer(stripnl=False, ensurenl=True).get_tokens(text):
        style = _style(kind)
        for n, part in enumerate(value.split("\n")):
            if n:
                lines.append(_joined(current))
                current = []
            if not part:
                continue
            shown = escape(part, quote=False)
            address = _address(link, last, part) if kind in Token.Name else None
            current.append((style, f'<a href="{escape(address)}">{shown}</a>' if address else shown))
        if value.strip():
            last = [*last[1:], value]
    return [*lines, _joined(current)] if current else lines


def _joined(pieces: list[tuple[str, str]]) -> str:
    """A line; adjacent parts of the same style share an element, and unstyled text has none."""
    shown = []
    for style, group in groupby(pieces, lambda piece: piece[0]):
        text = "".join(part for _, part in group)
        shown.append(text if style in PLAIN else f'<span class="{style}">{text}</span>')
    return "".join(shown)


def _address(link: Callable[[str, str], str | None], last: list[str], name: str) -> str | None:
    """The address of a single name, or of a name after ``owner.`` if the owner itself is a single name."""
    if last[2] != ".":
        return link("", name)
    return link(last[1], name) if last[1].isidentifier() and last[0] != "." else None


def _style(kind: object) -> str:
    while kind not in STANDARD_TYPES:
        kind = kind.parent  # type: ignore[attr-defined]
    return STANDARD_TYPES[kind]  # type: ignore[index]
