"""The record of runs on GPUs: from a report of ``python -m spec_tools.gpu`` to the site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs_build.pages import gpurun
from docs_build.recording import gpu, records, results
from spec_tools.gpu import report as reports
from spec_tools.gpu.process import Outcome

pytestmark = pytest.mark.pure

VERSIONS = {"Python": "3.12.3", "torch": "2.13.0+cu130", "NCCL": "2.29.1"}
STEP = {"size": "125M", "ranks": 8, "contender": "minifsdp fully_shard", "ms": 8.0}
RACE = {"configuration": "wrapper", "ranks": 8, "seeds": 3, "delays": 70}
ONE, TWO = "spec_tests/clipping/test_a.py::test_one", "spec_tests/clipping/test_a.py::test_two"
H100, H200 = "8 x NVIDIA H100", "1 x NVIDIA H200"


def a_report(date: str = "2026-12-24 10:00 UTC", device: str = "cuda") -> dict[str, Any]:
    hardware = {"versions": VERSIONS, "devices": 8 * [{"name": "NVIDIA H100"}]}
    tests = [
        {"test": f"{ONE}[1]", "outcome": "passed", "rows": ["CTOR-01"], "kind": "text"},
        {"test": f"{ONE}[2]", "outcome": "passed", "rows": ["CTOR-01"], "kind": "text"},
        {"test": TWO, "outcome": "failed", "rows": ["CTOR-02"], "kind": "behaviour"},
    ]
    outcomes = {
        "hardware/all": Outcome("passed", 2.0, findings=[hardware]),
        "smoke/parity/test_parity.py": Outcome("failed", 2.0, "ValueError"),
        "steps/8": Outcome("passed", 2.0, findings=[STEP]),
        "suite/clipping/test_a.py": Outcome("failed", 2.0, "E", findings=tests),
        "races/8": Outcome("failed", 2.0, "E", findings=[RACE, {**RACE, "ranks": 4, "text": "hang"}]),
    }
    return reports.compose(reports.circumstances(device, 8, False), outcomes, []) | {"date": date}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with copies of both records, which the commands change. That of the GPUs has one run."""
    (tmp_path / "spec-results.json").write_text((records.DATA / "spec-results.json").read_text())
    run = json.loads((records.DATA / "gpu.json").read_text())["runs"][H200]
    (tmp_path / "gpu.json").write_text(json.dumps({"runs": {H200: run}}))
    monkeypatch.setattr(records, "DATA", tmp_path)
    monkeypatch.setattr(results, "RECORD", tmp_path / "spec-results.json")
    results.recorded.cache_clear()
    yield tmp_path
    results.recorded.cache_clear()


@pytest.mark.spec("KIT-21")
def test_command_adds_a_run_and_keeps_that_of_other_hardware(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads((data / "gpu.json").read_text())["runs"]
    reports.write(a_report(), data / "report.json")
    gpu.main(str(data / "report.md"))
    after = json.loads((data / "gpu.json").read_text())["runs"]
    assert after.keys() - before.keys() == {H100}
    assert after[H200] == before[H200]
    assert after[H100]["tests"] == {"clipping/test_a.py": {"passed": 2, "failed": 1, "complete": True}}
    assert after[H100]["stages"]["smoke/parity/test_parity.py"] == ["failed", 2.0]
    assert capsys.readouterr().out.startswith("8 x NVIDIA H100, 2026-12-24: 1 requirements proven. Runs: 2")


@pytest.mark.spec("KIT-21")
def test_newest_run_of_each_hardware_is_kept() -> None:
    record = gpu.add_run({"runs": {}}, a_report())
    older, newer = a_report("2026-01-01 00:00 UTC"), a_report("2027-01-01 00:00 UTC")
    assert gpu.add_run(record, older)["runs"][H100]["date"] == "2026-12-24"
    assert gpu.add_run(record, newer)["runs"][H100]["date"] == "2027-01-01"


@pytest.mark.spec("KIT-21")
def test_report_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="device 'cpu', so it has no results of a GPU"):
        gpu.run_of(a_report(device="cpu"))


@pytest.mark.spec("KIT-21")
def test_requirements_get_the_result_on_gpus_with_date_and_hardware() -> None:
    row = {
        "results": {"cpu-gloo": "proven"},
        "kinds": {"cpu-gloo": "behaviour"},
        "tests": {ONE: {"cpu-gloo": "passed"}},
    }
    record = {"runs": {"cpu-gloo": {"date": "d", "machine": "m"}}, "rows": {f"CTOR-0{n}": row for n in (1, 2, 3)}}
    found = gpu.add_requirements(record, a_report())
    machine = "8 x NVIDIA H100, Python 3.12.3, torch 2.13.0+cu130, NCCL 2.29.1"
    assert found["runs"] == record["runs"] | {"cuda-nccl": {"date": "2026-12-24", "machine": machine}}
    assert [one["results"]["cuda-nccl"] for one in found["rows"].values()] == ["proven", "failed", "unproven"]
    assert found["rows"]["CTOR-01"]["kinds"] == {"cpu-gloo": "behaviour", "cuda-nccl": "text"}
    assert found["rows"]["CTOR-01"]["tests"] == {ONE: {"cpu-gloo": "passed", "cuda-nccl": "passed (text)"}}
    # A report that proves fewer requirements changes nothing.
    small = a_report()
    del small["jobs"]["suite/clipping/test_a.py"]
    assert gpu.add_requirements(found, small) is found


@pytest.mark.spec("KIT-21")
def test_run_on_cpus_keeps_the_results_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "results": {"cpu-gloo": "proven"},
        "kinds": {"cpu-gloo": "behaviour"},
        "tests": {ONE: {"cpu-gloo": "passed"}},
    }
    recorded = gpu.add_requirements({"runs": {}, "rows": {"CTOR-01": row}}, a_report())
    monkeypatch.setattr(results, "FRESH", tmp_path / "fresh.json")
    monkeypatch.setattr(results, "RECORD", tmp_path / "record.json")
    results.save_record(recorded)
    unproven = {"cpu-gloo": "failed", "cuda-nccl": "unproven"}
    fresh = {"results": unproven, "kinds": {}, "tests": {ONE: {"cpu-gloo": "failed"}}}
    results.FRESH.write_text(json.dumps({"CTOR-01": fresh}))
    results.write_record()
    (written,) = json.loads(results.RECORD.read_text())["rows"].values()
    assert written["results"] == {"cpu-gloo": "failed", "cuda-nccl": "proven"}
    assert written["kinds"] == {"cuda-nccl": "text"}
    assert written["tests"] == {ONE: {"cpu-gloo": "failed", "cuda-nccl": "passed (text)"}}


@pytest.mark.spec("KIT-21")
def test_pages_show_each_run_with_hardware_and_date(data: Path) -> None:
    assert gpurun.others() == ""
    records.save("gpu", gpu.add_run(records.load("gpu"), a_report()), sort_keys=False)
    assert list(gpurun.runs()) == [H100, H200]
    assert f"| {H100} | 2026-12-24 | 2.13.0+cu130 | 2 | 1 | smoke/parity/test_parity.py |" in gpurun.all_runs()
    shown = gpurun.others()
    assert shown.startswith(f"### {H100}\n\n2026-12-24, {H100}, Python 3.12.3")
    assert "| 125M, 8 ranks | minifsdp fully_shard | 8.0 |" in shown
    assert "| wrapper, 8 ranks | 3 | 70 | 0 |" in shown
    assert "| wrapper, 4 ranks | 3 | 70 | 1 |" in shown
    assert "H200" not in shown
    assert gpurun.machine().startswith("2026-11-26, one NVIDIA H200, ")
