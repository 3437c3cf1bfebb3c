"""The page on other engines: each requirement that fails with torch has a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs_build.pages import enginepage
from docs_build.recording import engines, results
from docs_build.recording.records import load
from spec_tools.torch_is_wrong import cases

pytestmark = pytest.mark.pure


def test_each_requirement_that_fails_with_torch_has_a_reason() -> None:
    rows, reasons = load("engine-torch")["rows"], engines.reasons("torch")
    assert {row for row, result in rows.items() if result["failed"]} == set(reasons)
    assert {reason["kind"] for reason in reasons.values()} <= set(engines.KINDS)
    assert set(rows) <= set(results.all_rows())
    names = {case.name for case in cases()}
    assert {reason["case"] for reason in reasons.values() if "case" in reason} <= names


def test_summary_counts_each_requirement_once() -> None:
    lines = [line.split(" | ") for line in enginepage.summary().splitlines() if line.startswith("| ")][2:]
    assert sum(int(number) for _, number, _ in lines) == len(results.all_rows())


def test_record_joins_sessions_and_variants(tmp_path: Path) -> None:
    def write(folder: str, tests: dict[str, str], errors: dict[str, str]) -> Path:
        path = tmp_path / folder
        path.mkdir()
        row = {"tests": {name: {"cpu-gloo": outcome} for name, outcome in tests.items()}}
        (path / "spec-results-torch.json").write_text(json.dumps({"CTOR-01": row, "CTOR-02": {"tests": {}}}))
        (path / "spec-errors-torch.json").write_text(json.dumps(errors))
        return path

    one = write("one", {"a[1]": "passed", "a[2]": "failed", "b": "failed"}, {"a[2]": "wrong", "b": "old"})
    two = write("two", {"b": "passed (order only)", "c": "not run"}, {})
    record = engines.record("torch", [one, two])
    assert record["rows"] == {"CTOR-01": {"passed": 1, "failed": {"a": "wrong"}}}
