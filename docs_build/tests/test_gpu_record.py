"""The record of the requirements that were proven on GPUs, from a report of ``python -m spec_tools.gpu``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs_build.recording import gpu, results

pytestmark = [pytest.mark.pure, pytest.mark.spec("KIT-21")]

ONE, TWO = "spec_tests/clipping/test_a.py::test_one", "spec_tests/clipping/test_a.py::test_two"
TESTS = [
    {"test": f"{ONE}[1]", "outcome": "passed", "rows": ["CTOR-01"], "kind": "text"},
    {"test": f"{ONE}[2]", "outcome": "passed", "rows": ["CTOR-01"], "kind": "text"},
    {"test": TWO, "outcome": "failed", "rows": ["CTOR-02"], "kind": "behaviour"},
]
REPORT: dict[str, Any] = {
    "about": {"device": "cuda"},
    "date": "2026-12-24 10:00 UTC",
    "hardware": {"versions": {"torch": "2.13.0+cu130"}, "devices": 8 * [{"name": "NVIDIA H100"}]},
    "jobs": {"suite/clipping/test_a.py": {"word": "failed", "findings": TESTS}},
}
# A requirement that was proven on CPUs.
ROW = {"results": {"cpu-gloo": "proven"}, "kinds": {"cpu-gloo": "behaviour"}, "tests": {ONE: {"cpu-gloo": "passed"}}}


def test_report_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="device 'cpu', so it has no results of a GPU"):
        gpu.add_requirements({"runs": {}, "rows": {}}, REPORT | {"about": {"device": "cpu"}})


def test_requirements_get_the_result_on_gpus_with_date_and_hardware() -> None:
    record = {"runs": {"cpu-gloo": {"date": "d", "machine": "m"}}, "rows": {f"CTOR-0{n}": ROW for n in (1, 2, 3)}}
    found = gpu.add_requirements(record, REPORT)
    machine = "8 x NVIDIA H100, torch 2.13.0+cu130"
    assert found["runs"] == record["runs"] | {"cuda-nccl": {"date": "2026-12-24", "machine": machine}}
    assert [one["results"]["cuda-nccl"] for one in found["rows"].values()] == ["proven", "failed", "unproven"]
    assert found["rows"]["CTOR-01"]["kinds"] == {"cpu-gloo": "behaviour", "cuda-nccl": "text"}
    assert found["rows"]["CTOR-01"]["tests"] == {ONE: {"cpu-gloo": "passed", "cuda-nccl": "passed (text)"}}
    # A report that proves fewer requirements changes nothing.
    assert gpu.add_requirements(found, REPORT | {"jobs": {}}) is found


def test_run_on_cpus_keeps_the_results_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FRESH", tmp_path / "fresh.json")
    monkeypatch.setattr(results, "RECORD", tmp_path / "record.json")
    results.save_record(gpu.add_requirements({"runs": {}, "rows": {"CTOR-01": ROW}}, REPORT))
    # The worst variant of a test counts.
    variants = {f"{ONE}[1]": {"cpu-gloo": "passed"}, f"{ONE}[2]": {"cpu-gloo": "failed"}}
    fresh = {"results": {"cpu-gloo": "failed", "cuda-nccl": "unproven"}, "kinds": {}, "tests": variants}
    results.FRESH.write_text(json.dumps({"CTOR-01": fresh}))
    results.write_record()
    written = json.loads(results.RECORD.read_text())
    assert set(written["runs"]) == {"cpu-gloo", "cuda-nccl"}
    assert written["rows"]["CTOR-01"]["results"] == {"cpu-gloo": "failed", "cuda-nccl": "proven"}
    assert written["rows"]["CTOR-01"]["kinds"] == {"cuda-nccl": "text"}
    assert written["rows"]["CTOR-01"]["tests"] == {ONE: {"cpu-gloo": "failed", "cuda-nccl": "passed (text)"}}
