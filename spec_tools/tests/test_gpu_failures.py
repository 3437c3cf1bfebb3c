"""Failures that the GPU kit explains: links, the kind of each failure, files about it, and a full disk."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spec_tests.harness import pool, ranks
from spec_tests.waiting import comes_true
from spec_tools.gpu import __main__ as kit
from spec_tools.gpu import advice, chunks, evidence, links, note, on_ranks, report
from spec_tools.gpu.__main__ import Kit, main
from spec_tools.gpu.chunks import Outcome, run_chunk
from spec_tools.gpu.platforms import CPU, Platform
from spec_tools.gpu.progress import Progress
from spec_tools.gpu.stages import STAGES
from spec_tools.tests.kit_stages import kit_in, python, stage


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Kit]:
    """A kit with its files in the test's own folder."""
    with kit_in(tmp_path) as made:
        yield made


# ---- links ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("KIT-12")
@ranks(2)
def test_both_ranks_of_a_pair_receive_the_right_elements() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "NUM_ELEMENTS", 1000)
        # The clock of this rank: rounds of 5, 3, 2 and 4 seconds. The first one, with the connection, does not count.
        now = itertools.accumulate([0, 5, 0, 3, 0, 2, 0, 4])
        (found,) = links.between_all_pairs("cpu", clock=lambda: next(now))
        assert found == {"pair": [0, 1], "ms": 2000.0, "wrong": 0}
        # Without a copy, a rank would compare its own values.
        (found,) = links.between_all_pairs("cpu", corrupt=lambda received: received[7:9].add_(1))
        assert found["wrong"] == 4 * 2


@pytest.mark.spec("KIT-12")
def test_slow_link_has_a_warning_and_a_wrong_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {(0, 1): 1.0, (0, 2): 1.1, (0, 3): 0.9, (1, 2): 1.0, (1, 3): 9.0, (2, 3): 1.2}
    by_rank = [
        [{"pair": list(pair), "ms": ms, "wrong": 3 * (pair == (0, 2))} for pair, ms in times.items() if rank in pair]
        for rank in range(4)
    ]
    monkeypatch.setattr(links, "on_ranks", lambda *_, **__: by_rank)
    monkeypatch.setattr(Platform, "num_devices", lambda self: 4)
    found = {tuple(one["pair"]): one for one in links.work(CPU, 4)}
    assert [pair for pair, one in found.items() if "warning" in one] == [(1, 3)]
    assert found[1, 3]["warning"] == "link between ranks 1 and 3: 9 ms, 8.6 times the median of all pairs"
    assert found[1, 3]["lines"][0].startswith("WARN link between ranks 1 and 3: 9 ms")
    assert found[1, 3]["outcome"] == "passed"
    assert found[0, 1]["GB/s"] == 16.78
    assert found[0, 2]["outcome"] == "failed"
    assert found[0, 2]["text"] == f"link between ranks 0 and 2: wrong values in 6 of {2 * links.NUM_ELEMENTS} elements"
    # Ranks that share a device have no times, and so no warnings.
    monkeypatch.setattr(Platform, "num_devices", lambda self: 3)
    assert not any("ms" in one or "warning" in one for one in links.work(CPU, 4))


@pytest.mark.spec("KIT-12")
@pytest.mark.pure
def test_two_pairs_cannot_be_compared() -> None:
    assert links.slow_pairs({(0, 1): 1.0, (0, 2): 100.0}) == {}
    assert links.slow_pairs({(0, 1): 1.0, (0, 2): 1.0, (1, 2): 100.0}) == {(1, 2): 100.0}


# ---- kinds of failures ----------------------------------------------------------------------------------------------


def hang() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


def die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def lack_memory() -> None:
    if dist.get_rank() == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total of ...")
    time.sleep(600)


def access_illegally() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")


def sum_wrongly() -> None:
    from spec_tools.gpu import collectives

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda tensor, group: tensor.zero_())
        collectives.send()


def outcome_of(text: str, folder: Path, status: int = 1, *, hung: bool = False) -> Outcome:
    """The outcome of a chunk that has written this text."""
    (folder / "log.txt").write_text(text)
    chunk = python("collectives/2-ranks", "")
    return chunks._outcome(status, hung, 1.0, chunk, folder / "log.txt", folder / "findings.jsonl")


@pytest.mark.spec("KIT-13")
@pytest.mark.parametrize(
    ("body", "kind", "reason"),
    [
        (hang, "hang", "hang: no answer from ranks [0"),
        (die, "rank_died", "the process died: SIGKILL"),
        (lack_memory, "out_of_memory", "torch.OutOfMemoryError: CUDA out of memory"),
        (access_illegally, "crash", "RuntimeError: CUDA error: an illegal memory access"),
        (
            sum_wrongly,
            "wrong_value",
            "AssertionError: all-reduce between ranks [0, 1] on gloo: element 0 is 0.0",
        ),
    ],
)
def test_failure_on_ranks_has_its_kind(body: Any, kind: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(pool.Failure) as failure:
        on_ranks.on_ranks(CPU, 2, body, 4.0 if body is hang else 120.0)
    outcome = outcome_of(f"Traceback (most recent call last):\n{failure.value}\n", tmp_path)
    assert advice.kind_of(outcome) == kind
    assert outcome.reason.startswith(reason)


@pytest.mark.spec("KIT-13")
@pytest.mark.pure
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Error while creating shared memory segment /dev/shm/nccl-x: No space left", "shared_memory"),
        ("OSError: [Errno 28] No space left on device", "disk_full"),
        ("CUDA error: invalid device ordinal", "invalid_device"),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", "busy_device"),
        ("CUDA error: uncorrectable ECC error encountered", "hardware"),
        ("CUDA error: peer access is not supported between these two devices", "peer_access"),
        ("[Rank 0] Watchdog caught collective operation timeout\nthe process died: SIGABRT", "hang"),
        ("[host0:1] BROKEN (rank 1 of 2): its device does not answer; it waited up to 60 s. No other", "hang"),
        ("[host0:1] BROKEN (rank 1 of 2): its process was ended by SIGKILL; rank 0 waited up to 60 s", "rank_died"),
        ("fully_shard, step 1, weight: as far as 1.0e-01 from that of a single process", "wrong_value"),
        ("ModuleNotFoundError: No module named 'x'", "error"),
    ],
)  # fmt: skip
def test_text_of_a_failure_has_its_kind(text: str, kind: str, tmp_path: Path) -> None:
    assert advice.kind_of(outcome_of(text, tmp_path)) == kind


@pytest.mark.spec("KIT-13")
@pytest.mark.pure
def test_end_of_a_chunk_counts_before_the_text(tmp_path: Path) -> None:
    assert advice.kind_of(outcome_of("wrong sum", tmp_path, -signal.SIGABRT, hung=True)) == "hang"
    assert advice.kind_of(outcome_of("wrong sum", tmp_path, -signal.SIGSEGV)) == "crash"
    assert advice.kind_of(outcome_of("", tmp_path, -signal.SIGBUS)) == "shared_memory"
    assert advice.kind_of(outcome_of("CUDA out of memory", tmp_path, -signal.SIGABRT)) == "out_of_memory"


@pytest.mark.spec("KIT-13")
@pytest.mark.pure
@pytest.mark.parametrize("kind", advice.KINDS)
def test_every_kind_has_commands_with_the_meaning_of_each_result(kind: str) -> None:
    one = advice.KINDS[kind]
    assert one.keys() <= {"cause", "word", "sign", "hint", "proves", "not_proves", "next"}
    assert one["proves"]
    assert one["not_proves"]
    assert all(len(step) == 2 for step in one["next"])
    assert kind in advice.CAUSES
    variables = re.findall(r"\b((?:NCCL|CUDA)_\w+)=", str(one["next"]))
    assert set(variables) <= {
        "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE", "CUDA_LAUNCH_BLOCKING",
        "CUDA_VISIBLE_DEVICES",
    }  # fmt: skip


@pytest.mark.spec("KIT-13")
@pytest.mark.pure
def test_advice_about_a_hang_names_four_commands_and_missing_peer_access() -> None:
    outcome = Outcome("hung", 600.0, "did not end within 600 s")
    known = [{"about": "peer access", "text": "no access: 0 to 1", "remedy": "ACS"}]
    known += [{"about": "temperature", "text": "GPU 0 has 91 degrees", "remedy": "cool it"}]
    found = advice.advise("collectives/8-ranks", outcome, [], 8, known)
    again = "python -m spec_tools.gpu --trial --stages collectives"
    assert [step["command"] for step in found["next"]] == [
        f"NCCL_DEBUG=INFO {again}",
        f"NCCL_P2P_DISABLE=1 {again}",
        f"NCCL_IB_DISABLE=1 {again}",
        f"CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6 {again}",
    ]
    assert found["known"] == ["no access: 0 to 1. Remedy: ACS"]
    lines = advice.as_lines(found, ["a/log.txt"])
    assert lines[0] == "What failed: collectives/8-ranks: hung; did not end within 600 s"
    assert lines[2].startswith("It does not prove: It does not show which rank is at fault")
    assert "This machine: no access: 0 to 1. Remedy: ACS" in lines
    assert "File: a/log.txt" in lines
    # One device: no command leaves it out.
    assert "VISIBLE" not in str(advice.advise("smoke/1-ranks", outcome, ["--device", "cpu"], 1))


@pytest.mark.spec("KIT-13")
def test_failed_layer_stops_the_run_with_advice(run: Kit, capsys: pytest.CaptureFixture[str]) -> None:
    warning = {"about": "XID", "text": "Xid 79", "remedy": "replace it"}
    finding = json.dumps({"versions": {}, "devices": [], "processors": 1, "system": "", "warnings": [warning]})
    hardware = python(
        "hardware/all", f"import os; open(os.environ['MINIFSDP_KIT_FINDINGS'], 'w').write({finding!r} + '\\n')"
    )
    bad = python("links/all", "raise SystemExit('hang: no answer from ranks [0, 1] after 90 s')")
    layers = [stage("hardware", hardware), stage("links", bad, is_vital=True, layer="links")]
    assert run.run([*layers, stage("smoke", python("smoke/x", ""))]) == 1
    assert list(run.progress.outcomes) == ["hardware/all", "links/all"]
    said = capsys.readouterr().out
    assert "links (layer: links) has failed, so no later stage was started" in said
    assert "What failed: links/all: failed; hang: no answer from ranks [0, 1] after 90 s" in said
    assert "This machine: Xid 79. Remedy: replace it" in said
    assert "NCCL_P2P_DISABLE=1 python -m spec_tools.gpu --trial --device cpu --stages links" in said
    assert run.progress.outcomes["links/all"].advice["kind"] == "hang"
    assert run.progress.outcomes["hardware/all"].advice == {}


@pytest.mark.spec("KIT-13")
@pytest.mark.pure
def test_layers_are_in_the_order_of_their_parts() -> None:
    layers = [(one.layer, one.is_vital) for one in STAGES if one.layer]
    assert layers == [("node", True), ("links", True), ("collectives", True), ("one step", True)]
    assert not any(one.is_vital for one in STAGES if not one.layer)


@pytest.mark.spec("KIT-13")
def test_trial_keeps_the_outcomes_of_the_main_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"open({str(tmp_path / 'times')!r}, 'a').write('x')"
    monkeypatch.setattr(kit, "STAGES", (stage("suite", python("suite/x", program)),))
    for options, times in ((["--trial"], 1), ([], 2), ([], 2), (["--trial"], 3)):
        assert main(["--device", "cpu", *options], tmp_path) == 0
        assert (tmp_path / "times").read_text() == times * "x"
    assert {path.name for path in tmp_path.glob("*.md")} == {"gpu-report-cpu.md", "gpu-report-cpu-trial.md"}


# ---- files about a failure ------------------------------------------------------------------------------------------

# A process that hangs, with a pipe as that of NCCL's process group, and with a file of minifsdp's watchdog.
HANGS = """
import os, time
from pathlib import Path
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + "3.pipe"
os.mkfifo(pipe)
end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
folder = Path(os.environ["TMPDIR"], "minifsdp-a1")
folder.mkdir()
(folder / "minifsdp-ledger-none-0-rank3-1-x.json").write_text("{}")
while True:
    if os.read(end, 1):
        Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "3").write_text("the last collectives")
    time.sleep(0.02)
"""
SPY = """#!/bin/sh
[ "$2" = --native ] && exit 1
echo "Thread $3 (idle)"
"""


@pytest.mark.spec("KIT-14")
def test_hanging_chunk_keeps_stacks_flight_recorder_and_ledger(
    run: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "py-spy").write_text(SPY)
    (tmp_path / "py-spy").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(evidence, "DUMP_LIMIT", 60.0)
    run.run([stage("links", python("links/all", HANGS, limit=4.0))])
    outcome, home = run.progress.outcomes["links/all"], tmp_path / "run" / "links" / "all"
    assert outcome.word == "hung"
    recorder, ledger, spy = outcome.files
    assert (recorder, ledger) == ("flight-recorder/rank-3", "ledger/minifsdp-ledger-none-0-rank3-1-x.json")
    assert (home / recorder).read_text() == "the last collectives"
    assert (home / spy).read_text() == f"Thread {spy[7:-4]} (idle)\n"
    assert re.fullmatch(r"py-spy-\d+\.txt", spy)
    text, found = (tmp_path / "report.md").read_text(), report.read(tmp_path / "report.json")
    assert "File: flight-recorder/rank-3" in text
    assert recorder in found["chunks"]["links/all"]["files"]


@pytest.mark.spec("KIT-14")
def test_passed_chunk_names_no_files(run: Kit) -> None:
    program = 'import os; open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + "0", "w")'
    run.run([stage("links", python("links/all", program))])
    assert run.progress.outcomes["links/all"].files == []


@pytest.mark.spec("KIT-14")
@pytest.mark.pure
def test_recorder_is_configured_with_names_that_torch_reads_and_keeps_settings_of_the_user(tmp_path: Path) -> None:
    found = evidence.variables(tmp_path, tmp_path, {"TORCH_FR_BUFFER_SIZE": "7"})
    assert "TORCH_FR_BUFFER_SIZE" not in found
    assert found["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    folder = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
    text = (folder / "ProcessGroupNCCL.hpp").read_text() + (folder / "FlightRecorder.hpp").read_text()
    in_headers = {name for name in found if name in text}
    assert in_headers == set(found) - {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}


def collected_in(block: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, list[int]]]:
    """The arguments of `evidence.collect` while ``block`` ran as a part of a chunk."""
    seen: list[tuple[Path, list[int]]] = []
    monkeypatch.setenv(chunks.FINDINGS, str(folder / "findings.jsonl"))
    monkeypatch.setenv(chunks.MARK, str(folder))
    monkeypatch.setattr(evidence, "SHARE_OF_LIMIT", 0.0)
    monkeypatch.setattr(chunks, "processes_of", lambda where: [4711])
    monkeypatch.setattr(evidence, "collect", lambda home, scratch, processes: seen.append((home, list(processes))))
    block(lambda: comes_true(lambda: seen, 60))
    return seen


@pytest.mark.spec("KIT-14")
def test_ranks_that_run_long_are_examined_before_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def block(wait: Any) -> None:
        monkeypatch.setattr(pool, "run", lambda *_: wait())
        assert on_ranks.on_ranks(CPU, 0, hang, 60.0) == []

    assert collected_in(block, tmp_path, monkeypatch) == [(tmp_path, [4711])]


@pytest.mark.spec("KIT-14")
def test_test_that_runs_long_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def block(wait: Any) -> None:
        hook = note.pytest_runtest_protocol(type("Item", (), {"nodeid": "a::b"})())
        next(hook)
        wait()
        with pytest.raises(StopIteration):
            hook.send(True)

    assert collected_in(block, tmp_path, monkeypatch) == [(tmp_path, [4711])]


# ---- a full disk ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("KIT-15")
def test_chunk_that_fills_the_disk_ends_the_run_and_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    target.symlink_to("/dev/full")
    program = f"file = open({str(target)!r}, 'w'); file.write('x'); file.flush()"
    made = [python("suite/a", ""), python("suite/b", program), python("suite/c", "")]
    monkeypatch.setattr(kit, "STAGES", (stage("suite", *made),))
    assert main(["--device", "cpu"], tmp_path) == 3
    said = capsys.readouterr().err
    assert "The disk is full ([Errno 28] in suite/b: OSError: [Errno 28] No space left on device), so the kit" in said
    assert re.search(r"Free: \d+ MiB in the folder of the results, \d+ MiB in the folder of temporary files\.", said)
    folder = tmp_path / "gpu" / "cpu"
    assert list(json.loads((folder / "progress.json").read_text())["outcomes"]) == ["suite/a"]
    target.unlink()
    assert main(["--device", "cpu"], tmp_path) == 0
    assert list(json.loads((folder / "progress.json").read_text())["outcomes"]) == ["suite/a", "suite/b", "suite/c"]


@pytest.mark.spec("KIT-15")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_kit_that_cannot_write_keeps_earlier_outcomes(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kit, "STAGES", (stage("suite", python("suite/a", ""), python("suite/b", "")),))
    write = Progress.note

    def fails(self: Progress, name: str, outcome: Outcome) -> None:
        if name == "suite/b":
            raise OSError(number, os.strerror(number))
        write(self, name, outcome)

    monkeypatch.setattr(Progress, "note", fails)
    if number == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            main(["--device", "cpu"], tmp_path)
    else:
        assert main(["--device", "cpu"], tmp_path) == 3
        assert f"The disk is full ([Errno {number}] {os.strerror(number)})" in capsys.readouterr().err
    outcomes = json.loads((tmp_path / "gpu" / "cpu" / "progress.json").read_text())["outcomes"]
    assert list(outcomes) == ["suite/a"]


@pytest.mark.spec("KIT-15")
def test_chunk_whose_folder_cannot_be_made_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(prefix: str) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(OSError, match="No space left"):
        run_chunk(python("suite/a", ""), tmp_path)
