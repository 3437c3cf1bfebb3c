"""``python -m spec_tools.gpu`` on CPUs: the whole command, jobs that fail, runs that are cut off, and each stage."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minifsdp_tools.simulate.machine import measured_costs
from spec_tests.harness import pool, ranks
from spec_tests.waiting import comes_true
from spec_tools.gpu import __main__ as command
from spec_tools.gpu import collectives, process, races, report, stages, steps
from spec_tools.gpu.process import ROOT, Job

FUTURE = "ignore:.*is deprecated. Please use:FutureWarning"  # torch 2.13 has newer names for its collectives


def python(name: str, program: str, *arguments: object, limit: float = 120.0) -> Job:
    return Job(name, [sys.executable, "-c", program, *map(str, arguments)], limit)


def use_jobs(patch: pytest.MonkeyPatch, *jobs: Job) -> None:
    """Makes these jobs the only ones; all of them belong to the stage ``suite``."""
    patch.setattr(command, "STAGES", {"suite": stages.Stage("is it so", lambda settings: list(jobs))})


@pytest.mark.pure
@pytest.mark.spec("KIT-02")
def test_files_of_the_quick_suite_exist() -> None:
    missing = [name for name in stages.QUICK_FILES if not (stages.TESTS / name).exists()]
    assert missing == []


# ---- the whole command ----------------------------------------------------------------------------------------------


@pytest.mark.spec("KIT-02", "KIT-06", "KIT-07", "KIT-08", "KIT-09", "KIT-10", "KIT-16", "KIT-22")
def test_all_stages_run_on_the_cpu_and_the_report_has_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "QUICK_FILES", ("prefetch/test_counts.py",))
    monkeypatch.setattr(stages, "NUM_QUICK_SEEDS", 1)
    assert command.main(["--device", "cpu", "--quick"], tmp_path) == 0

    text = (tmp_path / "gpu-report-cpu.md").read_text()
    record = report.read(tmp_path / "gpu-report-cpu.md")
    assert "**Tried on the CPU, with gloo: nothing about a GPU is shown.**" in text
    assert f"torch {torch.__version__}, commit " in text
    assert record["hardware"]["versions"]["torch"] in capsys.readouterr().out
    assert [name.split("/")[0] for name in record["jobs"]] == list(stages.STAGES)
    assert record["not_run"] == []
    assert "| suite | 1 | 0 | 0 |" in text

    compared = {test.partition("[")[2] for test in report.tests(record)}
    assert {"mlp-wrapped-FULL_SHARD]", "mlp-fully_shard-HYBRID_SHARD]", "mlp-originals-NO_SHARD-adamw]"} <= compared
    measured = list(report.findings(record, "collectives"))
    assert {one["collective"] for one in measured} == set(collectives.COLLECTIVES)
    assert all(one["us"] > 0 and one["shared"] for one in measured)
    assert "no time of a collective has a meaning" in text
    trained = list(report.findings(record, "steps"))
    assert [one["contender"] for one in trained] == list(steps.CONTENDERS)
    assert all(one["ms"] >= one["host ms"] > 0 for one in trained)
    raced = list(report.findings(record, "races"))
    assert [one["configuration"] for one in raced] == ["wrapper", "function, hybrid"]
    assert {one["configuration"] for one in raced} < set(races.CONFIGURATIONS)


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


# ---- jobs that do not pass ------------------------------------------------------------------------------------------

# A rank has a session of its own, like the workers of torchrun.
HANGS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
def wait_for_the_ranks(): time.sleep(600)
wait_for_the_ranks()
"""
CRASHES = """
import os, signal, pytest

@pytest.mark.spec("CTOR-01")
def test_before(): pass

def test_that_crashes(): os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.spec("KIT-03", "KIT-04", "KIT-07", "KIT-23")
def test_jobs_that_fail_hang_and_crash_are_reported_and_the_rest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-7")
    (tmp_path / "test_it.py").write_text(CRASHES)
    crashes = stages._file(stages.Settings("cpu"), "suite", stages.TESTS / "test_it.py")
    options = ["-p", "conftest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    words = [str(tmp_path / "test_it.py") if word.endswith("test_it.py") else word for word in crashes.command]
    use_jobs(
        monkeypatch,
        python("suite/fails", f"raise ValueError('no value in {ROOT}/x on gpu-box-7')"),
        python("suite/hangs", HANGS, limit=5.0),
        Job(crashes.name, [*words, *options], crashes.limit),
        python("suite/passes", ""),
    )
    assert command.main(["--device", "cpu"], tmp_path) == 1

    record, text = report.read(tmp_path / "gpu-report-cpu.json"), (tmp_path / "gpu-report-cpu.md").read_text()
    assert [(job["word"], job["reason"]) for job in record["jobs"].values()] == [
        ("failed", "ValueError: no value in ./x on <host>"),
        ("hung", "did not end within 5 s"),
        ("crashed", "ended by SIGSEGV; it was in test_it.py::test_that_crashes"),
        ("passed", ""),
    ]
    assert "in wait_for_the_ranks" in record["jobs"]["suite/hangs"]["last_lines"]
    assert process.processes_of(tmp_path / "gpu" / "cpu") == []
    assert [(test["outcome"], test["rows"]) for test in report.tests(record).values()] == [("passed", ["CTOR-01"])]
    assert "| suite | 1 | 3 | 0 |" in text
    assert "## suite/hangs: hung\n\ndid not end within 5 s\n\n" in text
    assert str(ROOT) not in text
    assert "gpu-box-7" not in text


@pytest.mark.spec("KIT-27")
def test_run_ends_with_its_time_and_lists_what_did_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_jobs(
        monkeypatch, python("suite/a", ""), python("suite/b", "import time; time.sleep(600)"), python("suite/c", "")
    )
    monkeypatch.setattr(command, "SHORTEST", 0.0)
    assert command.main(["--device", "cpu", "--minutes", "0.1"], tmp_path) == 1
    record = report.read(tmp_path / "gpu-report-cpu.json")
    assert [job["word"] for job in record["jobs"].values()] == ["passed", "stopped"]
    assert record["not_run"] == ["suite/c"]


# ---- a run that is cut off ------------------------------------------------------------------------------------------

# Records its name. "b" leaves a finding, and sleeps in its first run.
DIARIST = """
import os, sys, time
from pathlib import Path
name, folder = sys.argv[1], Path(sys.argv[2])
with (folder / "diary").open("a") as file: file.write(name)
with open(os.environ["MINIFSDP_GPU_FINDINGS"], "a") as file: file.write('{"line": "found"}\\n')
if name == "b" and not (folder / "first").exists():
    (folder / "first").touch()
    time.sleep(600)
"""


def run_three_jobs(folder: Path) -> None:
    # A shell starts background processes with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        use_jobs(patch, *(python(f"suite/{name}", DIARIST, name, folder) for name in "abc"))
        sys.exit(command.main(["--device", "cpu"], folder))


@pytest.mark.spec("KIT-05", "KIT-24")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_same_command_continues_a_run_that_was_cut_off(number: signal.Signals, tmp_path: Path) -> None:
    first, second = (pool.fork_server().Process(target=run_three_jobs, args=(tmp_path,)) for _ in range(2))
    first.start()
    assert comes_true(lambda: (tmp_path / "first").exists(), 120)
    os.kill(first.pid, number)
    first.join(120)
    jobs = report.read(tmp_path / "gpu-report-cpu.json")["jobs"]
    assert jobs["suite/a"]["word"] == "passed"
    if number != signal.SIGKILL:
        assert jobs["suite/b"]["word"] == "stopped"
        assert jobs["suite/b"]["findings"] == [{"line": "found"}]
    second.start()
    second.join(120)
    assert second.exitcode == 0
    assert (tmp_path / "diary").read_text() == "abbc"
    assert process.processes_of(tmp_path / "gpu" / "cpu") == []


@pytest.mark.spec("KIT-05")
@pytest.mark.pure
def test_outcomes_of_another_commit_are_not_used(tmp_path: Path) -> None:
    about = report.circumstances("cpu", 1, False)
    outcomes = {"suite/a": process.Outcome("passed", 1.0)}
    report.write(report.compose(about, outcomes, []), tmp_path / "report.json")
    assert report.earlier_outcomes(tmp_path / "report.json", about) == outcomes
    assert report.earlier_outcomes(tmp_path / "report.json", {**about, "commit": "another"}) == {}


# ---- stages ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("KIT-02")
@pytest.mark.pure
def test_number_of_ranks_follows_the_number_of_devices() -> None:
    def names(num_devices: int) -> list[str]:
        return [job.name for job in stages.STAGES["collectives"].jobs(stages.Settings("cuda", num_devices))]

    assert names(1) == ["collectives/2"]
    assert names(8) == ["collectives/2", "collectives/4", "collectives/8"]


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
def test_simulator_reads_the_times_of_collectives_from_the_report(tmp_path: Path) -> None:
    points = {1_000: 10.0, 1_000_000: 50.0, 4_000_000: 100.0}
    row = {"collective": "all-gather", "ranks": 8, "shared": False}
    measured = [{**row, "bytes": size, "us": us, "busbw": 0.0} for size, us in points.items()]
    outcome = process.Outcome("passed", 1.0, findings=measured)
    path = tmp_path / "gpu-report.json"
    report.write(report.compose(report.circumstances("cuda", 8, False), {"collectives/8": outcome}, []), path)
    ((latency, rate),) = measured_costs(path).values()
    assert latency == pytest.approx(10e-6)
    assert rate == pytest.approx(4_000_000 / 100e-6)


@pytest.mark.spec("KIT-09", "KIT-19")
@pytest.mark.pure
@pytest.mark.parametrize(
    ("fails", "failed"),
    [
        ((), ["minifsdp fully_shard"]),
        (("minifsdp FullyShardedDataParallel",), ["minifsdp FullyShardedDataParallel", "minifsdp fully_shard"]),
        (("torch FullyShardedDataParallel", "minifsdp FullyShardedDataParallel"), ["minifsdp fully_shard"]),
    ],
)
def test_step_fails_with_a_wrong_loss_and_if_only_minifsdp_lacks_memory(
    fails: tuple[str, ...], failed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: Any, contender: str, **__: Any) -> list[Any]:
        if contender in fails:
            raise pool.Failure("E   torch.OutOfMemoryError: CUDA out of memory")
        return [{"losses": [9.0, 8.0 if contender == "minifsdp fully_shard" else 7.0]}]

    monkeypatch.setattr(steps, "on_ranks", train)
    found = {one["contender"]: one for one in steps.work(2, ["tiny"])}
    assert [name for name, one in found.items() if "text" in one] == failed
    assert all(found[name]["result"] == "torch.OutOfMemoryError: CUDA out of memory" for name in fails)
    assert "losses [9.0, 8.0], expected [9.0, 7.0]" in found["minifsdp fully_shard"]["text"]


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
