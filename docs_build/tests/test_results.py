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


def test_worst_variant_counts_and_results_of_other_backends_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FRESH", "RECORD"):
        monkeypatch.setattr(results, name, tmp_path / f"{name}.json")
    tests = {"a.py::t[1]": {"cpu-gloo": "passed"}, "a.py::t[2]": {"cpu-gloo": "failed"}}
    row = {"results": {"cpu-gloo": "failed"}, "kinds": {"cpu-gloo": "text"}, "tests": tests}
    results.FRESH.write_text(json.dumps({"CTOR-01": row}))
    results.RECORD.write_text(json.dumps({"runs": {"cuda-nccl": {"date": "2026-01-01", "machine": "m"}}, "rows": {}}))
    results.write_record()
    written = json.loads(results.RECORD.read_text())
    assert written["rows"]["CTOR-01"]["tests"] == {"a.py::t": {"cpu-gloo": "failed"}}
    assert set(written["runs"]) == {"cpu-gloo", "cuda-nccl"}


def test_numbers_in_the_readme_equal_those_of_the_record() -> None:
    rows = json.loads(results.RECORD.read_text())["rows"].values()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", readme, re.MULTILINE))
    assert tuple(lines) == results.BACKENDS
    assert f"The last recorded run covers {len(rows)} requirements." in " ".join(readme.split())
    for backend, line in lines.items():
        kinds = Counter(row["kinds"].get(backend, "none") for row in rows)
        proven = sum(row["results"][backend] == "proven" for row in rows)
        shown = [proven, *(kinds[kind] for kind in results.KINDS), len(rows) - proven]
        assert line == " | ".join(map(str, shown)), backend
