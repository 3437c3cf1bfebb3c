"""A link that fails in a step and in a save, and the job that continues from its checkpoint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spec_tools.kills import moments
from spec_tools.two_machines import interrupted
from spec_tools.two_machines.machines import ROOT, NotAllowedError, TwoMachines, torchrun
from spec_tools.two_machines.training import PER_MACHINE

SCRIPT = str(Path(__file__).with_name("interrupted.py"))
OPTIONS = ["--api=wrapper", "--strategy=FULL_SHARD"]
RANKS = range(4)
LIMIT = 480.0  # seconds for the job
# Seconds after the time-out of the groups in which all ranks must have ended, on a busy computer.
GRACE = 120.0
REPORT = "Where every rank is:"


@dataclass(frozen=True)
class Interrupted:
    """The output of a job whose link was cut twice.

    Attributes:
        folder: of the checkpoints and of the result.
        errors: for each cut, the standard error of each rank up to the moment when all ranks had reported.
        checkpoints: the checkpoints that were complete after each cut.
    """

    folder: Path
    errors: list[list[str]]
    checkpoints: list[list[str]]

    def result(self) -> Any:
        return json.loads((self.folder / "result").read_text())


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interrupted]:
    folder = tmp_path_factory.mktemp("cut")
    try:
        with TwoMachines(1e9, 1e-4) as machines:
            yield run(machines, folder)
    except NotAllowedError as reason:
        pytest.skip(f"needs network namespaces: {reason}")


def run(machines: TwoMachines, folder: Path) -> Interrupted:
    """Runs the job. After each cut, waits for the report of each rank, and restores the link."""
    command = ["--max-restarts=4", "--monitor-interval=0.1", SCRIPT, str(folder), *OPTIONS]
    found = Interrupted(folder, [], [])
    until = time.monotonic() + LIMIT
    jobs = machines.torchrun(command, folder / "logs", cwd=ROOT, env={"MINIFSDP_LEDGER_DIR": "off"})
    for number in range(interrupted.NUM_CUTS):
        while not (folder / f"cut-{number}").exists():
            assert time.monotonic() < until, "\n".join(errors_of_ranks(folder, number))
            assert jobs[0].poll() is None
            time.sleep(0.1)
        reports_until = time.monotonic() + interrupted.TIMEOUT + GRACE
        while not all(REPORT in text for text in errors_of_ranks(folder, number)):
            assert time.monotonic() < reports_until, "\n".join(errors_of_ranks(folder, number))
            time.sleep(0.1)
        found.errors.append(errors_of_ranks(folder, number))
        found.checkpoints.append(sorted(path.name for path in (folder / "runs").glob("step-*")))
        machines.link.restore()
    assert [each.wait(max(1.0, until - time.monotonic())) for each in jobs] == [0, 0]
    return found


def errors_of_ranks(folder: Path, number: int) -> list[str]:
    """The standard error of each rank in the runs after ``number`` cuts."""
    files = [sorted((folder / interrupted.ERRORS).glob(f"{number}-{rank}-*")) for rank in RANKS]
    return ["".join(path.read_text() for path in paths) for paths in files]


@pytest.mark.spec("MACHINES-07")
def test_each_rank_reports_a_link_that_fails_in_a_step(job: Interrupted) -> None:
    for rank, text in enumerate(job.errors[0]):
        assert re.search(rf"rank {rank}: the \S+ of \S+ between ranks \[0, 1, 2, 3\] failed: .*", text), text
        assert f"{int(interrupted.TIMEOUT * 1000)}ms" in text or "Connection closed by peer" in text, text
        said = text.partition(REPORT)[2]
        if rank < PER_MACHINE:
            assert "ranks 2, 3: no answer: " in said, text
            assert "its machine is lost" in said
        else:
            # Rank 3 may still be in its forward pass when rank 2 cuts the link.
            assert re.search(rf"rank {rank}: in (forward|backward), \S+, iteration {interrupted.CUT_IN};", said), text
            assert "Its host is stopped or out of reach." in said


@pytest.mark.spec("MACHINES-08")
def test_each_rank_reports_a_link_that_fails_in_a_save(job: Interrupted) -> None:
    for rank, text in enumerate(job.errors[1]):
        assert f"rank {rank}: the error above comes from a collective that minifsdp did not issue" in text, text
        assert "/torch/distributed/checkpoint/" in text
        lost = "ranks 2, 3: no answer: " if rank < PER_MACHINE else "Its host is stopped or out of reach."
        assert lost in text.partition(REPORT)[2], text
    # The first cut was after step 2. The save of step 4 was incomplete.
    assert job.checkpoints == [["step-000002"], ["step-000002"]]


@pytest.fixture(scope="module")
def losses(job: Interrupted, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of four ranks on one machine without an interruption."""
    work = tmp_path_factory.mktemp("undisturbed") / "work"
    outcome = moments.run(work, save=None, num_ranks=len(RANKS), options=OPTIONS)
    assert outcome.codes == [0, 0, 0, 0], outcome.outputs
    return outcome.losses


@pytest.mark.spec("MACHINES-09")
def test_job_continues_from_its_last_complete_checkpoint(job: Interrupted, losses: list[float]) -> None:
    assert job.result() == {"losses": losses, "begun at": [2]}


@pytest.mark.spec("MACHINES-09")
def test_two_ranks_on_one_machine_continue(job: Interrupted, losses: list[float], tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    (job.folder / "runs" / "step-000004").rename(runs / "step-000004")
    command = torchrun("--standalone", SCRIPT, str(tmp_path), *OPTIONS)
    subprocess.run(command, cwd=ROOT, timeout=LIMIT, check=True, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})
    result = json.loads((tmp_path / "result").read_text())
    assert result["begun at"] == [4]
    assert result["losses"] == pytest.approx(losses, rel=1e-5)
    assert result["losses"][:4] == losses[:4]
