"""The pictures of the benchmarks, drawn from a made-up record."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.needs("mkdocs")

RECORD: dict[str, Any] = {
    "circumstances": ["* recorded today", "* a machine", "* busy"],
    "ratios": {
        "tiny": {
            "DDP": {"low": 0.1, "median": 0.1, "high": 0.1},
            "torch FSDP1 flat": {"low": 1.0, "median": 1.0, "high": 1.0},
            "minifsdp flat": {"low": 0.5, "median": 0.75, "high": 1.25},
        },
        "gpt": {"torch FSDP2": {"low": 1.0, "median": 1.0, "high": 1.0}},
    },
    "memory": {
        "torch FSDP1 flat": [[0.0, 80.0], [0.5, 137.2], [1.0, 80.0]],
        "torch FSDP1 orig": [[0.0, 999.0], [1.0, 999.0]],
        "minifsdp flat": [[0.0, 80.0], [1.0, 150.0]],
    },
}


@pytest.fixture(autouse=True)
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from docs_build.recording import records

    monkeypatch.setattr(records, "DATA", tmp_path)
    (tmp_path / "benchmarks.json").write_text(json.dumps(RECORD))


def test_pictures_show_medians_with_quartiles_and_the_peaks_of_one_kind() -> None:
    from docs_build.drawing import plots

    html = plots.raced("ratios", "Ratios.")
    assert "Recorded today; a machine." in html
    assert re.findall(r"<g><title>([^<]*)</title>", html) == [
        "DDP: 0.10 [0.10-0.10]",
        "torch FSDP1 flat: 1.00 [1.00-1.00]",
        "minifsdp flat: 0.75 [0.50-1.25]",
        "torch FSDP2: 1.00 [1.00-1.00]",
    ]
    html = plots.raced("memory flat", "Memory.")
    assert re.findall(r"(\w+ \S+ ?\w*), at most ([\d.]+)", html) == [
        ("torch FSDP1 flat", "137.2"),
        ("minifsdp flat", "150.0"),
    ]


def test_missing_record_gives_no_figure(tmp_path: Path) -> None:
    from docs_build.drawing import plots

    assert plots.raced("memory FSDP2", "Memory.") == ""
    (tmp_path / "benchmarks.json").write_text(json.dumps({"circumstances": []}))
    assert plots.raced("ratios", "Ratios.") == ""
    (tmp_path / "benchmarks.json").unlink()
    assert plots.raced("memory flat", "Memory.") == "No run is recorded."


def test_page_shows_all_pictures() -> None:
    from docs_build.reading.order import ROOT

    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert re.findall(r"^\{\{ raced ([^|]*) \| ", page, re.MULTILINE) == ["ratios", "memory flat", "memory FSDP2"]


def test_results_begin_with_sentences_of_the_record(tmp_path: Path) -> None:
    from docs_build.pages import raced
    from docs_build.pages.directives import expand

    assert raced.found() == (
        "**Time.** The fastest minifsdp takes 0.75 to 0.75 of the time of torch's fastest FSDP, and is faster in 1 of "
        "1 workloads. DDP, which shards nothing and stores the whole model on every rank, is faster than the fastest "
        "minifsdp in 1 of 1 workloads. **Memory.** At the peak of a step of `gpt`, minifsdp has 150 MiB in live "
        "tensors, torch's FSDP 137 to 999."
    )
    assert raced.found() in expand("{{ table raced }}", "benchmarks.html")
    slow = {"minifsdp flat": {"median": 0.9}, "minifsdp FSDP2": {"median": 1.5}, "DDP": {"median": 0.95}}
    ratios = {"wide": slow, "gpt": {"minifsdp flat": {"median": 1.2}}}
    memory = {"minifsdp flat": [[0.0, 80.0]], "torch FSDP2": [[0.0, 90.0]], "DDP": [[0.0, 5.0], [1.0, 300.0]]}
    (tmp_path / "benchmarks.json").write_text(json.dumps({"ratios": ratios, "memory": memory}))
    assert "0.90 to 1.20 of the time of torch's fastest FSDP, and is faster in 1 of 2 workloads" in raced.found()
    assert (
        "At least one configuration of minifsdp is slower than torch's fastest FSDP in `gpt`, `wide`." in raced.found()
    )
    assert "in 0 of 1 workloads." in raced.found()
    assert raced.found().endswith("minifsdp has 80 MiB in live tensors, torch's FSDP 90, and DDP 300.")
    (tmp_path / "benchmarks.json").write_text(json.dumps({"circumstances": []}))
    assert raced.found() == ""
