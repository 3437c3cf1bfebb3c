"""The links "Previous" and "Next" in the footer of a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def sequence(site: Path, first: str) -> list[str]:
    """The pages that a reader sees who begins with ``first`` and follows "Next"."""
    found = [first]
    while True:
        page = site / found[-1]
        after = re.search(r'<a href="([^"]+)" class="md-footer__link md-footer__link--next"', page.read_text("utf-8"))
        if not after:
            return found
        found.append((page.parent / after[1]).resolve().relative_to(site.resolve()).as_posix())


@pytest.mark.spec("LEARN-08")
def test_next_leads_from_lessons_to_exercises_problems_and_tutorials(site: Path) -> None:
    seen = sequence(site, "learn/index.html")
    assert seen[1:3] == ["learn/ranks.html", "learn/why.html"]
    assert seen[seen.index("learn/checkpoints.html") + 1] == "learn/exercises/index.html"
    places = [
        seen.index(page) for page in ("learn/exercises/index.html", "problems/index.html", "tutorials/index.html")
    ]
    assert places == sorted(places)


@pytest.mark.spec("LEARN-08")
def test_pages_of_modules_and_for_teachers_have_their_own_sequence(site: Path) -> None:
    found = {first: sequence(site, first) for first in ("index.html", "read/index.html", "teach/index.html")}
    every = {page.relative_to(site).as_posix() for page in site.rglob("*.html")} - {"404.html"}
    for first, pages in found.items():
        assert len(pages) == len(set(pages))
        others = ("read/", "teach/")
        folder = next((folder for folder in others if first.startswith(folder)), None)
        inside = {page for page in every if (page.startswith(folder) if folder else not page.startswith(others))}
        assert set(pages) == inside
