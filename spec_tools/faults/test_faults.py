"""The reports of the other ranks when one rank diverges, ends, is killed, is stopped or is slow."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from minifsdp.watchdog.report import LOST
from spec_tests.harness import pool
from spec_tests.harness.programs import run_module
from spec_tools.faults import __main__ as matrix
from spec_tools.faults import cells, restarts
from spec_tools.faults.cells import (
    VICTIMS,
    Cell,
    Outcome,
    every_cell,
    problem_about_disk,
    run_all,
    said_by,
    start_ranks,
)
from spec_tools.faults.job import APIS, FAULTS, STAGES
from spec_tools.faults.restarts import Restart

pytestmark = pytest.mark.pure
ROOT = Path(__file__).resolve().parents[2]
IN_SECONDS = 20.0  # instead of after five minutes


def deviate(folder: Path, api: str, what: str, num_ranks: int = 2) -> list[Any]:
    """The exit statuses of the ranks' processes, which must end in time."""
    pool.start_early()
    processes = start_ranks("deviate", api, what, num_ranks=num_ranks, folder=folder)
    until = time.monotonic() + IN_SECONDS
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert None not in codes, "\n".join([f"still there: {codes}", *(said_by(folder, r) for r in range(num_ranks))])
    return codes


@pytest.mark.spec("LEDGER-03", "LEDGER-02")
@pytest.mark.parametrize("api", APIS)
def test_divergent_ranks_are_reported_within_seconds(api: str, tmp_path: Path) -> None:
    assert deviate(tmp_path, api, "leaves out") == [1, 1]
    for rank in range(2):
        said = said_by(tmp_path, rank)
        assert re.search(r"The ranks diverge at collective 0 of group \S+ since its last comparison:", said)
        assert re.search(r"rank 0: all-gather of 'a' in forward \(deviate.py:\d+\)", said)
        assert re.search(r"rank 1: all-gather of 'b' in forward \(deviate.py:\d+\)", said)
    assert "a collective between ranks [0, 1] cannot complete" in said_by(tmp_path, 0) + said_by(tmp_path, 1)


@pytest.mark.spec("ORDER-10")
@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("api", APIS)
def test_no_data_is_sent_to_a_rank_that_expects_another_size(
    api: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a transport, a rank cannot check with the others before it sends.
    monkeypatch.delenv("MINIFSDP_TRANSPORT", raising=False)
    assert deviate(tmp_path, api, f"swaps layers of other sizes {when}") == [1, 1]
    for rank in range(2):
        said = said_by(tmp_path, rank)
        assert "gloo::EnforceNotMet" not in said
        assert "are about to issue different collectives" in said or "cannot complete" in said or " failed: " in said
        assert "rank 0: all-gather of 'a' in forward" in said
        assert "rank 1: all-gather of 'b' in forward" in said


@pytest.mark.spec("LEDGER-11", "ORDER-10")
@pytest.mark.parametrize("api", APIS)
def test_caught_order_difference_does_not_affect_later_checks(
    api: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MINIFSDP_TRANSPORT", raising=False)
    assert deviate(tmp_path, api, "catches that it swaps layers of other sizes") == [0, 0], said_by(tmp_path, 0)
    for rank in range(2):
        assert "are about to issue different collectives" in (tmp_path / str(rank) / "stdout").read_text()


@pytest.mark.spec("ORDER-06", "ORDER-13", "LEDGER-03")
@pytest.mark.parametrize("what", ["no_sync", "keeps and no_sync"])
@pytest.mark.parametrize("api", APIS)
def test_no_sync_on_one_rank_is_noticed(api: str, what: str, tmp_path: Path) -> None:
    codes = deviate(tmp_path, api, what)
    said = said_by(tmp_path, 0) + said_by(tmp_path, 1)
    if (api, what) == ("wrapper", "keeps and no_sync"):
        # Unequal numbers of micro-batches are correct, so only the optimizer steps show the error, and collectives do
        # not.
        assert codes == [1, 0]
        assert "optimizers have stepped on ranks [1] only" in said
        assert "rank 1: has ended, at the end of its program" in said
        return
    assert codes == [1, 1]
    assert "The ranks diverge at" in said
    assert re.search(r"rank 1: (order check in backward|all-gather of '[ab]' in forward)", said)


@pytest.mark.spec("ORDER-06", "ORDER-04", "LEDGER-03")
@pytest.mark.parametrize("what", ["no_sync", "keeps and no_sync"])
@pytest.mark.parametrize("api", APIS)
def test_no_sync_on_one_rank_of_a_mesh_is_noticed_by_its_replicas_too(api: str, what: str, tmp_path: Path) -> None:
    # Ranks 2 and 3 share a shard group and agree. They wait for their replicas.
    codes = deviate(tmp_path, api, what, num_ranks=4)
    said = "".join(said_by(tmp_path, rank) for rank in range(4))
    if (api, what) == ("wrapper", "keeps and no_sync"):
        assert codes == [1, 0, 1, 1]
        assert "optimizers have stepped on ranks [1] only" in said
        return
    assert codes == [1, 1, 1, 1]
    assert "The ranks diverge at" in said
    assert re.search(r"rank 1: (order check in backward|all-gather of '[ab]' in forward)", said)


@pytest.mark.spec("LEDGER-03", "LEDGER-05")
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("what", "words"),
    [("ends", "has ended, at the end of its program"), ("fails", "has ended, by LookupError: no such picture")],
)
def test_ended_rank_leaves_exit_record(api: str, what: str, words: str, tmp_path: Path) -> None:
    codes = deviate(tmp_path, api, what)
    assert codes == [1, 0 if what == "ends" else 1]
    assert f"rank 1: {words}" in said_by(tmp_path, 0)
    assert "deviate.py:" in said_by(tmp_path, 0)


@pytest.mark.spec("LEDGER-16")
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("ends", "rank 0: has ended, at the end of its program"),
        ("killed", "The state of the other ranks is unknown: the host of the store, usually rank 0, has ended."),
    ],
)
def test_rank_reports_its_position_and_loss_of_store_host(what: str, words: str, tmp_path: Path) -> None:
    codes = deviate(tmp_path, "wrapper", f"is the host and {what}")
    assert codes == [0 if what == "ends" else -signal.SIGKILL, 1]
    said = said_by(tmp_path, 1)
    assert words in said
    assert re.search(r"rank 1: .*deviate.py:\d+, iteration \d+; waits for", said)


@pytest.mark.spec("LEDGER-03")
def test_stuck_device_is_detected(tmp_path: Path) -> None:
    assert deviate(tmp_path, "wrapper", "has a stuck device") == [1, 0]
    said = said_by(tmp_path, 0)
    # Printed by the watchdog, and raised by the next collective.
    assert said.count("a collective between ranks [0, 1] cannot complete") == 2
    assert "rank 1: has ended, at the end of its program" in said


@pytest.mark.spec("LEDGER-08", "LEDGER-05")
def test_an_error_of_a_collective_of_torch_is_followed_by_the_same_report(tmp_path: Path) -> None:
    codes = deviate(tmp_path, "function", "reads a DTensor")
    assert codes == [1, -signal.SIGKILL]
    said = said_by(tmp_path, 0)
    assert "the error above comes from a collective that minifsdp did not issue" in said
    assert f"rank 1: has ended, {LOST}" in said


@pytest.mark.spec("LEDGER-18")
def test_wait_for_killed_rank_ends_with_message(tmp_path: Path) -> None:
    assert deviate(tmp_path, "wrapper", "is killed before a state dict") == [1, -signal.SIGKILL]
    said = said_by(tmp_path, 0)
    assert "state_dict() must be called by all of the ranks [0, 1]" in said
    assert f"rank 1: has ended, {LOST}" in said


@pytest.mark.spec("LEDGER-04", "LEDGER-07")
def test_a_process_that_ends_by_a_report_writes_it_to_one_file(tmp_path: Path) -> None:
    # The main thread of each rank waits in C++ while the other rank asks it.
    assert deviate(tmp_path, "wrapper", "leaves out") == [1, 1]
    files = sorted(tmp_path.glob("minifsdp-ledger-*.json"))
    assert ["rank0" in file.name for file in files] == [True, False]
    assert f"To draw the report: python -m minifsdp.ledger {files[0]}" in said_by(tmp_path, 0)
    done = run_module("minifsdp.ledger", str(files[0]), "--last", "6", folder=ROOT, environment=os.environ)
    assert done.returncode == 0, done.stderr
    assert "Where every rank is:" in done.stdout
    assert re.search(r"group \S+, epoch \d+ +rank 0 +rank 1", done.stdout)
    assert re.search(r"\d +>? +all-gather of 'a' in forward \(deviate.py:\d+\)", done.stdout)


@pytest.mark.spec("LEDGER-07")
def test_errors_that_the_program_catches_leave_no_file(tmp_path: Path) -> None:
    assert deviate(tmp_path, "wrapper", "catches that it swaps layers of other sizes") == [0, 0]
    assert [*tmp_path.glob("minifsdp-ledger-*")] == []


@pytest.mark.spec("LEDGER-12")
def test_errors_of_earlier_process_groups_are_removed(tmp_path: Path) -> None:
    pool.start_early()
    processes = start_ranks("new_groups", str(tmp_path), num_ranks=2, folder=tmp_path)
    for process in processes:
        process.join(60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert codes == [0, 0], said_by(tmp_path, 0) + said_by(tmp_path, 1)
    verdicts = 0
    for rank in range(2):
        lines = (tmp_path / str(rank) / "stdout").read_text().splitlines()
        assert [line for line in lines if "caught" not in line] == ["1", "left 0"] * 2
        verdicts += lines.count("caught True")
    assert verdicts >= 2


@pytest.mark.spec("LEDGER-15")
@pytest.mark.parametrize("what", ["leaves out", "asks for a state dict"])
def test_wrapped_torch_groups_still_detect_divergent_ranks(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert deviate(tmp_path, "wrapper", what) == [1, 1]


# Each fault at each stage once; APIs, shardings, victims and stores alternate. All: python -m spec_tools.faults
SOME = [
    Cell(
        APIS[(i + j) % 2],
        "hybrid" if (i + 2 * j) % 5 == 0 else "full",
        VICTIMS[(i + j // 2) % 2],
        fault,
        stage,
        "of rank 0" if (2 * i + j) % 9 == 0 else "of torchrun",
    )
    for i, fault in enumerate(FAULTS)
    for j, stage in enumerate(STAGES)
]


@pytest.mark.spec("LEDGER-09", "LEDGER-02", "LEDGER-05", "FAULT-01", "FAULT-02", "FAULT-03")
@pytest.mark.parametrize("fault", FAULTS)
def test_other_ranks_end_in_time_and_print_all_positions(fault: str) -> None:
    outcomes = run_all([cell for cell in SOME if cell.fault == fault])
    assert [(outcome.cell, outcome.problem) for outcome in outcomes if outcome.problem] == []


@pytest.mark.spec("FAULT-01")
def test_disk_check_reports_damaged_or_outdated_newest_checkpoint(tmp_path: Path) -> None:
    assert problem_about_disk(tmp_path, "") == ""
    assert problem_about_disk(tmp_path, "step-000001") == "the newest checkpoint should be step-000001, and is none"
    folder = tmp_path / "step-000001"
    folder.mkdir()
    (folder / "data").write_bytes(b"1234")
    seal = {"bytes": 4, "sha256": hashlib.sha256(b"1234").hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"files": {"data": seal}}))
    (tmp_path / "newest").write_text("step-000001")
    assert problem_about_disk(tmp_path, "step-000001") == ""
    (folder / "data").write_bytes(b"1235")
    assert problem_about_disk(tmp_path, "step-000001") == "data of step-000001 is damaged"
    (folder / "data").unlink()
    assert problem_about_disk(tmp_path, "step-000001") == "step-000001 should have the files ['data'], and has []"


# Both APIs, both shardings, both victims and both moments. All: python -m spec_tools.faults.restarts
SOME_RESTARTS = [
    Restart("wrapper", "FULL_SHARD", "is killed", 1, "in a step"),
    Restart("fully_shard", "FULL_SHARD", "raises", 0, "in a step"),
    Restart("fully_shard", "FULL_SHARD", "is killed", 0, "in a save"),
    Restart("wrapper", "HYBRID_SHARD", "exits", 3, "in a save"),
]


@pytest.mark.spec("LEDGER-10")
def test_job_under_torchrun_resumes_from_last_checkpoint() -> None:
    problems = [problem for _, problem in restarts.run_all(SOME_RESTARTS)]
    assert problems == [""] * len(SOME_RESTARTS)


@pytest.mark.spec("LEDGER-09")
def test_fault_record_contains_wrong_outcomes() -> None:
    (cell, *_) = every_cell()
    wrong = json.loads(matrix.written({"timeout": 4.0}, matrix.rows_of([Outcome(cell, 1.0, "it hangs")])))["rows"]
    assert wrong == {matrix.kind_of(cell): {cell.stage: {cell.fault: None}}}


@pytest.mark.spec("LEDGER-10")
def test_restart_record_has_every_job_and_all_resumed() -> None:
    jobs = json.loads(restarts.RECORD.read_text())["jobs"]
    assert [Restart(**{name: job[name] for name in job if name != "seconds"}) for job in jobs] == [
        *restarts.every_restart()
    ]
    assert all(0 < job["seconds"] < restarts.LIMIT for job in jobs)


# --- the record in the documentation ---


@pytest.mark.spec("LEDGER-09", "FAULT-01", "FAULT-02", "FAULT-03")
def test_record_has_every_fault_at_every_stage_of_every_kind_of_training_without_failure() -> None:
    rows = json.loads(matrix.RECORD.read_text())["rows"]
    there = {(kind, stage, fault) for kind in rows for stage in rows[kind] for fault in rows[kind][stage]}
    expected = {(matrix.kind_of(cell), cell.stage, cell.fault) for cell in cells.in_turns()}
    assert expected - there == set()
    # For the last rank and for rank 0; at every stage also with the store on rank 0.
    assert len({(stage, fault, kind.split(",")[0]) for kind, stage, fault in there}) == 2 * len(STAGES) * len(FAULTS)
    assert len([kind for kind, _, _ in there if kind.endswith("the store on rank 0")]) == 2 * len(STAGES)
    seconds = [each for of_kind in rows.values() for row in of_kind.values() for each in row.values()]
    assert all(each is not None and 0 <= each < cells.LIMIT for each in seconds)
