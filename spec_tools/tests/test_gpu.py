"""``python -m spec_tools.gpu`` on CPUs: its order, the whole command, tests that crash, and runs that are killed."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minifsdp_tools.simulate.machine import measured_costs
from spec_tests.harness import pool, ranks
from spec_tests.waiting import comes_true
from spec_tools.gpu import __main__ as command
from spec_tools.gpu import collectives, journal, plan, process, races, report, stages, steps, suite
from spec_tools.gpu.code import ROOT
from spec_tools.gpu.cover import Case, in_order, in_time

FUTURE = "ignore:.*is deprecated. Please use:FutureWarning"  # torch 2.13 has newer names for its collectives
COMMAND = [sys.executable, "-m", "spec_tools.gpu", "--device", "cpu"]


def run_kit(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Runs the command on the CPU; returns its exit status and the record."""
    status = subprocess.run([*COMMAND, "--folder", str(folder), *options], cwd=ROOT, check=False).returncode
    return status, report.read(folder / "gpu-report-cpu.json")


# ---- the order ------------------------------------------------------------------------------------------------------


@pytest.mark.pure
@pytest.mark.spec("KIT-28")
def test_order_begins_with_tests_of_gpus_then_streams_then_the_rest_and_at_last_older_ones() -> None:
    on_gpu = Case("on_gpu", ("LEDGER-01",), is_for_gpus=True)
    cuda, stream = Case("cuda", ("MP-01",), 2), Case("stream", ("STREAM-01",), 2)
    both, one = Case("both", ("CTOR-01", "CTOR-02"), 4), Case("one", ("CTOR-01",), 1)
    known, on_cpu = Case("known", ("CTOR-03",), 2), Case("on_cpu", ("CTOR-04",))
    cases = [one, both, known, on_cpu, stream, cuda, on_gpu]
    chosen, others = in_order(cases, proven={"CTOR-03"}, older={"CTOR-03"}, of_cuda={"MP-01"})
    assert chosen == [on_gpu, cuda, stream, both, known]
    assert others == [one, on_cpu]


@pytest.mark.pure
@pytest.mark.spec("KIT-28")
def test_few_ranks_come_first_among_tests_that_show_the_same() -> None:
    four, two, one = (Case(f"{number} ranks", ("CTOR-01",), number) for number in (4, 2, 1))
    assert in_order([four, one, two], set(), set(), set())[0] == [one]


@pytest.mark.pure
@pytest.mark.spec("KIT-27")
def test_test_that_takes_too_long_is_left_out_and_a_shorter_one_runs() -> None:
    cases = [Case("a", seconds=2.0), Case("b", seconds=9.0), Case("c", seconds=3.0), Case("d", seconds=3.0)]
    now = 0.0
    ran = []
    for case in in_time(cases, 6.0, lambda: now):
        now += case.seconds
        ran.append(case.name)
    assert ran == ["a", "c"]


@pytest.mark.pure
@pytest.mark.spec("KIT-27")
def test_stage_gets_its_part_of_the_time_and_all_stages_continue_at_the_end() -> None:
    limits = stages.limits(list(stages.STAGES), begin=100.0, end=820.0)
    first, again = limits[:7], limits[7:]
    # 0.5, 0.25, 0.25, 1, 6, 2 and 1 twelfths of 720 seconds. Variants run when the others have continued.
    assert [until - 100.0 for _, until in first] == [30, 45, 60, 120, 480, 600, 660]
    assert again == [(name, 820.0) for name in stages.STAGES]


@pytest.fixture(scope="module")
def cases() -> dict[str, list[Case]]:
    """The tests that a run on one GPU collects."""
    return plan.cases_of("cuda", ["spec_tests"])


@pytest.mark.pure
@pytest.mark.spec("KIT-28", "KIT-29", "KIT-32")
def test_plan_for_twelve_minutes_shows_each_requirement_once_until_all_are_shown(cases: dict[str, list[Case]]) -> None:
    planned, spent = plan.plan_for(cases, list(stages.STAGES), 720.0, {"runs": [], "rows": {}})
    assert sum(spent.values()) <= 720
    first = [case for stage in ("smoke", "unexplained") for case in cases[stage] if case.uses_device]
    shown = {row for case in first for row in case.rows}
    for case in cases["requirements"]:
        assert not shown.issuperset(case.rows), f"{case.name} shows nothing new"
        shown.update(case.rows)
    every = {row for some in cases.values() for case in some if case.uses_device for row in case.rows}
    assert {row for row in every if not row.startswith("KIT-")} <= shown
    # Nothing else is left out for other variants.
    assert {stage for stage in planned if len(planned[stage]) < len(cases[stage])} == {"variants"}
    # Tests of all files that are named as unexplained.
    assert {case.name.partition("::")[0] for case in cases["unexplained"]} == set(suite.UNEXPLAINED)


@pytest.mark.pure
@pytest.mark.spec("KIT-33")
def test_each_risk_that_needs_a_gpu_names_a_test_of_this_run(cases: dict[str, list[Case]]) -> None:
    names = [case.name for some in cases.values() for case in some]
    # Tests that need several GPUs are no part of a plan for one.
    files = (path for path in (ROOT / "spec_tests").rglob("test_*.py") if "mark.own_gpus" in path.read_text())
    names += [str(path.relative_to(ROOT)) for path in files]
    text = (ROOT / "docs" / "tools" / "gpu-risks.md").read_text()
    open_part, _, rest = text.partition("## The first hour")[0].partition("## Wrong numbers")
    # In the first table, the last cell names the test; in the others, it follows the word "kit".
    tested = re.findall(r"^\| .* GPUs? \| (.*) \|$", open_part, re.MULTILINE)
    tested += re.findall(r"\bkit\b([^|]*) \|$", rest, re.MULTILINE)
    assert len(tested) >= 16
    for words in tested:
        found = [f"spec_tests/{file}" for file in re.findall(r"`([\w/]+\.py)`", words)]
        named = re.findall(r"stage `(\w+)`", words)
        assert found or named, words
        assert all(any(name.startswith(file) for name in names) for file in found), words
        assert all(cases[stage] for stage in named), words


# ---- the whole command ----------------------------------------------------------------------------------------------


@pytest.mark.spec(*("KIT-02", "KIT-06", "KIT-07", "KIT-08", "KIT-09", "KIT-10", "KIT-16", "KIT-22", "KIT-30", "KIT-31"))
def test_all_stages_run_on_the_cpu_and_the_report_has_their_figures(tmp_path: Path) -> None:
    tests = ["spec_tests/prefetch/test_counts.py", "spec_tests/parity/test_parity.py"]
    chosen = [stage for stage in stages.STAGES if stage != "variants"]
    status, record = run_kit(tmp_path, "--stages", *chosen, "--tests", *tests)
    assert status == 0

    text = (tmp_path / "gpu-report-cpu.md").read_text()
    assert "**Tried on the CPU, with gloo: nothing about a GPU is shown.**" in text
    assert f"torch {torch.__version__}, commit " in text
    counts = {one["stage"]: (one["passed"], one["not passed"], one["not run"]) for one in report.stages(record)}
    assert counts["hardware"] == (4, 0, 0)
    assert counts["requirements"][0] > 0
    assert {bad for _, bad, _ in counts.values()} == {left for *_, left in counts.values()} == {0}
    assert set(record["start_up"]) == {"process", "import", "context", "1 rank", "2 ranks", "4 ranks"}
    assert {one["evidence"] for one in record["requirements"].values()} == {
        "1 rank, gloo",
        "2 ranks, gloo",
        "4 ranks, gloo",
    }

    compared = {test.partition("[")[2] for test, one in record["results"].items() if one["stage"] == "smoke"}
    assert {"mlp-wrapped-FULL_SHARD]", "mlp-fully_shard-HYBRID_SHARD]", "mlp-originals-NO_SHARD-adamw]"} <= compared
    measured = list(report.table(record["results"], "collectives"))
    assert {one["collective"] for one in measured} == set(collectives.COLLECTIVES)
    assert all(one["us"] > 0 and one["shared"] for one in measured)
    assert "no time of a collective has a meaning" in text
    trained = list(report.table(record["results"], "steps"))
    assert [one["contender"] for one in trained] == [
        f"{package} {api}" for api in steps.APIS for package in steps.PACKAGES
    ]
    assert all(one["ms"] >= one["host ms"] > 0 for one in trained)
    raced = list(report.table(record["results"], "races"))
    assert [one["configuration"] for one in raced] == ["wrapper", "function, hybrid"]


@pytest.mark.spec("KIT-01")
def test_command_without_a_gpu_says_why_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert command.main([], tmp_path) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "There is no GPU here" in said.err
    assert "The NVIDIA driver on your system is too old" in said.err
    assert list(tmp_path.iterdir()) == []


# ---- tests that do not pass, and runs that are killed ---------------------------------------------------------------

CRASHES = """
import os, signal, subprocess, sys, time
import pytest
from spec_tests.harness import ranks

@pytest.mark.spec("CTOR-01")
@ranks(1)
def test_before(): pass

@pytest.mark.spec("CTOR-02")
@pytest.mark.ranks
def test_that_crashes(): os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.spec("CTOR-03")
@pytest.mark.ranks
def test_that_fails(): raise ValueError("no value in {root}/x on gpu-box-7")

@pytest.mark.spec("CTOR-04")
@pytest.mark.ranks
def test_that_hangs():
    # A child with a session of its own, like the workers of torchrun.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    wait_for_the_child()

def wait_for_the_child(): time.sleep(600)

@pytest.mark.spec("CTOR-05")
@pytest.mark.ranks
def test_after(): pass
"""


@pytest.fixture
def crashing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of tests with the options and hooks of this repository."""
    path = tmp_path / "test_it.py"
    path.write_text(CRASHES.replace("{root}", str(ROOT)))
    monkeypatch.setenv("PYTEST_ADDOPTS", f"-c {ROOT / 'pyproject.toml'} --rootdir {ROOT}")
    return path


@pytest.mark.spec("KIT-03", "KIT-04", "KIT-07", "KIT-23", "KIT-30")
def test_run_continues_after_tests_that_crash_and_hang(
    crashing_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-7")
    monkeypatch.setattr(command, "SLOWEST_START", 20.0)
    options = ["--device", "cpu", "--stages", "requirements", "--tests", str(crashing_file), "--limit", "10"]
    assert command.main(options, tmp_path) == 1

    record, text = report.read(tmp_path / "gpu-report-cpu.json"), (tmp_path / "gpu-report-cpu.md").read_text()
    outcomes = {name.rpartition("::")[2]: one["outcome"] for name, one in record["results"].items()}
    assert outcomes == {
        "test_before": "passed",
        "test_that_crashes": "crashed",
        "test_that_fails": "failed",
        "test_that_hangs": "hung",
        "test_after": "passed",
    }
    rows = {row: one["outcome"] for row, one in record["requirements"].items()}
    assert rows == {f"CTOR-0{number}": word for number, word in enumerate(outcomes.values(), 1)}
    assert "in wait_for_the_child" in text
    assert process.processes_of(tmp_path / "gpu" / "cpu") == []
    assert str(ROOT) not in text
    assert "gpu-box-7" not in text


@pytest.mark.spec("KIT-24", "KIT-27")
def test_run_ends_with_its_time_and_a_test_that_was_stopped_has_no_result(
    crashing_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashing_file.write_text(CRASHES.replace("os.kill(os.getpid(), signal.SIGSEGV)", "time.sleep(600)"))
    begin = time.monotonic()
    options = ["--stages", "requirements", "--tests", str(crashing_file), "--minutes", "0.6"]
    status, record = run_kit(tmp_path, *options)
    assert status == 1
    assert time.monotonic() - begin < 60
    assert [name.rpartition("::")[2] for name in record["results"]] in ([], ["test_before"])
    assert next(one["not run"] for one in report.stages(record) if one["stage"] == "requirements") in (4, 0)


MOMENTS = [1, 2, 4, 6, 9, 12, 16, 20, 24, 28]  # lines of the journal after which the command is killed


@pytest.mark.spec("KIT-05", "KIT-07", "KIT-24")
@pytest.mark.in_turn(1)
@pytest.mark.parametrize("num_lines", MOMENTS)
def test_same_command_continues_a_run_that_was_killed(num_lines: int, tmp_path: Path) -> None:
    path = tmp_path / "gpu-journal-cpu.jsonl"
    options = ["--folder", str(tmp_path), "--tests", "spec_tests/prefetch/test_counts.py"]
    options += ["--stages", "hardware", "collectives", "requirements"]
    first = subprocess.Popen([*COMMAND, *options], cwd=ROOT)
    assert comes_true(lambda: path.exists() and path.read_bytes().count(b"\n") >= num_lines, 240)
    first.send_signal(signal.SIGKILL)
    first.wait()
    process.end_processes(tmp_path / "gpu" / "cpu")
    before = path.read_bytes()

    status, record = run_kit(tmp_path, *options[2:])
    assert status == 0
    assert path.read_bytes().startswith(before)
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    results = Counter(line["name"] for line in lines if "outcome" in line)
    assert results == dict.fromkeys(record["results"], 1)
    # Only what was running when the command was killed has started twice.
    starts = Counter(line["name"] for line in lines if "started" in line)
    assert starts.keys() == results.keys()
    assert starts.total() - len(starts) <= 1
    assert process.processes_of(tmp_path / "gpu" / "cpu") == []


@pytest.mark.spec("KIT-05")
@pytest.mark.pure
def test_results_of_other_code_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    monkeypatch.setenv(journal.JOURNAL, str(path))
    journal.open_for(path, {"code": "1"})
    journal.leave({"name": "a", "stage": "smoke", "outcome": "passed"})
    # The machine was switched off in the middle of a line.
    path.write_bytes(path.read_bytes() + b'{"name": "b", "sta')
    journal.open_for(path, {"code": "1"})
    journal.leave({"name": "c", "stage": "smoke", "outcome": "stopped"})
    assert list(journal.read().results) == ["a"]
    journal.open_for(path, {"code": "2"})
    assert journal.read().results == {}


# ---- stages ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("KIT-02")
@pytest.mark.pure
def test_number_of_ranks_follows_the_number_of_devices() -> None:
    assert [stages.sizes(number) for number in (1, 2, 4, 8)] == [[2], [2], [2, 4], [2, 4, 8]]


@pytest.mark.spec("KIT-30")
@pytest.mark.pure
def test_evidence_says_whether_ranks_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.worker, "device_here", torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = [suite.evidence(Case("test", num_ranks=number)) for number in (0, 1, 2, 4)]
    assert found == ["no device", "1 rank, NCCL", "2 GPUs, NCCL", "4 ranks on one GPU, NCCL over sockets"]
    assert suite.evidence(Case("test", is_for_gpus=True)) == "1 process on a GPU"


@pytest.mark.spec("KIT-09")
@pytest.mark.pure
def test_communication_is_exposed_while_nothing_else_runs() -> None:
    communication, computation = [(0.0, 4.0), (3.0, 6.0), (10.0, 12.0)], [(2.0, 5.0), (9.0, 11.0)]
    assert steps.uncovered(communication, []) == 8.0  # 0 to 6, 10 to 12
    assert steps.uncovered(communication, computation) == 4.0  # 0 to 2, 5 to 6, 11 to 12


@pytest.mark.spec("KIT-16")
@pytest.mark.filterwarnings(FUTURE)
@pytest.mark.parametrize("collective", collectives.COLLECTIVES)
@ranks(2)
def test_wrong_value_of_a_collective_is_an_error(collective: str) -> None:
    right = collectives.COLLECTIVES[collective]

    def wrong(written: Tensor, read: Tensor) -> None:
        right(written, read)
        written[3] += 1

    assert len(collectives.measure(collective, 1 << 10)) == collectives.NUM_GROUPS
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(collectives.COLLECTIVES, collective, wrong)
        with pytest.raises(AssertionError, match=f"{collective} of 1024 bytes: 1 wrong values of"):
            collectives.measure(collective, 1 << 10)


@pytest.mark.spec("KIT-18")
@pytest.mark.pure
def test_simulator_reads_the_times_of_collectives_from_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {1_000: 10.0, 1_000_000: 50.0, 4_000_000: 100.0}
    row = {"collective": "all-gather", "ranks": 8, "shared": False}
    measured = [{**row, "bytes": size, "us": us, "busbw": 0.0} for size, us in points.items()]
    monkeypatch.setenv(journal.JOURNAL, str(tmp_path / "journal.jsonl"))
    journal.leave({"about": report.circumstances("cuda", 8)})
    journal.leave({"name": "it", "stage": "collectives", "outcome": "passed", "seconds": 1.0, "table": measured})
    path = tmp_path / "gpu-report.json"
    report.write(path)
    ((latency, rate),) = measured_costs(path).values()
    assert latency == pytest.approx(10e-6)
    assert rate == pytest.approx(4_000_000 / 100e-6)


@pytest.mark.spec("KIT-09", "KIT-19")
@pytest.mark.pure
@pytest.mark.parametrize(
    ("fails", "failed"),
    [
        ((), "losses [9.0, 8.0], expected [9.0, 7.0]"),
        (("minifsdp",), "minifsdp fully_shard:\nE   torch.OutOfMemoryError: CUDA out of memory"),
        (("torch", "minifsdp"), None),
    ],
)
def test_step_fails_with_a_wrong_loss_and_if_only_minifsdp_lacks_memory(
    fails: tuple[str, ...], failed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: Any, package: str, **__: Any) -> list[Any]:
        if package in fails:
            raise pool.Failure("E   torch.OutOfMemoryError: CUDA out of memory")
        return [{"losses": [9.0, 8.0 if package == "minifsdp" else 7.0]}]

    monkeypatch.setattr(steps, "on_ranks", train)
    found = steps.work(2, "tiny", "fully_shard")
    assert failed in found["text"] if failed else "text" not in found
    results = {row["contender"]: row.get("result") for row in found["table"]}
    memory = "torch.OutOfMemoryError: CUDA out of memory"
    assert results == {f"{package} fully_shard": memory if package in fails else None for package in steps.PACKAGES}


class ReadsTheTime(nn.Linear):
    """A model whose output depends on the number of delays so far."""

    num_delays = 0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.num_delays


def is_late(milliseconds: float) -> None:
    ReadsTheTime.num_delays += 1


@pytest.mark.spec("KIT-06")
@ranks(2)
def test_race_hunt_reports_the_first_step_and_name_that_a_delay_changes() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(races, "keep_busy", is_late)
        patch.setitem(races.CONFIGURATIONS, "broken", lambda model: ReadsTheTime(races.WIDTH, 4))
        num_delays, found = races.hunt("broken", 3)
    assert num_delays > 0
    # On the CPU everything is issued on one stream, the compute stream, so in the first seed nothing is late.
    assert found.startswith("seed 1, rank ")
    assert "compute stream late: step " in found


@pytest.mark.spec("KIT-06")
@pytest.mark.filterwarnings(FUTURE)
@pytest.mark.parametrize("configuration", ["wrapper, bfloat16", "function, hybrid"])
@ranks(4)
def test_race_hunt_finds_no_difference_for_harmless_delays(configuration: str) -> None:
    num_delays, found = races.hunt(configuration, 2)
    assert found == ""
    assert num_delays > 50
