"""A sentence about each page, for search engines and for previews of links.

A page in ``docs/`` has it in its head, ``description: ...``. For pages of modules, of tutorials and of the failure lab
this module makes it from the first sentences of their sources.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from docs_build.source import read_module

__all__ = ["LONGEST", "SHORTEST", "description"]

# Shorter descriptions have too little information, and longer ones are truncated by search engines.
SHORTEST, LONGEST = 50, 160
INDEXES = {
    "read/index.md": "Every module of minifsdp in reading order, with explanations: a complete FSDP2, then FSDP1.",
    "tutorials/index.md": "FSDP tutorials as annotated scripts for CPUs and GPUs, with output and pictures of runs.",
}


def description(uri: str, head: Mapping[str, Any], title: str) -> str | None:
    """The page's own description, or a generated one; ``None`` if there is neither.

    Args:
        uri: its source, as in ``learn/why.md``.
        head: the front matter of the page.
        title: its heading.
    """
    if "description" in head:
        return str(head["description"])
    if "minifsdp_module" in head:
        name = head["minifsdp_module"]
        return fitted(f"{name} of minifsdp: {_first_words(name)}", "Annotated source.")
    if "minifsdp_lesson" in head:
        name = head["minifsdp_lesson"]
        return fitted(f"{PurePosixPath(name).name}, an FSDP tutorial: {_first_words(name)}", "Annotated source.")
    if uri.startswith("lab/") and "symptom" in head:
        return fitted(f"{title}: {head['symptom']}", "A script for two ranks that uses FSDP incorrectly, and its fix.")
    return INDEXES.get(uri)


def _first_words(name: str) -> str:
    return re.sub(r"[`*]", "", " ".join(read_module(name).title.split()))


def fitted(text: str, more: str) -> str:
    """The text as a sentence, followed by ``more`` if it fits, truncated after a word if it is too long."""
    text = text if text.endswith((".", "?", "!")) else f"{text}."
    if len(text) + 1 + len(more) <= LONGEST:
        return f"{text} {more}"
    if len(text) <= LONGEST:
        return text
    return text[: LONGEST - 3].rsplit(" ", 1)[0].rstrip(",;:") + " ..."
