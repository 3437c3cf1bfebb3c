"""What the search knows of a page: what somebody has written there, and not what stands around it.

The index is made by the theme's plugin from each page's HTML. Two things are done to it here:

1. Parts that every page has, or that are pictures, get ``data-search-exclude``, and the plugin leaves them out.
   Otherwise an excerpt begins with "4 of 123 in reading order", and a search for "block" finds boxes of a timeline.
2. The index is cut in two. Most visitors of a page do not search, and all of it would be two megabytes for each of
   them: ``search_index`` keeps the settings, which the theme reads at once, and ``documents.js`` holds the texts, which
   ``docs/assets/js/search.js`` loads when somebody begins to search. It is a script, for a page that was opened from a
   disk may not fetch anything else.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

__all__ = ["cut_index", "leave_out"]

# Each is an element that holds none of its own kind; the plugin would take the end of that for its own.
LEFT_OUT = {
    "a": ["sbs-mark"],
    "details": ["proof", "spec-tests"],
    "form": ["spec-filter"],
    "nav": ["sbs-way"],
    "p": ["exercise-head", "exercise-source", "fragment-head", "sbs-contents"],
    "span": ["badge"],
    "svg": [],
}
_TAG = re.compile(rf"<({'|'.join(LEFT_OUT)})\b([^>]*)>")
_CLASS = re.compile(r"""\bclass=["']([^"']*)["']""")
# Where a picture was recorded.
_SOURCE = re.compile(r"(<figcaption>(?:(?!</figcaption>).)*?<small)(>)", re.DOTALL)
_MARK = ' data-search-exclude="yes"'


def leave_out(html: str) -> str:
    """1."""
    return _SOURCE.sub(rf"\1{_MARK}\2", _TAG.sub(_marked, html))


def _marked(tag: re.Match[str]) -> str:
    name, attributes = tag[1], tag[2]
    found = _CLASS.search(attributes)
    classes = found[1].split() if found else []
    is_left_out = not LEFT_OUT[name] or any(one in LEFT_OUT[name] for one in classes)
    return f"<{name}{_MARK}{attributes}>" if is_left_out else tag[0]


def cut_index(folder: Path) -> None:
    """2."""
    whole = folder / "search_index.json"
    if not whole.exists():
        return
    index = json.loads(whole.read_text(encoding="utf-8"))
    documents = json.dumps(index["docs"], ensure_ascii=False, separators=(",", ":"))
    (folder / "documents.js").write_text(f"var minifsdpDocuments = {documents};\n", encoding="utf-8")
    settings = json.dumps({**index, "docs": []}, separators=(",", ":"))
    whole.write_text(settings, encoding="utf-8")
    # From a disk the theme looks for this one.
    (folder / "search_index.js").write_text(f"var __index = {settings};\n", encoding="utf-8")
