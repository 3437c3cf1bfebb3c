"""The recorded test results that the pages show."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from docs_build.reading.order import ROOT
from docs_build.recording import results


def test_every_requirement_is_read_with_its_section() -> None:
    rows = results.all_rows()
    assert next(iter(rows)) == "CTOR-01"
    assert rows["SHARD-04"].section == "SHARD: sharding strategies"
    assert "all-gather before forward" in rows["SHARD-04"].statement
    assert set(rows["OSD-LOAD-01"].results) == set(results.BACKENDS)


def test_variants_of_a_test_are_joined_and_the_worst_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = {
        "a.py::t[1]": {"cpu-gloo": "passed"},
        "a.py::t[2]": {"cpu-gloo": "failed"},
        "a.py::u": {"cpu-gloo": "passed"},
    }
    fresh, record = tmp_path / "fresh.json", tmp_path / "record.json"
    row = {"statement": "s", "results": {"cpu-gloo": "failed"}, "kinds": {}, "tests": tests}
    fresh.write_text(json.dumps({"CTOR-01": row}))
    monkeypatch.setattr(results, "FRESH", fresh)
    monkeypatch.setattr(results, "RECORD", record)
    results.write_record()
    written = json.loads(record.read_text())
    assert written["rows"]["CTOR-01"]["tests"] == {"a.py::t": {"cpu-gloo": "failed"}, "a.py::u": {"cpu-gloo": "passed"}}
    assert set(written["runs"]) == {"cpu-gloo"}
    assert written["runs"]["cpu-gloo"]["machine"]


def test_results_of_other_backend_stay_in_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, record = tmp_path / "fresh.json", tmp_path / "record.json"
    record.write_text(json.dumps({"runs": {"cuda-nccl": {"date": "2026-01-01", "machine": "m"}}, "rows": {}}))
    row = {"results": {}, "kinds": {"cpu-gloo": "text"}, "tests": {"a.py::t": {"cpu-gloo": "passed (text)"}}}
    fresh.write_text(json.dumps({"CTOR-01": row}))
    monkeypatch.setattr(results, "FRESH", fresh)
    monkeypatch.setattr(results, "RECORD", record)
    results.write_record()
    written = json.loads(record.read_text())
    assert set(written["runs"]) == {"cpu-gloo", "cuda-nccl"}
    assert written["rows"]["CTOR-01"]["kinds"] == {"cpu-gloo": "text"}


def test_numbers_in_the_readme_equal_those_of_the_record() -> None:
    rows = json.loads(results.RECORD.read_text())["rows"].values()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = {line.group(1): line.group(2) for line in re.finditer(r"^\| `([a-z-]+)` \| (.*) \|$", readme, re.MULTILINE)}
    assert tuple(lines) == results.BACKENDS
    assert f"The last recorded run covers {len(rows)} requirements." in " ".join(readme.split())
    for backend, line in lines.items():
        kinds = Counter(row["kinds"].get(backend, "none") for row in rows)
        proven = sum(row["results"][backend] == "proven" for row in rows)
        shown = [proven, *(kinds[kind] for kind in results.KINDS), len(rows) - proven]
        assert line == " | ".join(map(str, shown)), backend
        assert proven == sum(shown[1:-1])
