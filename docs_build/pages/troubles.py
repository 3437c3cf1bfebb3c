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
from docs_build.templates import MARKDOWN
from minifsdp.engine.messages import texts

TITLES = {
    "engine": "While it runs",
    "fsdp1": "From `FullyShardedDataParallel`",
    "fsdp2": "From `fully_shard`",
    "": "From the tools",
}


def page(start: str) -> str:
    """The entries as Markdown."""
    ordered = sorted(messages(), key=lambda message: list(TITLES).index(_group(message)))
    groups = [
        (TITLES[group], [_entry(message, start) for message in found]) for group, found in groupby(ordered, _group)
    ]
    return str(MARKDOWN.troubles(groups, texts()["more"]))


def _group(message: Message) -> str:
    folder = message.module.partition("/")[0]
    return folder if folder in TITLES else ""


def _entry(message: Message, start: str) -> tuple[Message, str, str, str]:
    """A message, its error, the rest (mostly the remedy), and the address of the place that raises it."""
    parts = re.match(r"^(.{30,}?)(?:; |\. |, because )(?=\S)(.+)$", message.text)
    head, rest = parts.groups() if parts else (message.text, "")
    where = address(start, message.module, _anchor(message))
    return message, _plain(head), _plain(rest[:1].upper() + rest[1:]), where


def _anchor(message: Message) -> str:
    """The longest prefix of the place that has an anchor on the module's page."""
    anchors = {row.anchor for row in read_module(message.module).rows}
    place = message.place
    while place and place not in anchors:
        place = place.rpartition(".")[0]
    return place


def _plain(text: str) -> str:
    plain = escape(text.rstrip(". "), quote=False).replace("`", "")
    return re.sub(r"([_*\[\]{}#|])", r"\\\1", plain)
