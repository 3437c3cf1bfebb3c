"""The pages of Learn that mention a function, and the modules to read with each of them."""

import re
from functools import cache

from docs_build.reading.order import ROOT

LEARN = ROOT / "docs" / "learn"
SHOWN = re.compile(r"\{\{ code (\S+) (\S+) \}\}")
# A line of the table on the first page of Learn: a link to a page, and the modules to read with it.
STEP = re.compile(r"^\| \d+ \| \[(?P<title>.*?)\]\((?P<page>\w+)\.md\) \| (?P<modules>.*) \|$", re.MULTILINE)


@cache
def _steps() -> list[tuple[str, str, list[str]]]:
    """The address, the title and the modules of each page, in reading order."""
    index = (LEARN / "index.md").read_text(encoding="utf-8")
    return [
        (f"learn/{found['page']}.html", found["title"], re.findall(r"`([^`]+)`", found["modules"]))
        for found in STEP.finditer(index)
    ]


@cache
def _mentioned(page: str) -> set[tuple[str, str]]:
    """The functions whose code a page shows."""
    text = (LEARN.parent / page).with_suffix(".md").read_text(encoding="utf-8")
    return {(found[1], found[2]) for found in SHOWN.finditer(text)}


def pages_on_module(name: str) -> list[tuple[str, str]]:
    """Address and title of each page that belongs to a module, or shows code of it."""
    return [(page, title) for page, title, modules in _steps() if name in {*modules, *dict(_mentioned(page))}]


def pages_on_function(name: str, qualified: str) -> list[tuple[str, str]]:
    """Address and title of each page that shows the code of a function, or of a class."""
    return [(page, title) for page, title, _ in _steps() if (name, qualified) in _mentioned(page)]
