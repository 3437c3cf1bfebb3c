"""A sentence about each page, for search engines and for previews of links.

A page in ``docs/`` has the sentence in its front matter, ``description: ...``. For pages of modules, tutorials and
the failure lab, this module makes it from the first sentences of their sources.
"""

import re
from collections.abc import Mapping
from typing import Any

from docs_build.reading.source import read_module

# Shorter descriptions have too little information, and longer ones are truncated by search engines.
SHORTEST, LONGEST = 50, 160


def description(uri: str, head: Mapping[str, Any], title: str) -> str | None:
    """The page's own description, or a generated one; ``None`` if there is neither.

    Args:
        uri: its source, as in ``learn/why.md``.
        head: the front matter of the page.
        title: its heading.
    """
    if "description" in head:
        return str(head["description"])
    for key, words in {"minifsdp_module": "of minifsdp", "minifsdp_lesson": "an FSDP tutorial"}.items():
        if key in head:
            name = head[key].removeprefix("tutorials/")
            about = re.sub(r"[`*]", "", " ".join(read_module(head[key]).title.split()))
            return fitted(f"{name}{',' * (key == 'minifsdp_lesson')} {words}: {about}", "Annotated source.")
    if uri.startswith("lab/") and "symptom" in head:
        return fitted(f"{title}: {head['symptom']}", "A script for two ranks that uses FSDP incorrectly, and its fix.")
    return None


def fitted(text: str, more: str) -> str:
    """The text as a sentence, followed by ``more`` if it fits, truncated after a word if it is too long."""
    text = text if text.endswith((".", "?", "!")) else f"{text}."
    if len(text) + 1 + len(more) <= LONGEST:
        return f"{text} {more}"
    if len(text) <= LONGEST:
        return text
    return text[: LONGEST - 3].rsplit(" ", 1)[0].rstrip(",;:") + " ..."
