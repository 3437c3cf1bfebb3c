"""The generated parts of the page about streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("mkdocs")

ONE = {
    "name": "no-record-stream",
    "file": "engine/lifetime.py",
    "what": "The allocator is not informed.",
    "program": "flat_full",
    "by": "collision",
    "report": "REUSE: write of bytes 0 to <32>",
    "replay": "3 of 8 schedules",
}


def test_the_table_counts_the_broken_engines_that_were_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from docs_build.pages import streams
    from docs_build.recording import records

    monkeypatch.setattr(records, "DATA", tmp_path)
    assert "No run" in streams.breaks()
    (tmp_path / "stream-breaks.json").write_text(
        json.dumps([ONE, {**ONE, "name": "unnoticed", "report": "NOT FOUND", "replay": ""}])
    )
    table = streams.breaks()
    assert "1 of 2 broken engines found" in table
    assert "to &lt;32&gt;" in table
    assert table.count("replay: other bits in 3 of 8 schedules") == 1


def test_each_stream_picture_is_on_a_page_marked_simulated() -> None:
    from docs_build.pages import streams
    from docs_build.reading.order import ROOT

    prose = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    for path in streams.PICTURES.glob("*.svg"):
        assert f"{{{{ simulated {path.stem} | " in prose
        assert "Simulated: the order and the waits" in streams.figure(path.stem, "A caption.")
