"""Tests of the kit for GPU machines without a GPU: its chunks, progress and report, and whether it detects errors."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from spec_tests.harness import device, pool, ranks
from spec_tests.harness.programs import run_module
from spec_tests.waiting import comes_true
from spec_tools.benchmarks.report import Quartiles
from spec_tools.gpu import __main__ as kit
from spec_tools.gpu import chunks, collectives, races, report, smoke, stages
from spec_tools.gpu.__main__ import Kit, main
from spec_tools.gpu.chunks import ROOT, Chunk, Outcome, run_chunk
from spec_tools.gpu.platforms import CPU, CUDA, SIMULATED, Platform
from spec_tools.gpu.progress import InUse, Progress
from spec_tools.gpu.stages import Settings
from spec_tools.tests.kit_stages import kit_in, python, stage
from spec_tools.tests.test_session import is_running


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Kit]:
    """A kit with its files in the test's own folder."""
    with kit_in(tmp_path) as made:
        yield made


# ---- devices and stages ---------------------------------------------------------------------------------------------


@pytest.mark.spec("KIT-01")
def test_kit_without_gpu_prints_message_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([], tmp_path) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("There is no GPU here that torch ")
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spec("KIT-02", "KIT-08")
def test_cpu_report_begins_with_missing_gpu(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--stages", "hardware"], tmp_path) == 0
    path = tmp_path / "gpu-report-cpu.md"
    text, found = path.read_text(), report.read(path)
    assert text.split("\n\n")[1] == "**Tried on the CPU, with gloo: nothing about a GPU is shown.**"
    assert list(found["chunks"]) == ["hardware/all"]
    assert found["hardware"]["versions"]["torch"] == torch.__version__
    assert "| smoke | not run |" in text


@pytest.mark.spec("KIT-02")
@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")  # torch 2.13 has newer names for them
@ranks(2)
def test_three_collectives_are_checked_for_wrong_elements() -> None:
    assert collectives.send() == str(device())
    with pytest.raises(AssertionError, match=r"all-gather on \w+: element 1 is 5\.0, not 2\.0"):
        collectives.check("all-gather", torch.tensor([1.0, 5.0]), torch.tensor([1.0, 2.0]))


@pytest.mark.spec("KIT-02")
@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")
@pytest.mark.parametrize("size", [1, 2, 4])
@ranks(4)
def test_collectives_are_checked_in_groups_of_each_size(size: int) -> None:
    rank, all_reduce = dist.get_rank(), dist.all_reduce

    def sum_wrongly(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        all_reduce(tensor, group=group)
        tensor += group.size() == size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", sum_wrongly)
        members = [other for other in range(4) if other // size == rank // size]
        with pytest.raises(AssertionError, match=re.escape(f"all-reduce between ranks {members} on")):
            collectives.send()


@pytest.mark.spec("KIT-02")
def test_sizes_grow_with_the_devices_and_hybrids_always_have_four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_devices, sizes in ((1, [2]), (3, [2]), (4, [2, 4]), (8, [2, 4, 8])):
        monkeypatch.setattr(Platform, "num_devices", lambda self, num=num_devices: num)
        assert CUDA.world_sizes() == sizes
        names = [chunk.name for chunk in stages._races(Settings(CUDA, Path()))]
        assert len(set(names)) == len(names)
        assert "races/4-ranks/function, hybrid" in names
        assert {name.split("/")[1] for name in names} == {f"{size}-ranks" for size in (*sizes, 4)}


@pytest.mark.spec("KIT-02")
@pytest.mark.parametrize("api", smoke.APIS)
@ranks(2)
def test_smoke_test_of_each_api_matches_single_process(api: str) -> None:
    assert smoke.compare(api) < 1e-5


# How the package is broken: the file, the original text, the replacement, and the reported failure.
BREAKS = {
    "raises": (
        "collectives.py",
        '    """All-gather: ',
        '    raise RuntimeError("broken on purpose")\n    """All-gather: ',
        "RuntimeError: broken on purpose",
    ),
    "computes wrongly": (
        "collectives.py",
        "            local_shard.div_(self.after)",
        "            pass",
        "that of a single process",
    ),
}


def run_by_a_copy(chunk: Chunk, folder: Path) -> Outcome:
    """Like `run_chunk`, but runs the command in a fork of a process that has imported torch."""
    folder.mkdir()
    findings, log = folder / "findings.jsonl", folder / "log.txt"
    environment = {**os.environ, **chunk.environment, chunks.FINDINGS: str(findings)}
    _, _, module, *arguments = chunk.command
    done = run_module(module, *arguments, folder=folder, environment=environment)
    log.write_text(done.stdout + done.stderr)
    return chunks._outcome(done.returncode, False, 0.0, chunk, log, findings)


@pytest.mark.spec("KIT-02")
@pytest.mark.parametrize("how", BREAKS)
def test_smoke_stage_detects_a_broken_engine_and_shows_its_first_exception(how: str, tmp_path: Path) -> None:
    file, right, wrong, stated = BREAKS[how]
    package = shutil.copytree(ROOT / "minifsdp", tmp_path / "minifsdp")
    text = (package / "engine" / file).read_text()
    assert text.count(right) == 1
    (package / "engine" / file).write_text(text.replace(right, wrong))
    (chunk,) = [one for one in stages._smoke(Settings(CPU, tmp_path)) if one.name == "smoke/2-ranks"]
    # Otherwise the working directory would come first in `sys.path`.
    path = {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    # One test with the real command is enough.
    run_it = run_chunk if how == "raises" else run_by_a_copy
    outcome = run_it(replace(chunk, environment=path), tmp_path / "run")
    assert outcome.word == "failed"
    assert stated in outcome.reason
    assert [finding["outcome"] for finding in outcome.findings] == ["failed", "failed"]


@pytest.mark.spec("KIT-02")
def test_only_a_failed_vital_stage_stops_the_later_stages(run: Kit) -> None:
    bad = [python(f"{name}/x", "raise SystemExit(3)") for name in ("suite", "smoke")]
    good = stage("races", python("races/x", ""))
    assert run.run([stage("suite", bad[0]), stage("smoke", bad[1], is_vital=True), good]) == 1
    assert [outcome.word for outcome in run.progress.outcomes.values()] == ["failed", "failed"]
    assert run.run([stage("suite", bad[0]), good]) == 1
    assert list(run.progress.outcomes) == ["suite/x", "smoke/x", "races/x"]


# ---- chunks that fail -----------------------------------------------------------------------------------------------

# A rank writes to the output file of the pool, and has its own session, like the workers of torchrun.
RANK = """
import faulthandler, os, sys, time
folder = os.environ["TMPDIR"] + "/ranks-x"
os.mkdir(folder)
faulthandler.enable(open(folder + "/output-0", "w"))
def wait_for_the_other_rank(): time.sleep(600)
open(sys.argv[1], "w").write(str(os.getpid()))
wait_for_the_other_rank()
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGABRT, signal.SIG_IGN); time.sleep(600)"
HANGING = """
import subprocess, sys, time
for program in sys.argv[1:3]:
    subprocess.Popen([sys.executable, "-c", program, sys.argv[3]], start_new_session=True)
def wait_for_the_ranks(): time.sleep(600)
wait_for_the_ranks()
"""


@pytest.mark.spec("KIT-03")
def test_hanging_chunk_is_killed_with_its_children_and_leaves_stack_traces(
    run: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "PATIENCE", 2.0)  # the process that ignores the signal uses all of it
    hanging = Chunk(
        "suite/hangs", [sys.executable, "-c", HANGING, RANK, STUBBORN, str(tmp_path / "started")], limit=3.0
    )
    begin = time.monotonic()
    assert run.run([stage("suite", hanging, python("suite/next", "")), stage("races", python("races/x", ""))]) == 1
    assert time.monotonic() - begin < 60
    outcomes = run.progress.outcomes
    assert [outcome.word for outcome in outcomes.values()] == ["hung", "passed", "passed"]
    assert outcomes["suite/hangs"].reason == "did not end within 3 s"
    log = outcomes["suite/hangs"].last_lines
    assert "in wait_for_the_other_rank" in log
    assert "in wait_for_the_ranks" in log
    assert "in wait_for_the_ranks" in (tmp_path / "report.md").read_text()
    assert chunks.processes_of(tmp_path / "run") == []
    assert not is_running(int((tmp_path / "started").read_text()))


CRASHING = """
import os, signal, pytest

@pytest.mark.spec("CTOR-01")
def test_before(): pass

@pytest.mark.spec("CTOR-02")
def test_that_crashes(): os.kill(os.getpid(), signal.SIGSEGV)

def test_after(): pass
"""


@pytest.mark.spec("KIT-04")
def test_crash_record_names_the_crashed_test_and_keeps_earlier_results(run: Kit, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(CRASHING)
    options = [
        "-p",
        "conftest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(tmp_path),
    ]
    crashing = stages.pytest_chunk("suite/crashes", tmp_path / "test_it.py", run.settings, *options)
    assert run.run([stage("suite", crashing, python("suite/next", ""))]) == 1
    outcome = run.progress.outcomes["suite/crashes"]
    assert (outcome.word, outcome.reason) == ("crashed", "ended by SIGSEGV; it was in test_it.py::test_that_crashes")
    assert run.progress.outcomes["suite/next"].word == "passed"
    found = report.read(tmp_path / "report.md")
    assert found["rows"] == {"proven": ["CTOR-01"], "failed": []}
    assert found["tests"] == {"passed": 1, "failed": 0, "skipped": 0}


# ---- resuming -------------------------------------------------------------------------------------------------------

# Records its name. "b" sleeps in its first run. In its second run it checks whether its first process still exists.
DIARIST = """
import os, sys, time
from pathlib import Path
name, diary = sys.argv[1], Path(sys.argv[2], "diary")
with diary.open("a") as file: file.write(name + " ")
first = Path(sys.argv[2], "first")
if name == "b" and not first.exists():
    first.write_text(str(os.getpid()))
    time.sleep(600)
if name == "b":
    try: environ = Path("/proc", first.read_text(), "environ").read_bytes()
    except OSError: environ = b""
    Path(sys.argv[2], "left").write_text(str(environ != b""))
"""


def run_in_a_session_of_its_own(folder: Path) -> None:
    """Runs ``python -m spec_tools.gpu --device cpu`` with three chunks; its output goes to a file."""
    os.setsid()
    output = os.open(folder / "said", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(output, 1)
    # A shell starts background processes with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    made = [Chunk(f"suite/{name}", [sys.executable, "-c", DIARIST, name, str(folder)], 60) for name in "abc"]
    kit.STAGES = (stage("suite", *made),)
    sys.exit(main(["--device", "cpu"], folder))


@pytest.mark.spec("KIT-05")
@pytest.mark.parametrize("word", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_same_command_resumes_stopped_run(word: signal.Signals, tmp_path: Path) -> None:
    # Forks of a process that has imported torch: this saves five seconds twice.
    first, second = (pool.fork_server().Process(target=run_in_a_session_of_its_own, args=(tmp_path,)) for _ in range(2))
    first.start()
    assert comes_true(lambda: (tmp_path / "first").exists(), 60)
    os.kill(first.pid, word)
    first.join(60)
    left = chunks.processes_of(tmp_path / "gpu" / "cpu")
    if word == signal.SIGKILL:
        assert len(left) == 1
    else:
        assert (first.exitcode, left) == (130, [])
        assert (tmp_path / "said").read_text().endswith("Stopped. The same command continues from here.\n")
    assert "**not complete**: 2 chunks" in (tmp_path / "gpu-report-cpu.md").read_text()
    second.start()
    second.join(120)
    assert second.exitcode == 0
    assert "chunks done already: 1;" in (tmp_path / "said").read_text()
    assert (tmp_path / "diary").read_text().split() == ["a", "b", "b", "c"]
    assert (tmp_path / "left").read_text() == "False"
    assert chunks.processes_of(tmp_path / "gpu" / "cpu") == []


@pytest.mark.spec("KIT-05")
def test_finished_chunk_reruns_on_request_or_code_change(run: Kit, tmp_path: Path) -> None:
    once = stage("suite", python("suite/x", f"open({str(tmp_path / 'times')!r}, 'a').write('x')"))
    for fresh, times in ((False, 1), (False, 1), (True, 2)):
        run.run([once], fresh)
        assert (tmp_path / "times").read_text() == times * "x"
    run.progress.close()
    for holds_for, done in (({}, ["suite/x"]), ({"commit": "another"}, [])):
        again = Progress(tmp_path / "run", holds_for)
        assert list(again.outcomes) == done
        again.close()


@pytest.mark.spec("KIT-05")
def test_two_kits_do_not_share_a_folder(tmp_path: Path) -> None:
    first = Progress(tmp_path, {})
    with pytest.raises(InUse, match="let it end first"):
        Progress(tmp_path, {})
    first.close()
    Progress(tmp_path, {}).close()


# ---- the race hunt --------------------------------------------------------------------------------------------------


class Clock(Platform):
    """A platform on which a delay changes results: the model below reads the time."""

    now = 0.0

    def sleep(self, milliseconds: float) -> None:
        Clock.now += milliseconds


class ReadsTheTime(nn.Linear):
    """Its results depend on which stream was late, as with an engine that omits a wait."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + Clock.now


@pytest.mark.spec("KIT-06")
@ranks(2)
def test_race_hunt_reports_the_first_step_and_name_that_a_delay_changes() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(races, "find", lambda name: Clock("cpu", "cpu", "gloo"))
        patch.setitem(races.CONFIGURATIONS, "broken", lambda model: ReadsTheTime(races.WIDTH, 4))
        again, *seeds = races.hunt("cpu", "broken", 3)
    assert again == {"outcome": "passed", "delays": 0}
    # On the CPU everything is issued on one stream, the compute stream, so in the first seed nothing is late.
    assert [(one["outcome"], one["delays"] > 0) for one in seeds] == [("passed", False)] + 2 * [("failed", True)]
    assert "compute stream late: step " in seeds[1]["text"]
    assert "all streams late: step 0, loss: " in seeds[2]["text"]


@pytest.mark.spec("KIT-06")
@pytest.mark.parametrize("configuration", ["wrapper, bfloat16", "wrapper, accumulation", "function, hybrid, offload"])
@ranks(4)
def test_race_hunt_finds_no_difference_for_harmless_delays(configuration: str) -> None:
    findings = races.hunt("cpu", configuration, 2)
    assert [finding["outcome"] for finding in findings] == 3 * ["passed"]
    assert findings[2]["delays"] > 50


class Streams(Platform):
    """Tracks the current stream and the delayed streams."""

    current, late = "compute", set[str]()

    def current_stream(self) -> str:
        return Streams.current

    def sleep(self, milliseconds: float) -> None:
        self.late.add(Streams.current)


@pytest.mark.spec("KIT-06")
def test_seeds_delay_the_communication_streams_the_compute_stream_or_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed, late in enumerate([{"gather"}, {"compute"}, {"gather", "compute"}]):
        monkeypatch.setattr(Streams, "current", "compute")
        monkeypatch.setattr(Streams, "late", set())
        with races.Delays(Streams("streams", "cpu", "gloo"), seed, 0):
            for stream in ["compute", "gather"] * 50:
                monkeypatch.setattr(Streams, "current", stream)
                torch.ones(1).add_(1)
        assert Streams.late == late


@pytest.mark.spec("KIT-06")
def test_only_a_real_stream_is_kept_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    for platform in (CUDA, CPU, SIMULATED):
        platform.sleep(0.5)
    assert cycles == [750_000]


@pytest.mark.spec("KIT-06")
def test_first_difference_names_step_and_treats_nan_as_equal() -> None:
    steps = [{"loss": torch.tensor([1.0]), "weight": torch.tensor([1.0, float("nan")])} for _ in range(2)]
    other = [steps[0], {"loss": torch.tensor([1.0]), "weight": torch.tensor([1.5, float("nan")])}]
    assert races.first_difference(steps, steps) == ""
    assert races.first_difference(steps, other) == "step 1, weight: 1 of 8 bytes differ"


@pytest.mark.spec("KIT-06")
def test_nondeterministic_reference_hides_other_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {"outcome": "failed", "delays": 0, "text": "rank 1, no delays: the kernels are not deterministic"}
    good = {"outcome": "passed", "delays": 5}
    monkeypatch.setattr(races, "on_ranks", lambda *_, **__: [[good, bad], [bad, bad]])
    (finding,) = races.work(CPU, "function", num_ranks=2, num_seeds=1, hang_limit=1.0)
    assert finding["text"].startswith("function, 2 ranks, seed -1, rank 1, no delays: the kernels are not")


# ---- the report -----------------------------------------------------------------------------------------------------


def a_report() -> dict[str, Any]:
    good = {"test": "a.py::test_a", "rows": ["CTOR-01", "CTOR-02"], "outcome": "passed"}
    bad = {"test": "a.py::test_b", "rows": ["CTOR-02"], "outcome": "failed"}
    ratio = asdict(Quartiles(low=0.7, median=0.8, high=0.9))
    measured = {"workload": "tiny", "contender": "ours", "best_torch": "torch FSDP1", "ratio_to_best_torch": ratio}
    raced = {"configuration": "function", "ranks": 2, "delays": 7}
    same = {**raced, "seed": -1, "outcome": "passed"}
    different = {**raced, "seed": 0, "outcome": "failed", "text": "function, 2 ranks, seed 0: step 1, weight"}
    outcomes = {
        "suite/a.py": Outcome("failed", 2.0, "ValueError: no", "the log\n```\nof it", [good, bad]),
        "benchmarks/all": Outcome("passed", 60.0, findings=[{"test": "c", "outcome": "passed", "measured": measured}]),
        "races/2-ranks/function": Outcome("failed", 1.0, findings=[same, different]),
    }
    return report.compose(CUDA, outcomes, ["suite"], 4)


@pytest.mark.spec("KIT-07")
def test_written_report_is_readable_and_can_be_loaded(tmp_path: Path) -> None:
    written, path = a_report(), tmp_path / "deep" / "report.md"
    report.write(written, path)
    assert report.read(path) == written
    assert written["rows"] == {"proven": ["CTOR-01"], "failed": ["CTOR-02"]}
    text = path.read_text()
    assert "nothing about a GPU" not in text
    assert "**not complete**: 4 chunks were not run" in text
    assert "| tiny | ours | 0.800 (0.700 to 0.900) | torch FSDP1 |" in text
    assert "| function | 2 | 1 | 7 | function, 2 ranks, seed 0: step 1, weight |" in text
    assert "### suite/a.py: failed\n\nValueError: no\n\n    the log\n    ```\n    of it" in text


@pytest.mark.spec("KIT-07")
def test_invalid_or_newer_report_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "it.md"
    path.write_text("# Something else\n")
    with pytest.raises(ValueError, match="is not a report"):
        report.read(path)
    report.write(a_report() | {"format": 99}, path)
    with pytest.raises(ValueError, match="format 99"):
        report.read(path)


@pytest.mark.spec("KIT-07")
def test_report_contains_no_folder_of_the_user(tmp_path: Path) -> None:
    program = f"print({str(ROOT / 'minifsdp')!r}, {str(Path.home() / 'x')!r}); raise ValueError({str(ROOT / 'a.py')!r})"
    outcome = run_chunk(python("suite/x", program), tmp_path)
    assert outcome.last_lines.splitlines()[0] == "./minifsdp ~/x"
    assert outcome.reason == "ValueError: ./a.py"
    assert str(Path.home()) not in json.dumps(outcome.as_json())
