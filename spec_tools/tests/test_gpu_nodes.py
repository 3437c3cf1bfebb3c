"""The kit on several nodes: two torchrun commands of two ranks each, with a rank that dies and one that hangs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from spec_tests.ports import free_port
from spec_tools.gpu import merging, nodes, report
from spec_tools.gpu.chunks import ROOT
from spec_tools.gpu.node_stages import NODE_STAGES, Place

pytestmark = pytest.mark.pure

PLACE = Place(rank=0, num_ranks=4, node=0, local_rank=0, local_size=2)


def run_nodes(folder: Path, module: str, *arguments: str) -> tuple[list[int], str, float]:
    """Runs a module on two nodes of two ranks; returns the statuses of both torchruns, the output, and the time."""
    port, environment = free_port(), {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "kit"]
    launch = ["--nnodes", "2", "--nproc-per-node", "2", *rendezvous, "--local-addr", "127.0.0.1", "-m", module]
    options = ["--device", "cpu", "--quick", "--report", str(folder / "report.md")]
    command = [sys.executable, "-m", "torch.distributed.run", *launch, *arguments, *options]
    begin = time.monotonic()
    with (folder / "output").open("w") as output:
        launched = [
            subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
            for _ in range(2)
        ]
        try:
            statuses = [one.wait(600) for one in launched]
        finally:
            for one in launched:
                one.kill()
    return statuses, (folder / "output").read_text(), time.monotonic() - begin


@pytest.mark.spec("KIT-25")
def test_two_nodes_write_one_report_about_all_ranks(tmp_path: Path) -> None:
    statuses, output, _ = run_nodes(tmp_path, "spec_tools.gpu.nodes")
    assert statuses == [0, 0], output
    for rank in range(4):
        assert output.count(f"] OK (rank {rank} of 4), device type cpu") == 1
    found = report.read(tmp_path / "report.md")
    assert {name: chunk["word"] for name, chunk in found["chunks"].items()} == {
        f"{stage.name}/4-ranks": "passed" for stage in NODE_STAGES
    }
    assert [device["node"] for device in found["hardware"]["devices"]] == [0, 0, 1, 1]
    assert [line["api"] for line in found["smoke"]] == [
        "FullyShardedDataParallel",
        "fully_shard",
        "FullyShardedDataParallel, HYBRID_SHARD",
        "fully_shard, 2D mesh",
    ]
    assert {line["ranks"] for line in found["steps"]} == {4}
    assert "minifsdp fully_shard" in {line["contender"] for line in found["steps"]}
    assert {line["ranks"] for line in found["bandwidth"]} == {4}
    host = socket.gethostname()
    assert host not in (tmp_path / "report.md").read_text() + (tmp_path / "report.json").read_text()
    assert (tmp_path / "report.md").read_text().splitlines()[4].startswith("* 4 x device type cpu; minifsdp ")


# The fault, its rank, and the reason in the report.
FAULTS = {
    "dies": (2, "rank 2 (node 1, local rank 0): ended by SIGSEGV, in the begin"),
    "hangs": (
        3,
        "rank 3 (node 1, local rank 1) did not end, in the begin; the other ranks wait, in all-gather, reduce-scatter "
        "and all-reduce",
    ),
    "its parent dies": (1, "no answer from rank 1 (node 0, local rank 1): the program or the machine has died"),
}


@pytest.mark.spec("KIT-25")
@pytest.mark.parametrize("fault", FAULTS)
def test_rank_that_fails_on_two_nodes_is_named_and_all_ranks_end(fault: str, tmp_path: Path) -> None:
    rank, reason = FAULTS[fault]
    statuses, output, seconds = run_nodes(tmp_path, "spec_tools.tests.failing_nodes", fault, str(rank))
    assert all(statuses), output
    found = report.read(tmp_path / "report.md")
    assert "collectives/4-ranks" in found["chunks"], output
    assert found["chunks"]["collectives/4-ranks"]["reason"] == reason
    assert "smoke/4-ranks" not in found["chunks"]
    assert f"* worst: collectives/4-ranks: {reason}"[:200] in (tmp_path / "report.md").read_text()
    assert seconds < 400
    log = found["chunks"]["collectives/4-ranks"]["last_lines"]
    if fault == "hangs":
        assert "in sleep_for_ever" in log
        assert log.startswith("--- rank 3 ")


# ---- merging --------------------------------------------------------------------------------------------------------


def result(word: str, *marks: str, reason: str = "", **finding: Any) -> dict[str, Any]:
    findings = [finding] if finding else []
    return {"word": word, "reason": reason, "seconds": 1.0, "last_lines": "", "findings": findings, "marks": [*marks]}


@pytest.mark.spec("KIT-25")
def test_rank_whose_connection_was_closed_is_not_the_cause() -> None:
    closed = result("failed", "one", "two", reason="RuntimeError: [pair.cc:553] Connection closed by peer [host0]:1")
    hung = {rank: result("hung", "one", "two") for rank in range(4)} | {1: closed, 3: result("hung", "one")}
    outcome = merging.merge("steps", hung, PLACE, 9.0)
    expected = "rank 3 (node 1, local rank 1) did not end, in one; the other ranks wait, in two"
    assert (outcome.word, outcome.reason) == ("hung", expected)
    failed = {0: closed, 1: closed, 2: result("failed", "one", reason="ValueError: 3"), 3: closed}
    outcome = merging.merge("steps", failed, PLACE, 9.0)
    assert (outcome.word, outcome.reason) == ("failed", "rank 2 (node 1, local rank 0): ValueError: 3, in one")
    outcome = merging.merge("steps", dict.fromkeys(range(4), closed), PLACE, 9.0)
    assert outcome.word == "failed"


@pytest.mark.spec("KIT-25")
def test_rank_with_the_fewest_steps_is_the_cause_of_a_hang() -> None:
    found = {rank: result("hung", "one", "two") for rank in range(4)} | {1: result("hung", "one")}
    outcome = merging.merge("steps", found, PLACE, 9.0)
    assert outcome.word == "hung"
    assert outcome.reason == "rank 1 (node 0, local rank 1) did not end, in one; the other ranks wait, in two"
    same = {rank: result("hung", "one", reason="did not end within 9 s") for rank in range(4)}
    expected = "rank 0 (node 0, local rank 0) (and 3 more ranks): did not end within 9 s, in one"
    assert merging.merge("steps", same, PLACE, 9.0).reason == expected


@pytest.mark.spec("KIT-25")
def test_failure_of_one_rank_counts_more_than_ranks_that_wait_for_it() -> None:
    found = {rank: result("stopped", "one") for rank in range(4)} | {3: result("failed", reason="ValueError: x")}
    outcome = merging.merge("steps", found, PLACE, 9.0)
    assert (outcome.word, outcome.reason) == (
        "failed",
        "rank 3 (node 1, local rank 1): ValueError: x, before its first step",
    )
    assert merging.merge("steps", {}, PLACE, 9.0).reason.count("rank") == 8


@pytest.mark.spec("KIT-25")
def test_different_versions_are_a_failure() -> None:
    where = {"node": 0, "local rank": 0, "device": "H100"}
    found = {
        rank: result("passed", rank=rank, versions={"NCCL": "2.28.9" if rank < 3 else "2.27.5"}, **where)
        for rank in range(4)
    }
    outcome = merging.merge("hardware", found, PLACE, 9.0)
    assert outcome.word == "failed"
    assert outcome.reason == "rank 3 (node 1, local rank 1) has NCCL 2.27.5, and rank 0 has 2.28.9"


@pytest.mark.spec("KIT-25")
def test_each_host_has_a_number_in_the_report() -> None:
    names = merging.names_of({0: "dgx-1.example.org", 1: "dgx-1.example.org", 2: "dgx-2.example.org", 3: "localhost"})
    assert (names["dgx-1.example.org"], names["dgx-1"], names["dgx-2"]) == ("host0", "host0", "host1")
    assert "localhost" not in names


@pytest.mark.spec("KIT-25")
def test_program_without_torchrun_says_how_to_start_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert nodes.main(arguments=[]) == 2
    assert capsys.readouterr().err.startswith("Start this program with torchrun")
