"""Two builds give the same files, because a build measures nothing and uses no random order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from docs_build.tests.conftest import build

pytestmark = [pytest.mark.docs, pytest.mark.needs("mkdocs")]

# They contain the dates of all pages, and nothing else.
DATED = {"sitemap.xml", "sitemap.xml.gz"}


def contents(site: Path) -> dict[str, bytes]:
    files = {path.relative_to(site).as_posix(): path for path in site.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in DATED}


def test_second_build_gives_same_files(site: Path, tmp_path: Path) -> None:
    # A time zone far from UTC, another order of sets of strings, and another language.
    other = {**os.environ, "TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "20260", "LANG": "C"}
    again = contents(build(tmp_path / "again", other))
    first = contents(site)
    assert len(first) > 200
    assert sorted(first) == sorted(again)
    assert [name for name in first if first[name] != again[name]] == []
