"""The control of the GPU kit: its runs, its verdicts, and real runs with a broken package and torch."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from spec_tools.gpu import chunks, control, report, stages
from spec_tools.gpu.__main__ import Kit
from spec_tools.gpu.chunks import ROOT, Chunk, Outcome
from spec_tools.gpu.platforms import CPU
from spec_tools.gpu.progress import Progress
from spec_tools.gpu.stages import STAGES, Settings, Stage

pytestmark = pytest.mark.pure

ODD = "spec_tests/fsdp1/test_shard.py::test_odd_sizes_train_as_in_one_process[ShardingStrategy.SHARD_GRAD_OP-2]"
REFUSAL = "spec_tests/fsdp1/test_ctor.py::test_wrapper_requires_a_module"  # fails with torch on CPUs
BUCKET = "spec_tests/engine/test_bucket.py::test_the_environment_variable_leaves_large_parameters_to_gloo"


def failed(*tests: str, word: str = "failed", reason: str = "E", last_lines: str = "") -> Outcome:
    findings = [{"test": test, "outcome": "failed", "rows": [], "text": ""} for test in tests]
    return Outcome(word, 1.0, reason, last_lines, findings)


def passed(*tests: str) -> Outcome:
    return Outcome("passed", 1.0, findings=[{"test": test, "outcome": "passed", "rows": []} for test in tests])


def settings_after(folder: Path, outcomes: dict[str, Outcome], **options: Any) -> Settings:
    """Settings of a run in ``folder`` with these outcomes."""
    progress = Progress(folder, {})
    for name, outcome in outcomes.items():
        progress.note(name, outcome)
    progress.close()
    return Settings(CPU, folder, **options)


# ---- which runs -----------------------------------------------------------------------------------------------------


@pytest.mark.spec("KIT-20")
def test_control_has_no_chunks_without_a_failure(tmp_path: Path) -> None:
    assert control.control_chunks(settings_after(tmp_path, {"suite/a.py": passed("a.py::t")})) == []


@pytest.mark.spec("KIT-20")
def test_first_variants_of_all_tests_are_run_before_other_variants_and_their_number_is_limited(tmp_path: Path) -> None:
    outcomes = {
        "suite/a.py": failed("a.py::t[1]", "a.py::t[2]", "a.py::t[3]", "a.py::u"),
        "suite/b.py": failed("b.py::t"),
    }
    assert control.failures(outcomes) == ["a.py::t[1]", "a.py::u", "b.py::t", "a.py::t[2]", "a.py::t[3]"]
    found = control.control_chunks(settings_after(tmp_path, outcomes, num_again=3, limit=900.0))
    tests = ["a.py::t[1]", "a.py::u", "b.py::t"]
    assert [chunk.command[5] for chunk in found] == [test for test in tests for _ in range(2)]
    assert ["--engine" in chunk.command for chunk in found] == 3 * [False, True]
    assert {chunk.limit for chunk in found} == {control.LIMIT}
    assert len({chunk.name for chunk in found}) == 6
    assert [line["alone"] for line in control.compare(outcomes)] == 5 * ["not run again"]


@pytest.mark.spec("KIT-20")
def test_crashed_test_and_file_without_results_run_again() -> None:
    crashed = failed("a.py::t", word="crashed")
    crashed.findings.append({"started": "a.py::u"})
    assert control.failures({"suite/a.py": crashed}) == ["a.py::t", "a.py::u"]
    assert control.failures({"suite/fsdp1/b.py": failed()}) == ["spec_tests/fsdp1/b.py"]
    # An error after the end of the last test is not one of the test.
    assert control.failures({"suite/a.py": Outcome("stopped", 0.0, findings=crashed.findings)}) == []


@pytest.mark.spec("KIT-20")
def test_failed_chunks_of_other_stages_run_again_and_smoke_also_with_torch(tmp_path: Path) -> None:
    names = ["smoke/2-ranks", "steps/1-ranks/tiny, bf16", "races/2-ranks/wrapper", "collectives/2-ranks"]
    found = control.control_chunks(settings_after(tmp_path, {name: failed() for name in names}))
    assert [chunk.command[3] for chunk in found] == ["smoke", "smoke", "steps", "races"]
    assert [dict(chunk.environment) for chunk in found] == [{}, control.WITH_TORCH, {}, {}]
    assert [chunk.name.rpartition("/")[2] for chunk in found] == ["alone", "torch", "alone", "alone"]


@pytest.mark.spec("KIT-20")
def test_few_chunks_of_the_race_hunt_run_again(tmp_path: Path) -> None:
    names = [chunk.name for chunk in stages._races(Settings(CPU, tmp_path))]
    assert len(names) > control.NUM_CHUNKS
    found = control.control_chunks(settings_after(tmp_path, {name: failed() for name in names}))
    assert len(found) == control.NUM_CHUNKS


@pytest.mark.spec("KIT-20")
def test_name_of_a_run_is_a_short_path_that_belongs_to_one_test() -> None:
    tests = [f"{folder}/test_a.py::test_{'x' * 300}[{value}/..-\0 ü]" for folder in "ab" for value in range(9)]
    names = {control._name(test, how) for test in tests for how in ("alone", "torch")}
    assert len(names) == 36
    assert all(len(name) < 90 and name.count("/") == 2 and name.isascii() for name in names)


# ---- verdicts -------------------------------------------------------------------------------------------------------


def compared(what: str, alone: Outcome | None, with_torch: Outcome | None) -> tuple[str, str, str]:
    """The words for a failure with these outcomes of the two runs."""
    stage = what.split("/")[0]
    first = {what if stage in control.COMPARED else "suite/x.py": failed(what)}
    again = {"alone": alone, "torch": with_torch}
    (found,) = control.compare(first | {control._name(what, how): one for how, one in again.items() if one})
    return found["alone"], found["torch"], found["verdict"]


NOT_OFFERED = Outcome(
    "failed", 1.0, "E", findings=[{"test": "x", "outcome": "failed", "text": "E  NotOfferedError: x"}]
)
NOTHING_RAN = Outcome("failed", 1.0, "1 deselected", findings=[{"nothing ran": True}])
NCCL = failed("x", reason="torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94")


@pytest.mark.spec("KIT-20")
@pytest.mark.parametrize(
    ("what", "alone", "with_torch", "expected"),
    [
        (ODD, failed(ODD), passed(ODD), ("fails alone too", "torch passes", control.MINIFSDP)),
        (ODD, failed(ODD), failed(ODD), ("fails alone too", "also fails with torch", control.TORCH)),
        (ODD, failed(ODD), failed(word="hung"), ("fails alone too", "also fails with torch", control.TORCH)),
        (ODD, failed(ODD), NCCL, ("fails alone too", "also fails with torch", control.MACHINE)),
        (ODD, passed(ODD), passed(ODD), ("passes alone", "torch passes", control.ALONE)),
        (ODD, failed(ODD), None, ("fails alone too", "", control.OPEN)),
        (ODD, None, None, ("not run again", "", control.OPEN)),
        (REFUSAL, failed(REFUSAL), failed(REFUSAL), ("fails alone too", control.ALSO_ON_CPUS, control.OPEN)),
        (BUCKET, failed(BUCKET), NOTHING_RAN, ("fails alone too", "does not apply to torch", control.OPEN)),
        (ODD, failed(ODD), NOT_OFFERED, ("fails alone too", "does not apply to torch", control.OPEN)),
        ("smoke/2-ranks", failed(), passed(), ("fails alone too", "torch passes", control.MINIFSDP)),
        ("smoke/2-ranks", failed(), NCCL, ("fails alone too", "also fails with torch", control.MACHINE)),
        ("steps/1-ranks/tiny", failed(), None, ("fails alone too", "", control.MINIFSDP)),
        ("races/2-ranks/wrapper", failed(), None, ("fails alone too", "", control.MINIFSDP)),
        (
            "races/2-ranks/wrapper",
            failed(last_lines="rank 1, no delays: the kernels are not deterministic"),
            None,
            ("fails alone too", "", control.OPEN),
        ),
    ],
)
def test_verdict(what: str, alone: Outcome | None, with_torch: Outcome | None, expected: tuple[str, str, str]) -> None:
    assert compared(what, alone, with_torch) == expected


# ---- real runs ------------------------------------------------------------------------------------------------------


def python(name: str, program: str) -> Chunk:
    return Chunk(name, [sys.executable, "-c", program], 60.0)


@pytest.mark.spec("KIT-20")
def test_control_also_runs_after_a_first_stage_that_stops_the_others(tmp_path: Path) -> None:
    settings = Settings(CPU, tmp_path / "run")
    kit = Kit(settings, Progress(settings.folder, {}), tmp_path / "report.md")
    bad = Stage("smoke", "", lambda _: [python("smoke/x", "raise SystemExit(3)")], is_vital=True)
    again = Stage("control", "", lambda _: [python("control/x/alone", "")])
    assert kit.run([bad, Stage("suite", "", lambda _: [python("suite/x", "")]), again]) == 1
    assert list(kit.progress.outcomes) == ["smoke/x", "control/x/alone"]
    kit.progress.close()


def broken_checkout(folder: Path) -> Path:
    """A copy of the checkout in which reduce-scatter does not divide by the number of ranks."""
    for name in ("minifsdp", "minifsdp_gloo", "minifsdp_tools", "spec_tests", "spec_tools", "tutorials"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml", "docs/spec.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    file, right = folder / "minifsdp" / "engine" / "collectives.py", "            local_shard.div_(self.after)"
    text = file.read_text()
    assert text.count(right) == 1
    file.write_text(text.replace(right, "            pass"))
    return folder


@pytest.mark.spec("KIT-20")
def test_control_separates_minifsdp_from_torch_in_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "ROOT", broken_checkout(tmp_path / "checkout"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "checkout"))
    done = {
        "smoke/2-ranks": failed(),
        "suite/a.py": failed(ODD, REFUSAL, BUCKET),
        # An interrupted control has already run these.
        control._name("smoke/2-ranks", "alone"): failed(),
        control._name(ODD, "torch"): passed(ODD),
        control._name(REFUSAL, "alone"): failed(REFUSAL),
        control._name(REFUSAL, "torch"): failed(REFUSAL, reason="AttributeError: 'NoneType' has no 'modules'"),
        control._name(BUCKET, "alone"): failed(BUCKET),
    }
    settings = settings_after(tmp_path / "run", done)
    kit = Kit(settings, Progress(settings.folder, {}), tmp_path / "report.md")
    assert kit.run([stage for stage in STAGES if stage.name == "control"]) == 1
    assert len(kit.progress.outcomes) - len(done) == 3
    kit.progress.close()
    found = {line["what"]: line for line in report.read(tmp_path / "report.md")["control"]}
    assert {what: (line["alone"], line["torch"], line["verdict"]) for what, line in found.items()} == {
        "smoke/2-ranks": ("fails alone too", "torch passes", control.MINIFSDP),
        ODD: ("fails alone too", "torch passes", control.MINIFSDP),
        REFUSAL: ("fails alone too", control.ALSO_ON_CPUS, control.OPEN),
        BUCKET: ("fails alone too", "does not apply to torch", control.OPEN),
    }
