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
    folders = list(dict.fromkeys(page.rpartition("/")[0] for page in seen))
    assert folders[:2] == ["learn", "learn/exercises"]
    assert folders.index("problems") < folders.index("tutorials")


@pytest.mark.spec("LEARN-08")
@pytest.mark.parametrize("folder", ["read/", "teach/"])
def test_pages_of_modules_and_for_teachers_have_their_own_sequence(site: Path, folder: str) -> None:
    inside = {page.relative_to(site).as_posix() for page in (site / folder).rglob("*.html")}
    assert sorted(sequence(site, f"{folder}index.html")) == sorted(inside)
    assert not inside & set(sequence(site, "index.html"))
