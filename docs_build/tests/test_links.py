"""The link checker must find broken links; otherwise a successful build means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs_build.pages.links import external, problems


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.html").write_text('<h2 id="here">B</h2>')
    return tmp_path


@pytest.mark.parametrize("link", ["sub/b.html", "sub/b.html#here", "#own", "https://example.org/x", "mailto:a@b.c"])
def test_valid_links_are_not_reported(site: Path, link: str) -> None:
    (site / "a.html").write_text(f'<p id="own"><a href="{link}">x</a></p>')
    assert list(problems(site)) == []


@pytest.mark.parametrize(
    ("link", "why"), [("sub/c.html", "no such file"), ("sub/b.html#gone", "no anchor 'gone'"), ("#x", "no anchor")]
)
def test_broken_links_are_named_with_their_page(site: Path, link: str, why: str) -> None:
    (site / "a.html").write_text(f'<a href="{link}">x</a>')
    (problem,) = problems(site)
    assert problem.startswith(f"a.html links to {link}")
    assert why in problem


@pytest.mark.parametrize(
    "tag", ['<script src="https://cdn.example/x.js">', '<link rel="stylesheet" href="//fonts.example/f">']
)
def test_external_resource_of_page_is_found(site: Path, tag: str) -> None:
    (site / "a.html").write_text(tag)
    assert len(list(external(site))) == 1
