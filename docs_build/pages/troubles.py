"""The page "Troubleshoot": an entry for each message of the package.

The heading of an entry is the error, with an ellipsis for the variable parts. The rest of the message, mostly the
remedy, follows below it.
"""

import re
from html import escape
from itertools import groupby

from docs_build.pages.modulepage import address
from docs_build.reading.messages import Message, messages
from docs_build.reading.source import read_module
from minifsdp.engine.messages import texts

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
    places = {group: number for number, group in enumerate(TITLES)}
    ordered = sorted(messages(), key=lambda one: places.get(_group(one), len(places)))
    for group, found in groupby(ordered, _group):
        parts += [f"## {TITLES.get(group, 'From the tools')}", ""]
        for message in found:
            where, (head, rest) = address(start, message.module, _anchor(message)), _split(message.text)
            place = f"`{message.module}`, `{message.place or 'module'}`"
            said = f'`{message.kind}` from <a href="{where}">{place}</a>.' + (f" {_headline(rest)}." if rest else "")
            parts += [f"### {_headline(head)} {{ #{message.id} .trouble }}", "", said, ""]
            parts += [more.get(message.id.removeprefix("E-"), ""), ""]
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
