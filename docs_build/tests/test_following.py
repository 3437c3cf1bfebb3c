"""The links "Previous" and "Next" in the footer of a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.needs("mkdocs")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def following() -> dict[str, str | None]:
    """For each page of the navigation, the page that "Next" leads to."""
    from mkdocs.config import load_config
    from mkdocs.structure.files import File, get_files
    from mkdocs.structure.nav import get_navigation

    from docs_build import hook

    config = hook.on_config(load_config(str(ROOT / "mkdocs.yml")))
    files = get_files(config)
    for uri in uris(config.nav):
        if files.get_file_from_path(uri) is None:
            files.append(File(uri, config.docs_dir, config.site_dir, config.use_directory_urls))
    pages = hook.on_nav(get_navigation(files, config), config=config, files=files).pages
    for page in pages:
        assert page.next_page is None or page.next_page.previous_page is page
    return {page.file.src_uri: page.next_page and page.next_page.file.src_uri for page in pages}


def uris(entry: Any) -> list[str]:
    """All pages in a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [uri for part in parts for uri in uris(part)]


def sequence(following: dict[str, str | None], first: str) -> list[str]:
    """The pages that a reader sees who begins with ``first`` and follows "Next"."""
    found = [first]
    while (after := following[found[-1]]) is not None:
        found.append(after)
    return found


@pytest.mark.spec("LEARN-08")
def test_next_leads_from_lessons_to_exercises_problems_and_tutorials(following: dict[str, str | None]) -> None:
    seen = sequence(following, "learn/index.md")
    assert seen[1:3] == ["learn/ranks.md", "learn/why.md"]
    assert seen[seen.index("learn/checkpoints.md") + 1] == "learn/exercises/index.md"
    places = [seen.index(uri) for uri in ("learn/exercises/index.md", "problems/index.md", "tutorials/index.md")]
    assert places == sorted(places)
    assert not any(uri.startswith(("read/", "teach/")) for uri in seen)


@pytest.mark.spec("LEARN-08")
@pytest.mark.parametrize("first", ["read/index.md", "teach/index.md"])
def test_pages_of_modules_and_for_teachers_have_their_own_sequence(
    following: dict[str, str | None], first: str
) -> None:
    folder = first.partition("/")[0] + "/"
    assert sorted(sequence(following, first)) == sorted(uri for uri in following if uri.startswith(folder))


@pytest.mark.spec("LEARN-08")
def test_each_page_is_in_one_sequence(following: dict[str, str | None]) -> None:
    seen = [uri for first in ("index.md", "read/index.md", "teach/index.md") for uri in sequence(following, first)]
    assert sorted(seen) == sorted(following)
