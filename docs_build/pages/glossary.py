"""The terms of the glossary on all other pages: on hover or keyboard focus, a term shows its definition.

``docs/glossary.md`` has a heading for each term, with its definition below. Lines for the extension ``abbr`` are added
at the end of the Markdown of each page::

    ### Rank                               *[rank]: One of the processes that train together, and its number.
                                    -->    *[Rank]: One of ...
    One of the processes that train        *[ranks]: One of ...
    together, and its number. Usually ...  *[Ranks]: One of ...

The extension marks *every* occurrence outside of code. Too many marks make a page hard to read, so only the first of
each term in the text stays marked.
"""

import re
from functools import cache

from docs_build.reading.order import ROOT

PAGE = ROOT / "docs" / "glossary.md"
# Pages without marks: reference pages, and the glossary itself.
WITHOUT = ("glossary.md", "spec.md", "api.md")

_ENTRY = re.compile(r"^### (.+)\n\n((?:.+\n)+)", re.MULTILINE)
_MARKED = re.compile(r'<abbr title="([^"]*)">(.*?)</abbr>')
_NOT_RUNNING_TEXT = re.compile(r"<(h[1-6]|a|th|summary)\b.*?</\1>", re.DOTALL)


@cache
def terms() -> dict[str, str]:
    """The headings of the glossary, and the first sentence below each, without markup."""
    found = {}
    for title, paragraph in _ENTRY.findall(PAGE.read_text(encoding="utf-8") + "\n"):
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", " ".join(paragraph.split()))
        found[title] = re.sub(r"[`*]", "", re.split(r"(?<=[.!?]) (?=[A-Z`*\[])", text)[0])
    return found


def definitions() -> str:
    """The lines for the end of a page."""
    lines = [f"*[{form}]: {text}" for title, text in terms().items() for form in _forms(title)]
    return "\n\n" + "\n".join(lines) + "\n"


def _forms(title: str) -> list[str]:
    """The spellings of an entry in a text; ``MeshGroups`` also as ``mesh``, ``meshes`` and ``Meshes``."""
    found = []
    for name in title.split(", "):
        # `DTensor` and `ZeRO` are always spelled like this, `Rank` only at the beginning of a sentence.
        is_name = any(letter.isupper() for letter in name[1:])
        for one in {name} if is_name else {name[0].lower() + name[1:], name[0].upper() + name[1:]}:
            found += [one, one + ("es" if one.endswith(("sh", "ch", "x")) else "s")]
    return found


def first_places(html: str) -> str:
    """A converted page with only the first occurrence of each term marked, and none in headings and links."""
    html = _NOT_RUNNING_TEXT.sub(lambda found: _MARKED.sub(r"\2", found[0]), html)
    seen: set[str] = set()

    def mark(found: re.Match[str]) -> str:
        text, word = found.groups()
        if text in seen:
            return word
        seen.add(text)
        return f'<abbr title="{text}" tabindex="0">{word}</abbr>'

    return _MARKED.sub(mark, html)
