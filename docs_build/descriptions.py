"""A sentence about each page, for search engines and for previews of links.

Pages that somebody has written say it at their head, ``description: ...``. For pages of modules, of tutorials and of
the failure lab it is made here, of what their sources say first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from docs_build.source import read_module

__all__ = ["LONGEST", "SHORTEST", "description"]

# Less says nothing, and more is not shown.
SHORTEST, LONGEST = 50, 160
INDEXES = {
    "read/index.md": "Every module of minifsdp in reading order, prose beside code: a complete FSDP2, then FSDP1.",
    "tutorials/index.md": "Scripts that read like lessons on FSDP, and what they print and draw, on CPUs or on GPUs.",
}


def description(uri: str, head: Mapping[str, Any], title: str) -> str | None:
    """What the page says of itself, or what is made for it; ``None`` if there is neither.

    Args:
        uri: its source, as in ``learn/why.md``.
        head: the lines at its head.
        title: its headline.
    """
    if "description" in head:
        return str(head["description"])
    if "minifsdp_module" in head:
        name = head["minifsdp_module"]
        return fitted(f"{name} of minifsdp: {_first_words(name)}", "Prose beside code.")
    if "minifsdp_lesson" in head:
        name = head["minifsdp_lesson"]
        return fitted(f"{PurePosixPath(name).name}, an FSDP tutorial: {_first_words(name)}", "Prose beside code.")
    if uri.startswith("lab/") and "symptom" in head:
        return fitted(
            f"{title}: {head['symptom']}", "An FSDP script for two ranks, broken on purpose, and how to mend it."
        )
    return INDEXES.get(uri)


def _first_words(name: str) -> str:
    return re.sub(r"[`*]", "", " ".join(read_module(name).title.split()))


def fitted(text: str, more: str) -> str:
    """The text as a sentence, ``more`` behind it if there is room, cut behind a word if it is too long."""
    text = text if text.endswith((".", "?", "!")) else f"{text}."
    if len(text) + 1 + len(more) <= LONGEST:
        return f"{text} {more}"
    if len(text) <= LONGEST:
        return text
    return text[: LONGEST - 3].rsplit(" ", 1)[0].rstrip(",;:") + " ..."
