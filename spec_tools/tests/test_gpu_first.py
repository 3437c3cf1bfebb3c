"""The first lines of the GPU kit: one for each rank, and the line of each kind of broken rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spec_tests.harness import pool, worker
from spec_tools.gpu import chunks, first, hardware, machine
from spec_tools.gpu.__main__ import Kit
from spec_tools.gpu.chunks import Chunk
from spec_tools.gpu.first import check_ranks, note
from spec_tools.gpu.names import clean
from spec_tools.gpu.platforms import CPU, CUDA, SIMULATED, Platform
from spec_tools.gpu.progress import Progress
from spec_tools.gpu.stages import STAGES, Settings, Stage

Seat = worker.Seat
PATIENCE = 120.0  # seconds for processes that are expected to end on their own


@pytest.fixture(scope="module", autouse=True)
def _server_of_ranks() -> None:
    """The server has imported torch, so that short limits of the tests do not include it."""
    process = pool.fork_server().Process(target=os.getpid)
    process.start()
    process.join()


# ---- ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("KIT-10")
@pytest.mark.parametrize("platform", [CPU, SIMULATED], ids=["cpu", "simulated"])
def test_each_working_rank_has_one_line(platform: Platform) -> None:
    found = check_ranks(platform, 2, PATIENCE)
    about = f"device type {platform.device_type}, {platform.collectives}"
    assert found["lines"] == [f"[host0:{rank}] OK (rank {rank} of 2), {about}" for rank in (0, 1)]
    assert found["outcome"] == "passed"
    assert [rank["ok"] for rank in found["ranks"]] == [True, True]


def hang_on_the_device(seat: Seat, path: Path) -> None:
    note(path, step="started")
    if seat.rank == 0:
        note(path, step="computed")
    time.sleep(600)


def die_while_another_waits(seat: Seat, path: Path) -> None:
    note(path, step="computed")
    if seat.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def ask_for_a_missing_device(seat: Seat, path: Path) -> None:
    note(path, step="started")
    if seat.rank == 1:
        raise RuntimeError("CUDA error: invalid device ordinal\nCUDA kernel errors might be reported later")
    note(path, step="computed")
    time.sleep(600)


def sum_wrongly(seat: Seat, path: Path) -> None:
    all_reduce = dist.all_reduce

    def wrong(tensor: torch.Tensor) -> None:
        # The real one waits until the other rank has joined too. Otherwise the first error can end that rank earlier.
        all_reduce(tensor)
        tensor.fill_(7.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", wrong)
        first.take_steps(seat, path)


def compute_wrongly(seat: Seat, path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "ones", lambda *shape, device: torch.full(shape, 0.5))
        first.take_steps(seat, path)


@pytest.mark.spec("KIT-10")
def test_rank_whose_device_hangs_differs_from_a_rank_that_waits_for_it() -> None:
    found = check_ranks(CPU, 2, 6.0, hang_on_the_device)
    waits, hangs = found["lines"]
    assert waits.startswith("[host0:0] BROKEN (rank 0 of 2): its device computes, but the process group does not start")
    assert waits.endswith(first.CAVEAT)
    assert hangs.startswith("[host0:1] BROKEN (rank 1 of 2): its device does not answer; it waited up to 6 s")
    assert hangs.endswith(first.NO_CAVEAT)
    assert found["outcome"] == "failed"
    assert found["text"].count("in hang_on_the_device") == 2  # the stacks of both ranks
    assert not any("stacks" in rank for rank in found["ranks"])


@pytest.mark.spec("KIT-10")
@pytest.mark.parametrize(
    ("body", "reason", "end"),
    [
        (die_while_another_waits, "its process was ended by SIGKILL after the step 'computed'", first.CAVEAT),
        (ask_for_a_missing_device, "RuntimeError: CUDA error: invalid device ordinal", first.NO_CAVEAT),
    ],
)
def test_rank_that_fails_ends_the_wait_of_the_others(body: Any, reason: str, end: str) -> None:
    found = check_ranks(CPU, 2, PATIENCE, body)
    assert found["lines"][1] == f"[host0:1] BROKEN (rank 1 of 2): {reason}. {end}"
    assert found["lines"][0].startswith("[host0:0] BROKEN (rank 0 of 2): its device computes")
    # The last line becomes the reason of the chunk, so it is that of the rank at fault.
    assert found["text"].splitlines()[-1] == found["lines"][1]


@pytest.mark.spec("KIT-10")
@pytest.mark.parametrize(
    ("body", "step", "text"),
    [
        (sum_wrongly, "joined", "wrong sum in the first all-reduce: element 0 is 7.0, not 3.0"),
        (compute_wrongly, "started", "a matrix product on the device is wrong"),
    ],
)
def test_wrong_result_of_a_rank_is_found(body: Any, step: str, text: str) -> None:
    found = check_ranks(CPU, 2, PATIENCE, body)
    assert {rank["step"] for rank in found["ranks"]} == {step}
    assert all(f"ValueError: {text}" in line for line in found["lines"])


# ---- on the terminal ------------------------------------------------------------------------------------------------

WRITES_LINES = """
import json, os, time
with open(os.environ["MINIFSDP_KIT_FINDINGS"], "a") as file:
    for number in range(3):
        line = json.dumps({"outcome": "passed", "lines": [f"[host0:{number}] OK"]}) + "\\n"
        file.write(line[:7]); file.flush(); file.write(line[7:]); file.flush()
"""


@pytest.mark.spec("KIT-10", "KIT-07")
def test_terminal_shows_the_host_and_the_report_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box-17")
    run = Kit(Settings(CPU, tmp_path / "run"), Progress(tmp_path / "run", {}), tmp_path / "report.md")
    chunk = Chunk("links/x", [sys.executable, "-c", WRITES_LINES], 60.0)
    try:
        run.run([Stage("links", "is it so", lambda settings: [chunk])])
    finally:
        run.progress.close()
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "OK" in line] == [f"[gpu-box-17:{number}] OK" for number in range(3)]
    assert said.index("[gpu-box-17:2] OK") < next(i for i, line in enumerate(said) if line.startswith("  ok "))
    assert "gpu-box-17" not in json.dumps([one.as_json() for one in run.progress.outcomes.values()])


@pytest.mark.spec("KIT-07")
@pytest.mark.pure
def test_names_of_host_and_user_are_replaced_as_whole_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setenv("LOGNAME", "alice")
    assert clean("node7:12 [0] NCCL INFO alice, node71, malice") == "host0:12 [0] NCCL INFO <user>, node71, malice"
    monkeypatch.setenv("LOGNAME", "root")
    assert clean("all-gather of the root") == "all-gather of the root"


@pytest.mark.spec("KIT-07")
def test_with_names_keeps_folders(tmp_path: Path) -> None:
    root = str(chunks.ROOT)
    finding = json.dumps({"text": root}) + "\n"
    program = (
        f"import os; open(os.environ['MINIFSDP_KIT_FINDINGS'], 'w').write({finding!r}); raise SystemExit({root!r})"
    )
    chunk = Chunk("suite/x", [sys.executable, "-c", program], 60.0)
    for with_names, shown in ((True, root), (False, ".")):
        outcome = chunks.run_chunk(chunk, tmp_path, with_names=with_names)
        assert (outcome.last_lines, outcome.findings) == (shown, [{"text": shown}])


# ---- the stage ------------------------------------------------------------------------------------------------------


@pytest.mark.spec("KIT-10")
def test_versions_come_first_and_facts_come_even_if_a_rank_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setattr(hardware, "ask_command", lambda words: "580.65.06\n580.65.06\n")
    monkeypatch.setattr(hardware, "check_ranks", lambda platform, num_ranks: {"outcome": "failed", "text": "broken"})
    monkeypatch.setattr(machine, "look", lambda platform: NO_FACTS)
    versions, ranks, about = hardware.work(CUDA, 2)
    (line,) = versions["lines"]
    assert line.endswith(f"torch {torch.__version__}, CUDA 13.0, NCCL 2.29.7, driver 580.65.06, built for sm_80 sm_90")
    assert versions["devices"] == 2 * [{"name": "NVIDIA H100", "capability": "9.0", "GiB": 80.0}]
    assert ranks["outcome"] == "failed"
    assert about["lines"][0] == "nvidia-smi gives no answer here"


NO_FACTS: dict[str, Any] = {
    "gpus": [],
    "topology": {},
    "nvlinks": [],
    "peer_access": [],
    "processes": [],
    "xid": None,
    "mps": False,
    "shared_memory": {},
    "limits": {},
    "container": "",
    "variables": {},
}


@pytest.mark.spec("KIT-10")
@pytest.mark.pure
def test_line_of_a_rank_on_a_gpu_names_it_and_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 3)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda which: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda which: (79 * 2**30, 80 * 2**30))
    assert CUDA.memory(device) == {"free GiB": 79.0, "GiB": 80.0}
    rank = {"host": "host0", "rank": 3, "local_rank": 3, "ok": True, "step": "summed"}
    rank |= {"device": CUDA.device_name(device), "libraries": CUDA.libraries()}
    assert first._line(rank, 8, 60.0) == "[host0:3] OK (rank 3 of 8), NVIDIA H100, NCCL 2.29.7, CUDA 13.0"


@pytest.mark.spec("KIT-10")
@pytest.mark.pure
def test_every_device_has_a_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [stage.name for stage in STAGES][:3] == ["hardware", "first_step", "links"]
    for num_devices, platform, num_ranks in ((1, CUDA, 1), (6, CUDA, 6), (1, CPU, 2)):
        monkeypatch.setattr(Platform, "num_devices", lambda self, num=num_devices: num)
        for stage in STAGES[:2]:
            (chunk,) = stage.chunks(Settings(platform, Path()))
            assert json.loads(chunk.command[-1]) == {"num_ranks": num_ranks}
            assert chunk.command[3] == {"hardware": "hardware", "first_step": "smoke"}[stage.name]
