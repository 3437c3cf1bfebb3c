"""The generated parts of the page about streams."""

from __future__ import annotations

import pytest

from docs_build.reading.order import ROOT
from docs_build.recording.records import load


@pytest.mark.needs("mkdocs")
def test_the_table_counts_the_broken_engines_that_were_found() -> None:
    from docs_build.pages import streams

    record = load("stream-breaks")
    found = sum(one["report"] != streams.NOT_FOUND for one in record)
    assert f"{found} of {len(record)} broken engines found" in streams.breaks()


@pytest.mark.needs("mkdocs")
def test_each_stream_picture_is_on_a_page_marked_simulated() -> None:
    from docs_build.pages import streams

    prose = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    for path in streams.PICTURES.glob("*.svg"):
        assert f"{{{{ simulated {path.stem} | " in prose
        assert "Simulated: the order and the waits" in streams.figure(path.stem, "A caption.")
