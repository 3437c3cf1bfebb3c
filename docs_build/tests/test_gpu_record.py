"""The record of what ran on GPUs, and what the pages say about it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from docs_build.reading.order import ROOT
from docs_build.recording import gpu, results
from spec_tools.gpu.code import digest_of
from spec_tools.gpu.cover import record

pytestmark = [pytest.mark.pure, pytest.mark.spec("KIT-21")]

TEST = "spec_tests/clipping/test_clip.py::test_norm"
SHARED, SEPARATE = "2 ranks on one GPU, NCCL over sockets", "2 GPUs, NCCL"
RESULT = {
    "test": f"{TEST}[1]",
    "stage": "requirements",
    "outcome": "passed",
    "rows": ["CTOR-01"],
    "kind": "behaviour",
    "evidence": SHARED,
    "code": "1",
    "seconds": 0.5,
}
REPORT: dict[str, Any] = {
    "about": {"device": "cuda", "commit": "a1b2"},
    "date": "2026-12-24 10:00 UTC",
    "hardware": {"versions": {"torch": "2.13.0+cu130"}, "devices": [{"name": "NVIDIA H100"}]},
    "start_up": {"2 ranks": 8.0},
    "results": {RESULT["test"]: RESULT},
    "requirements": {"CTOR-01": RESULT},
}
EMPTY: dict[str, Any] = {"runs": [], "rows": {}}


def report_with(**facts: object) -> dict[str, Any]:
    """The report of another commit, in which the requirement has a result with these facts."""
    return REPORT | {"about": {"device": "cuda", "commit": "later"}, "requirements": {"CTOR-01": RESULT | facts}}


def test_report_without_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="device 'cpu', so it has no results of a GPU"):
        gpu.add_report(EMPTY, REPORT | {"about": {"device": "cpu"}})


def test_record_has_the_test_the_evidence_the_code_and_the_run_of_each_requirement() -> None:
    found = gpu.add_report(EMPTY, REPORT)
    (run,) = found["runs"]
    assert (run["date"], run["hardware"], run["commit"]) == ("2026-12-24", "1 x NVIDIA H100", "a1b2")
    assert (run["passed"], run["failed"], run["seconds"]) == (1, 0, {"2": 0.5})
    row = {name: RESULT[name] for name in ("test", "outcome", "kind", "evidence", "code", "seconds")}
    assert found["rows"] == {"CTOR-01": row | {"run": 0}}
    # The same run again, which was continued.
    assert gpu.add_report(found, REPORT) == found


@pytest.mark.parametrize(
    ("facts", "is_kept"),
    [
        ({"evidence": "1 rank, NCCL"}, True),
        ({"evidence": "1 rank, NCCL", "code": "2"}, False),
        ({"evidence": SEPARATE}, False),
        ({"outcome": "failed"}, False),
    ],
)
def test_only_a_weaker_result_of_the_same_code_does_not_replace_the_earlier_one(
    facts: dict[str, str], is_kept: bool
) -> None:
    earlier = gpu.add_report(EMPTY, REPORT)
    found = gpu.add_report(earlier, report_with(**facts))
    assert len(found["runs"]) == 2
    assert (found["rows"] == earlier["rows"]) == is_kept


def test_result_is_older_if_its_code_has_changed() -> None:
    file = "spec_tests/parity/test_parity.py"
    known = gpu.add_report(EMPTY, report_with(test=file, code=digest_of(file)))
    assert gpu.older(known) == set()
    known["rows"]["CTOR-01"]["code"] = "another"
    assert gpu.older(known) == {"CTOR-01"}


def test_requirements_get_their_result_on_gpus_and_keep_those_of_cpus() -> None:
    row = {"results": {"cpu-gloo": "proven"}, "kinds": {"cpu-gloo": "text"}, "tests": {TEST: {"cpu-gloo": "passed"}}}
    before = {"runs": {"cpu-gloo": {"date": "d", "machine": "m"}}, "rows": {"CTOR-01": row, "CTOR-02": row}}
    found = gpu.add_requirements(before, gpu.add_report(EMPTY, REPORT))
    assert found["runs"]["cuda-nccl"] == {"date": "2026-12-24", "machine": "1 x NVIDIA H100, torch 2.13.0+cu130"}
    first, second = found["rows"].values()
    assert first["results"] == {"cpu-gloo": "proven", "cuda-nccl": "proven"}
    assert first["kinds"] == {"cpu-gloo": "text", "cuda-nccl": "behaviour"}
    assert first["tests"] == {TEST: {"cpu-gloo": "passed", "cuda-nccl": "passed"}}
    assert second["results"] == {"cpu-gloo": "proven", "cuda-nccl": "unproven"}
    assert gpu.add_requirements(before, EMPTY) is before


def test_run_on_cpus_keeps_the_results_on_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FRESH", tmp_path / "fresh.json")
    monkeypatch.setattr(results, "RECORD", tmp_path / "record.json")
    row = {"results": {}, "kinds": {}, "tests": {}}
    before = {"runs": {}, "rows": {"CTOR-01": row}}
    results.save_record(gpu.add_requirements(before, gpu.add_report(EMPTY, REPORT)))
    # The worst variant of a test counts.
    variants = {f"{TEST}[1]": {"cpu-gloo": "passed"}, f"{TEST}[2]": {"cpu-gloo": "failed"}}
    fresh = {"results": {"cpu-gloo": "failed", "cuda-nccl": "unproven"}, "kinds": {}, "tests": variants}
    results.FRESH.write_text(json.dumps({"CTOR-01": fresh}))
    results.write_record()
    written = json.loads(results.RECORD.read_text())
    assert set(written["runs"]) == {"cpu-gloo", "cuda-nccl"}
    assert written["rows"]["CTOR-01"]["results"] == {"cpu-gloo": "failed", "cuda-nccl": "proven"}
    assert written["rows"]["CTOR-01"]["tests"] == {TEST: {"cpu-gloo": "failed", "cuda-nccl": "passed"}}


# ---- the pages ------------------------------------------------------------------------------------------------------


def test_requirements_on_gpus_are_the_same_in_both_records() -> None:
    known = record()
    assert gpu.add_requirements(results.recorded(), known) == results.recorded()


def test_readme_says_what_the_record_of_gpus_says() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    said = gpu.sentences()
    assert f"**{said['where']}**" in text
    assert f"ran for {said['minutes']} on one GPU" in text
    assert f"{said['tests']} passed" in text
    lines = re.findall(r"^\| (`cuda-nccl`: .*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    expected = gpu.kinds_of_evidence(record(), len(results.recorded()["rows"]))
    assert lines == [" | ".join(map(str, line)) for line in expected]


@pytest.mark.parametrize("page", ["index.md", "evidence.md", "limits.md", "tools/gpus.md"])
def test_page_takes_what_it_says_about_runs_on_gpus_from_the_record(page: str) -> None:
    # This module needs mkdocs, which the extra for tests does not install.
    from docs_build.pages.directives import VALUES

    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    used = set(re.findall(r"\{\{ value (gpu-[\w]+) \}\}", text))
    assert used
    assert used <= VALUES.keys()
    # The numbers of the record occur only as values, except in the section about these runs.
    before, *_ = text.partition("## The run on an H200")
    assert re.findall(r"\b1,?703\b(?! \| 24)|minutes on one GPU|single GPUs", before) == []


def test_table_of_known_runs_has_the_numbers_of_the_record() -> None:
    text = (ROOT / "docs" / "tools" / "gpus.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (\d+ x .*?) \| (\S+) \| (\S+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    columns = [(run["hardware"], run["date"], run["versions"]["torch"]) for run in record()["runs"]]
    numbers = [(run["passed"], run["failed"]) for run in record()["runs"]]
    assert lines == [(*facts, *map(str, counts)) for facts, counts in zip(columns, numbers, strict=True)]
