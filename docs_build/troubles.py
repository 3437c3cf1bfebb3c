"""The page "Troubleshoot": an entry for each message of the package.

The heading of an entry is the error, with an ellipsis for the variable parts. The rest of the message, mostly the
remedy, follows below it.
"""

from __future__ import annotations

import re
from html import escape

from docs_build.messages import Message, messages
from docs_build.pages import address
from docs_build.source import read_module
from minifsdp.engine.messages import texts

__all__ = ["page"]

TITLES = {"engine": "While it runs", "fsdp1": "From `FullyShardedDataParallel`", "fsdp2": "From `fully_shard`"}


def page(start: str) -> str:
    """The entries as Markdown.

    Raises:
        KeyError: the catalogue has an entry about a message that no longer exists.
    """
    more = texts()["more"]
    unknown = {f"E-{name}" for name in more} - {message.id for message in messages()}
    if unknown:
        raise KeyError(f"no message has the address {', '.join(sorted(unknown))} any more")
    parts: list[str] = []
    group = ""
    for message in sorted(messages(), key=lambda one: list(TITLES).index(_group(one)) if _group(one) in TITLES else 9):
        if _group(message) != group:
            group = _group(message)
            parts += [f"## {TITLES.get(group, 'From the tools')}", ""]
        where = address(start, message.module, _anchor(message))
        head, rest = _split(message.text)
        place = f"<code>{message.module}</code>, <code>{message.place or 'module'}</code>"
        parts += [
            f"### {_headline(head)} {{ #{message.id} .trouble }}",
            "",
            f'`{message.kind}` from <a href="{where}">{place}</a>.' + (f" {_headline(rest)}." if rest else ""),
            "",
        ]
        if message.id.removeprefix("E-") in more:
            parts += [more[message.id.removeprefix("E-")], ""]
    return "\n".join(parts)


def _group(message: Message) -> str:
    return message.module.partition("/")[0]


def _anchor(message: Message) -> str:
    """The longest prefix of the place that has an anchor on the module's page."""
    anchors = {row.anchor for row in read_module(message.module).rows}
    parts = message.place.split(".")
    places = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((place for place in places if place in anchors), "")


def _split(text: str) -> tuple[str, str]:
    """The error, and the rest: mostly the remedy."""
    found = re.match(r"^(.{30,}?)(?:; |\. |, because )(?=\S)(.+)$", text)
    if not found:
        return text, ""
    return found[1], found[2][0].upper() + found[2][1:]


def _headline(text: str) -> str:
    plain = escape(text.rstrip(". "), quote=False).replace("`", "")
    return re.sub(r"([_*\[\]{}#|])", r"\\\1", plain)
