"""The search index of a page: only its own text, without navigation and pictures.

The theme's plugin makes the index from each page's HTML. This module changes four things:

1. Parts that every page has, or that are pictures, have ``data-search-exclude`` in the templates, and the plugin leaves
   them out. Otherwise an excerpt begins with "4 of 123 in reading order", and a search for "block" finds boxes of a
   timeline.
2. The index is split in two. Most visitors of a page do not search, and would load two megabytes with a single index.
   ``search_index`` keeps the settings, which the theme reads immediately. ``documents.js`` has the texts, which
   ``docs/assets/js/search.js`` loads when a search begins. It is a script, because a page opened from a disk cannot
   fetch other files.
3. Pages have different weights: a search for "save checkpoint" finds the page that explains it before the modules.
4. lunr, the library for searching, compares nodes of its index by a text that joins labels and numbers of nodes. With
   digits as labels, two different nodes can have the same text, and then some queries raise an error. Here a sign ends
   each number.
"""

import json
from pathlib import Path

# Pages that explain are found before pages of modules and before the spec. The first matching prefix counts.
_BOOSTS = {
    "read/": 0.5,
    "spec.md": 0.5,
    "api.md": 1.0,
    "myths.md": 1.0,
    "learn/": 3.0,
    "use-it.md": 4.0,
    "glossary.md": 1.0,
}


def boost(uri: str) -> float:
    """The weight of a page in the results of a search, by its source."""
    return next((weight for prefix, weight in _BOOSTS.items() if uri.startswith(prefix)), 2.0)


def cut_index(folder: Path) -> None:
    """2. Splits the index in two."""
    whole = folder / "search_index.json"
    if not whole.exists():
        return
    index = json.loads(whole.read_text(encoding="utf-8"))
    documents = json.dumps(index["docs"], ensure_ascii=False, separators=(",", ":"))
    (folder / "documents.js").write_text(f"var minifsdpDocuments = {documents};\n", encoding="utf-8")
    settings = json.dumps({**index, "docs": []}, separators=(",", ":"))
    whole.write_text(settings, encoding="utf-8")
    # For pages opened from a disk the theme loads this file.
    (folder / "search_index.js").write_text(f"var __index = {settings};\n", encoding="utf-8")


def repair_lunr(folder: Path) -> None:
    """4. Makes the texts of different nodes different, in the script that the theme searches with.

    Raises:
        ValueError: there is no such script, or not one such place in it, as with a new version of the theme.
    """
    (script,) = folder.glob("search.*.min.js")
    text = script.read_text(encoding="utf-8")
    before, after = "e=e+s+o.id}", 'e=e+s+o.id+";"}'
    if text.count(before) != 1:
        raise ValueError(f"{script} has {before!r} {text.count(before)} times; see docs_build/pages/searching.py")
    script.write_text(text.replace(before, after), encoding="utf-8")
