"""The light markup of docstrings, turned into Markdown and then into HTML.

Docstrings here use a part of reStructuredText and Markdown: double backticks for code, single ones for names, literal
blocks after ``::``, tables between lines of ``=``, and sections such as ``Args:`` and ``Raises:``. Requirement IDs
become links.
"""

import re
from collections.abc import Callable, Iterator
from html import escape
from textwrap import dedent

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from docs_build.reading.text import table

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Worked example):$")
TABLE = re.compile(r"^={3,}( +={3,})+$")
ITEM = re.compile(r"^(\d+\.|[*-]) ")
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

# Elements whose text gets no links, other tags, or else the searched words.
_CLOSED = "a|h[1-4]|svg|script|style|summary|button|label"


def link_words(html: str, pattern: re.Pattern[str], link: Callable[[str], str | None]) -> str:
    """Links matches of ``pattern`` in the text of ``html``, outside of links, headings, labels and SVG.

    Args:
        html: a page or a part of one.
        pattern: the pattern to find.
        link: returns the address for a match, or ``None`` for no link.
    """

    def linked(found: re.Match[str]) -> str:
        return _anchor(found["word"], link(found["word"])) if found["word"] else found[0]

    skipped = rf"<({_CLOSED})\b.*?</\1>|<[^>]*>"
    return re.sub(rf"{skipped}|(?P<word>{pattern.pattern})", linked, html, flags=re.DOTALL)


def _anchor(text: str, address: str | None) -> str:
    return f'<a href="{escape(address)}">{text}</a>' if address else text


# --- code ---

_NAME = re.compile(r'<span class="(n\w?|fm)">(\w+)</span>')
_DOT = '<span class="o">.</span>'
# The only name before a dot.
_OWNER = re.compile(rf'(?<!\.</span>)<span class="\w+">(\w+)</span>{re.escape(_DOT)}$')
# Names and blanks have no colour in any theme.
_PLAIN = re.compile(r'<span class="[nw]">(.*?)</span>')


def highlight_lines(text: str, link: Callable[[str, str], str | None] = lambda owner, name: None) -> list[str]:
    """Python source as HTML, line by line, with the classes of Pygments.

    Args:
        text: the source.
        link: returns the address of a name, given the text before its dot (or ``""``); ``None`` for no link.
    """

    def linked(found: re.Match[str]) -> str:
        style, name = found.groups()
        before = found.string[: found.start()]
        owner = _OWNER.search(before)
        address = None
        if owner or not before.endswith(_DOT):
            address = link(owner[1] if owner else "", name)
        return f'<span class="{style}">{_anchor(name, address)}</span>'

    lines = highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).splitlines()
    return [_PLAIN.sub(r"\1", _NAME.sub(linked, line)) for line in lines]
