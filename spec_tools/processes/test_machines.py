"""Two machines: trainings on both, and a job whose link is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from minifsdp_tools.cost import sent_by_link
from spec_tests.waiting import comes_true
from spec_tools.processes import kills, train
from spec_tools.processes.faults import whole_checkpoints
from spec_tools.processes.machine_training import CASES, PER_MACHINE, Case
from spec_tools.processes.machines import NotAllowedError, TwoMachines
from spec_tools.processes.ranks import ROOT, start

RATE = 1e9
OVERHEAD = 1.02  # headers, confirmations, and the messages that are not part of the step
JOB_LIMIT = 480.0  # seconds
REPORT = "Where every rank is:"


@pytest.fixture(scope="module")
def machines() -> Iterator[TwoMachines]:
    try:
        with TwoMachines(RATE) as created:
            yield created
    except NotAllowedError as reason:
        pytest.skip(f"needs network namespaces: {reason}")


# ---- training ----

Results = dict[Case, tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def results(machines: TwoMachines, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The result of each case on one machine and on two machines."""
    folder = tmp_path_factory.mktemp("training")
    one, two = folder / "one", folder / "two"
    script = str(ROOT / "spec_tools" / "processes" / "machine_training.py")
    jobs = machines.torchrun(script, str(two), "3")
    program = "spec_tools.processes.machine_training"
    with start(program, str(one), "3", folder=folder / "out", num_ranks=4) as ranks:
        assert ranks.wait(JOB_LIMIT) == [0, 0, 0, 0], ranks.all_errors()
    assert [job.wait(JOB_LIMIT) for job in jobs] == [0, 0]
    of_both = (json.loads(file.read_text()) for file in (one, two))
    return dict(zip(CASES, zip(*of_both, strict=True), strict=True))


@pytest.mark.spec("MACHINES-03")
def test_losses_equal_those_of_one_machine(results: Results) -> None:
    (first, _), *_ = results.values()
    for one, two in results.values():
        assert two["losses"] == one["losses"] == pytest.approx(first["losses"], rel=1e-5)
        assert len(set(two["losses"])) == 3


@pytest.mark.spec("MACHINES-04", "MACHINES-05", "MACHINES-06")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_link_carries_calculated_bytes_and_no_step_is_faster(case: Case, results: Results) -> None:
    sent = sent_by_link(case.job(), PER_MACHINE)
    calculated = PER_MACHINE * sum(one.between for one in sent.values())
    if case.transport:
        # gloo sends around a ring, and its reduce-scatter sends twice as much.
        calculated += PER_MACHINE * sent["RS"].between
    measured = results[case][1]
    for num_bytes in measured["sent"]:
        assert calculated < num_bytes < OVERHEAD * calculated
        assert min(measured["seconds"]) >= 8 * num_bytes / OVERHEAD / RATE


@pytest.mark.spec("MACHINES-05")
@pytest.mark.parametrize(("by_messages", "leaving"), [(True, 4 / 7), (False, 2 / 8)])
def test_direct_messages_leave_a_machine_more_often_than_hops_of_a_ring(by_messages: bool, leaving: float) -> None:
    """With eight ranks, a rank sends to 4 of 7 others directly, and 2 of 8 hops of a ring leave a machine."""
    full, hybrid = Case("wrapper", "FULL_SHARD").job(), Case("wrapper", "HYBRID_SHARD").job()
    sent = sent_by_link(replace(full, num_shards=8, by_messages=by_messages), 4)
    for one in (sent["AG"], sent["RS"]):
        assert one.between == pytest.approx(leaving * (one.between + one.within))
    # Copies on each machine: only the rings of all-reduces leave it.
    sent = sent_by_link(replace(hybrid, num_shards=4, num_replicas=2, by_messages=by_messages), 4)
    assert sent["AG"].between == sent["RS"].between == sent["AR"].within == 0
    assert sent["AR"].between > 0


# ---- a link that is cut in a step, and after the restart in a save ----

MOMENTS = [
    train.Moment("in a step", "loss", 3, victim=2, fault="is cut off"),
    train.Moment("in a save", "written", 0, victim=2, fault="is cut off"),
]
OPTIONS = ["--api=wrapper", "--strategy=FULL_SHARD"]


@pytest.fixture(scope="module")
def reports(machines: TwoMachines, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """The folder of the job, and for each cut the errors of each rank."""
    folder = tmp_path_factory.mktemp("cut")
    moments = json.dumps([asdict(moment) for moment in MOMENTS])
    jobs = machines.torchrun(
        *("--max-restarts=4", "--monitor-interval=0.1", train.__file__, str(folder), "sharded", moments, *OPTIONS)
    )
    errors = []
    for number in range(2):
        assert comes_true(lambda: (folder / f"struck-{number}").exists(), JOB_LIMIT), errors_of_ranks(folder, number)
        assert whole_checkpoints(folder / "runs") == ["step-000002"]
        machines.cut()
        (folder / f"cut-{number}").touch()
        each_machine_reports = comes_true(lambda: all(map(any, reported(folder, number))), JOB_LIMIT)
        # When a rank has ended, its launcher ends the other rank of the machine, which may not have reported yet.
        comes_true(lambda: all(map(all, reported(folder, number))), 10.0)
        errors.append(errors_of_ranks(folder, number))
        assert each_machine_reports, errors[-1]
        machines.restore()
    assert [job.wait(JOB_LIMIT) for job in jobs] == [0, 0]
    return folder, errors


def errors_of_ranks(folder: Path, number: int) -> list[str]:
    """The standard error of each rank in the start with this number."""
    files = [folder / f"errors-{number}-{rank}" for rank in range(4)]
    return [file.read_text() if file.exists() else "" for file in files]


def reported(folder: Path, number: int) -> list[list[bool]]:
    """For each machine, which of its ranks have reported in the start with this number."""
    found = [REPORT in text for text in errors_of_ranks(folder, number)]
    return [found[:PER_MACHINE], found[PER_MACHINE:]]


@pytest.mark.spec("MACHINES-07")
def test_ranks_report_a_link_that_fails_in_a_step(reports: tuple[Path, list[list[str]]]) -> None:
    _, (errors, _) = reports
    for rank, text in enumerate(errors):
        if REPORT not in text:
            continue
        assert re.search(rf"rank {rank}: the \S+ of \S+ between ranks \[0, 1, 2, 3\] failed: .*", text), text
        assert f"{int(train.CUT_TIMEOUT * 1000)}ms" in text or "Connection closed by peer" in text, text
        said = text.partition(REPORT)[2]
        if rank < PER_MACHINE:
            assert "ranks 2, 3: no answer: " in said, text
            assert "its machine is lost" in said
        else:
            # Rank 3 may still be in its forward pass when rank 2 reaches the cut.
            assert re.search(rf"rank {rank}: in (forward|backward), \S+, iteration 4;", said), text
            assert "Its host is stopped or out of reach." in said


@pytest.mark.spec("MACHINES-08")
def test_ranks_report_a_link_that_fails_in_a_save(reports: tuple[Path, list[list[str]]]) -> None:
    """The incomplete checkpoint is not used: the fixture checks that step 2 is the only one after each cut."""
    _, (_, errors) = reports
    for rank, text in enumerate(errors):
        if REPORT not in text:
            continue
        assert f"rank {rank}: the error above comes from a collective that minifsdp did not issue" in text, text
        assert "/torch/distributed/checkpoint/" in text
        lost = "ranks 2, 3: no answer: " if rank < PER_MACHINE else "Its host is stopped or out of reach."
        assert lost in text.partition(REPORT)[2], text


@pytest.mark.spec("MACHINES-09")
def test_job_continues_from_its_last_complete_checkpoint(reports: tuple[Path, list[list[str]]], tmp_path: Path) -> None:
    folder, _ = reports
    losses = kills.uninterrupted("wrapper", "FULL_SHARD", 4)
    assert json.loads((folder / "result").read_text()) == {"losses": losses, "resumed at": [2]}
    # Two ranks on one machine continue, too.
    (tmp_path / "runs").mkdir()
    (folder / "runs" / "step-000004").rename(tmp_path / "runs" / "step-000004")
    result = kills.finished("wrapper", "sharded", tmp_path)
    assert result["resumed at"] == [4]
    assert result["losses"] == pytest.approx(losses, rel=1e-5)
    assert result["losses"][:4] == losses[:4]
