"""Two builds give the same files, whatever else the machine does, because a build measures nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs_build.tests.conftest import build

pytestmark = [pytest.mark.docs, pytest.mark.needs("mkdocs")]

# They contain the dates of all pages, and nothing else.
DATED = {"sitemap.xml", "sitemap.xml.gz"}


@pytest.fixture
def busy() -> Iterator[None]:
    """Another program uses one core."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
        yield
        loop.kill()


def contents(site: Path) -> dict[str, bytes]:
    files = {path.relative_to(site).as_posix(): path for path in site.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in DATED}


@pytest.mark.usefixtures("busy")
def test_second_build_gives_same_files(site: Path, tmp_path: Path) -> None:
    # A time zone far from UTC, another order of sets of strings, and the lowest priority.
    other = {**os.environ, "TZ": "Pacific/Kiritimati", "PYTHONHASHSEED": "20260", "LANG": "C"}
    again = contents(build(tmp_path / "again", other, "nice", "-n", "19"))
    first = contents(site)
    assert len(first) > 200
    assert sorted(first) == sorted(again)
    assert [name for name in first if first[name] != again[name]] == []
