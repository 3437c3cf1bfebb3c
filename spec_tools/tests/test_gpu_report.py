"""The report of the GPU kit: its summary, names that it removes, its two files, and findings of interrupted chunks."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from spec_tests.harness import pool
from spec_tests.waiting import comes_true
from spec_tools.gpu import __main__ as kit
from spec_tools.gpu import control, names, report
from spec_tools.gpu.__main__ import main
from spec_tools.gpu.chunks import Chunk, Outcome
from spec_tools.gpu.platforms import CUDA
from spec_tools.gpu.progress import Progress
from spec_tools.gpu.stages import STAGES, Stage
from spec_tools.gpu.summary import summary, verdict, worst

pytestmark = pytest.mark.pure

DEVICES = 8 * [{"name": "NVIDIA H100 80GB HBM3", "capability": "9.0"}]
VERSIONS = {"Python": "3.12.3", "torch": "2.11.0+cu130", "CUDA": "13.0", "NCCL": "2.28.9", "driver": "580.159.04"}
HARDWARE = {"outcome": "passed", "versions": VERSIONS, "devices": DEVICES, "processors": 192, "system": "Linux 6.8"}
CLIP, NORM = "spec_tests/fsdp1/test_clip.py::test_norm", "spec_tests/fsdp1/test_clip.py::test_other[1-True]"


def passed(*findings: dict[str, Any]) -> Outcome:
    return Outcome("passed", 1.0, findings=list(findings))


def failed(reason: str, *findings: dict[str, Any], word: str = "failed", last_lines: str = "") -> Outcome:
    return Outcome(word, 1.0, reason, last_lines, list(findings))


def a_test(test: str, outcome: str, **more: Any) -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "rows": ["CLIP-01"], **more}


def step(contender: str, ms: float, outcome: str = "passed") -> dict[str, Any]:
    return {"size": "125M", "ranks": 8, "precision": "bf16", "contender": contender, "ms": ms, "outcome": outcome}


def race(seed: int, outcome: str = "passed", **more: Any) -> dict[str, Any]:
    return {"configuration": "wrapper", "ranks": 2, "seed": seed, "outcome": outcome, "delays": 100, **more}


def outcomes_of_a_run() -> dict[str, Outcome]:
    """A run on eight GPUs in which one test fails because of minifsdp, and another one with torch too."""
    return {
        "hardware/all": passed(HARDWARE),
        "collectives/8-ranks": passed({"ranks": 8}),
        "smoke/8-ranks": passed(),
        "steps/8-ranks/125M": passed(step("torch fully_shard", 10.0), step("minifsdp fully_shard", 8.0)),
        "suite/fsdp1/test_clip.py": failed(
            "AssertionError: 1 is not 2",
            a_test("spec_tests/fsdp1/test_clip.py::test_right", "passed", kind="text"),
            a_test(CLIP, "failed", text="the code\nE   ValueError: no norm\n"),
            a_test(NORM, "failed", text="E   RuntimeError: other"),
        ),
        "races/2-ranks/wrapper": passed(race(-1), race(0), race(1)),
        control._name(CLIP, "alone"): failed("ValueError: no norm", a_test(CLIP, "failed")),
        control._name(CLIP, "torch"): passed(a_test(CLIP, "passed")),
        control._name(NORM, "alone"): failed("RuntimeError: other", a_test(NORM, "failed")),
        control._name(NORM, "torch"): failed("RuntimeError: the same", a_test(NORM, "failed")),
        "benchmarks/all": passed(),
    }


def a_report(**outcomes: Outcome) -> dict[str, Any]:
    return report.compose(CUDA, outcomes_of_a_run() | outcomes, [stage.name for stage in STAGES], 0)


# ---- the summary ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("KIT-22")
def test_summary_has_device_versions_stages_numbers_worst_failure_and_verdict(tmp_path: Path) -> None:
    found = a_report()
    lines = summary(found)
    assert lines[0].startswith("* 8 x NVIDIA H100 80GB HBM3; minifsdp ")
    assert lines[1] == "* Python 3.12.3, torch 2.11.0+cu130, CUDA 13.0, NCCL 2.28.9, driver 580.159.04"
    assert lines[2:] == [
        "* passed: hardware, collectives, smoke, steps, races, benchmarks",
        "* failed: suite (1 of 1)",
        "* tests: 1 passed, 2 failed, 0 skipped; requirements: 0 proven, 1 failed",
        "* race hunt: 1 configurations, 200 delays, 0 different",
        "* training steps: 0.80 to 0.80 times the time of torch",
        f"* worst: {CLIP}: ValueError: no norm",
        "* **verdict: minifsdp is wrong (1), torch does the same (1)**",
    ]
    report.write(found, tmp_path / "it.md")
    assert (tmp_path / "it.md").read_text().splitlines()[2 : 2 + len(lines)] == lines


@pytest.mark.spec("KIT-22")
def test_summary_of_the_longest_report_has_ten_lines_of_limited_length() -> None:
    raced = failed("x" * 500, race(0), race(1, "failed", text="x"))
    found = report.compose(CUDA, outcomes_of_a_run() | {"races/2-ranks/wrapper": raced}, [], 7)
    lines = summary(found)
    assert len(lines) == 10
    assert "* **not complete**: 7 chunks were not run" in lines
    assert max(map(len, lines)) <= 202
    assert lines[8].startswith("* worst: races/2-ranks/wrapper: xxx")


@pytest.mark.spec("KIT-22")
def test_verdict_without_a_failure_depends_on_whether_everything_has_run() -> None:
    outcomes = {f"{stage.name}/x": passed() for stage in STAGES}
    assert verdict(report.compose(CUDA, outcomes, [], 0)) == "passed"
    incomplete = "nothing failed, but not everything has run"
    assert verdict(report.compose(CUDA, outcomes, [], 1)) == incomplete
    del outcomes["suite/x"]
    found = report.compose(CUDA, outcomes, [], 0)
    assert (verdict(found), worst(found)) == (incomplete, "")


@pytest.mark.spec("KIT-22")
def test_failure_without_minifsdp_is_one_of_the_machine_and_the_worst() -> None:
    found = a_report(**{"collectives/8-ranks": failed("all-gather on nccl: element 1 is 5.0, not 2.0", word="hung")})
    assert worst(found) == "collectives/8-ranks: all-gather on nccl: element 1 is 5.0, not 2.0"
    assert verdict(found) == "minifsdp is wrong (1), this machine is wrong (1), torch does the same (1)"


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("KIT-07")
def test_report_is_read_from_markdown_json_and_from_an_earlier_file_with_both(tmp_path: Path) -> None:
    written, path = a_report(), tmp_path / "run.md"
    report.write(written, path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.json", "run.md"]
    assert report.read(path) == report.read(path.with_suffix(".json")) == written
    assert path.read_text().endswith("All of it, for programs: `run.json`, beside this file.\n")
    earlier = tmp_path / "earlier.md"
    earlier.write_text("# text\n" + report.BEGIN + json.dumps(written) + report.END)
    assert report.read(earlier) == written
    (tmp_path / "run.json").unlink()
    with pytest.raises(ValueError, match=r"no run\.json next to it"):
        report.read(path)
    (tmp_path / "run.json").write_text("cut off {")
    with pytest.raises(ValueError, match="is not a report"):
        report.read(path)


@pytest.mark.spec("KIT-07")
def test_requirement_has_the_kind_of_its_evidence() -> None:
    only = {"suite/a.py": passed(a_test("a.py::t", "passed", kind="text"), a_test("a.py::u", "skipped"))}
    found = report.compose(CUDA, only, ["suite"], 0)
    assert found["outcomes"] == {"a.py::t": "passed (text)", "a.py::u": "skipped"}
    assert (found["rows"], found["kinds"]) == ({"proven": ["CLIP-01"], "failed": []}, {"CLIP-01": "text"})


@pytest.mark.spec("KIT-20")
def test_markdown_has_a_table_of_the_control(tmp_path: Path) -> None:
    report.write(a_report(), tmp_path / "it.md")
    text = (tmp_path / "it.md").read_text()
    assert f"| {CLIP} | fails alone too | torch passes | minifsdp is wrong |  |" in text
    same = f"| {NORM} | fails alone too | also fails with torch | torch does the same | RuntimeError: the same |"
    assert same in text
    assert "| control | 1 | 3 | 0 | 0 | 0 |" in text
    # The runs of the control are not listed as failures of their own.
    assert "### control" not in text


# ---- names ----------------------------------------------------------------------------------------------------------

NAMES = {"dgx-17.example.org": "host0", "dgx-17": "host0", "alice": "<user>"}


@pytest.mark.spec("KIT-23")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[dgx-17.example.org:2] and dgx-17:", "[host0:2] and host0:"),
        ("dgx-170 and alices stay", "dgx-170 and alices stay"),
        ("alice: /scratch/alice/run-7/data.bin: No such file", "<user>: <path>/data.bin: No such file"),
        (
            'File "/opt/conda/lib/python3.12/site-packages/torch/x.py", line 3',
            'File "<path>/site-packages/torch/x.py", line 3',
        ),
        ("../../scratch/alice/torch/x.py:3 and ../", "<path>/x.py:3 and ../"),
        ("<python>/lib/torch/x.py ./minifsdp/a.py ~/b/c.py", "<python>/lib/torch/x.py ./minifsdp/a.py ~/b/c.py"),
        ("/dev/shm: 64 MiB, /proc/meminfo", "/dev/shm: 64 MiB, /proc/meminfo"),
        ("connect to 10.0.3.7:29500, not 127.0.0.1", "connect to <address>:29500, not 127.0.0.1"),
        (
            "tokens/s, GB/s, 580.159.04, https://pytorch.org/docs/a",
            "tokens/s, GB/s, 580.159.04, https://pytorch.org/docs/a",
        ),
    ],
)
def test_names_addresses_and_paths_are_replaced(text: str, expected: str) -> None:
    assert names.without_names({"key": [text, 3, None]}, NAMES) == {"key": [expected, 3, None]}


@pytest.mark.spec("KIT-23")
def test_report_keeps_names_only_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "dgx-17.example.org")
    monkeypatch.setattr("getpass.getuser", lambda: "alice")
    assert names.local_names() == NAMES
    outcomes = {"suite/x": failed("ValueError: dgx-17", last_lines="alice at /data/x/y.py")}
    for with_names, words in (
        (False, ("host0", "<user> at <path>/y.py")),
        (True, ("dgx-17", "alice at /data/x/y.py")),
    ):
        report.write(report.compose(CUDA, outcomes, [], 0, with_names), tmp_path / "it.md")
        for path in tmp_path.iterdir():
            assert [word for word in words if word not in path.read_text()] == []
            assert ("alice" in path.read_text()) == with_names


@pytest.mark.spec("KIT-23")
def test_user_with_a_common_name_changes_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    assert names.local_names() == {}


# ---- interruptions --------------------------------------------------------------------------------------------------

# In its first run it sleeps after two sizes. It writes like `leave_finding`, without the import of torch.
MEASURES = """
import json, os, sys, time
from pathlib import Path
first = Path(sys.argv[1], "first")
for size in ("64 KiB", "1 MiB", "16 MiB"):
    with open(os.environ["MINIFSDP_KIT_FINDINGS"], "a") as file:
        file.write(json.dumps({"outcome": "passed", "size": size, "busbw": 17}) + "\\n")
    if size == "1 MiB" and not first.exists():
        first.write_text("")
        time.sleep(600)
"""


def run_in_a_process(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    chunk = Chunk("collectives/2-ranks", [sys.executable, "-c", MEASURES, str(folder)], 60)
    kit.STAGES = (Stage("collectives", "how fast", lambda settings: [chunk]),)
    sys.exit(main(["--device", "cpu"], folder))


@pytest.mark.spec("KIT-24")
@pytest.mark.parametrize("word", [signal.SIGINT, signal.SIGKILL])
def test_report_has_the_findings_of_an_interrupted_chunk(word: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "gpu-report-cpu.md"
    first, second = (pool.fork_server().Process(target=run_in_a_process, args=(tmp_path,)) for _ in range(2))
    first.start()
    assert comes_true(lambda: (tmp_path / "first").exists(), 60)
    os.kill(first.pid, word)
    first.join(60)
    progress = Progress(tmp_path / "gpu" / "cpu", kit.holds_for(kit.find("cpu"), False))
    assert progress.outcomes == {}
    assert [line["size"] for line in progress.with_stopped()["collectives/2-ranks"].findings] == ["64 KiB", "1 MiB"]
    progress.close()
    if word == signal.SIGINT:
        found = report.read(path)
        assert [line["size"] for line in found["collectives"]] == ["64 KiB", "1 MiB"]
        assert found["chunks"]["collectives/2-ranks"]["word"] == "stopped"
        assert verdict(found) == "nothing failed, but not everything has run"
        assert "| collectives | 0 | 0 | 0 | 0 | 1 |" in path.read_text()
    second.start()
    second.join(60)
    found = report.read(path)
    assert found["chunks"]["collectives/2-ranks"]["word"] == "passed"
    assert [line["size"] for line in found["collectives"]] == ["64 KiB", "1 MiB", "16 MiB"]


@pytest.mark.spec("KIT-24")
def test_findings_of_other_code_or_of_a_forgotten_stage_are_deleted(tmp_path: Path) -> None:
    for holds_for, action in (({"commit": "new"}, "open"), ({"commit": "old"}, "forget")):
        progress = Progress(tmp_path, {"commit": "old"})
        file = tmp_path / "collectives" / "2-ranks" / "findings.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text('{"size": "1 MiB"}\n')
        assert list(progress.with_stopped()) == ["collectives/2-ranks"]
        progress.close()
        again = Progress(tmp_path, holds_for)
        if action == "forget":
            again.forget("collectives")
        assert again.with_stopped() == {}
        again.close()
