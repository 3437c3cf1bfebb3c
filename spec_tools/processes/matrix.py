"""Each fault at each stage of a training, and what the other ranks and the restarted job do.

A cell passes if

* every rank except the faulty one ends in time with a nonzero status, after an error that reports the position of every
  rank and the state of the faulty one;
* every existing checkpoint is complete, and the newest is the expected one;
* the job, restarted as torchrun restarts it, continues from that checkpoint, and its losses are bitwise equal to those
  of a job without a fault.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from minifsdp.watchdog.report import GONE, LOST, SILENT
from spec_tests.waiting import comes_true
from spec_tools.processes.faults import FAULTS, whole_checkpoints
from spec_tools.processes.ranks import result_of, start
from spec_tools.processes.stages import APIS, SHARDINGS, STAGES, STEPS, TIMEOUT, TO_MEET

# The group's time-out, the answers of other ranks, exit records, and a busy machine.
LIMIT = TIMEOUT + 16.0
# On a busy machine a rank can reach its fault after the others have timed out. Then the cell is tried again.
ATTEMPTS = 3
VICTIMS = ("last rank", "rank 0")
# The report's text on the faulty rank.
SAYS = {
    "raises": "has ended, by ValueError: a bad batch",
    "exits": "has ended, at the end of its program",
    "is killed": f"has ended, {LOST}",
    "is stopped": "no answer: it is stopped",
    "is slow": r"faults\.py:\d+, iteration \d+; (waits for|last sent: )",
}
# The collective that the other ranks wait for. The faulty rank's last messages before its fault can be lost.
WAITED_FOR = {
    "first forward": "all-gather of '2'",
    "gather": "all-gather of '0'",
    "compute": "all-gather of '2'",
    "backward": "all-gather of '2'",
    "optimizer step": "all-gather of '0'|all_reduce",
    "reduce": "reduce-scatter of '2'|all-gather of '1'",
}


@dataclass(frozen=True)
class Cell:
    """One fault of one rank at one stage, in one kind of training.

    Attributes:
        hosts: whether rank 0 hosts the store of `torch.distributed`, which ends with it. Otherwise the store is outside
            the ranks, like that of torchrun's agent.
    """

    api: str
    sharding: str
    victim: str
    fault: str
    stage: str
    hosts: bool = False

    @property
    def faulty(self) -> int:
        return 0 if self.victim == "rank 0" else SHARDINGS[self.sharding] - 1

    @property
    def place(self) -> dict[str, Any]:
        """Where the ranks run. Every run has its own store, as under torchrun."""
        return {"num_ranks": SHARDINGS[self.sharding], "hosts": self.hosts}

    def command(self, fault: str, folder: Path) -> list[str]:
        """The program and its command line."""
        arguments = [self.api, self.sharding, fault, self.stage, str(self.faulty), str(folder)]
        return ["spec_tools.processes.stages", *arguments]

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(SHARDINGS[self.sharding]) if rank != self.faulty]


def groups() -> dict[str, list[Cell]]:
    """All cells, in groups with each stage once. The victims alternate."""
    kinds = list(itertools.product(APIS, SHARDINGS))
    found = {}
    for number, (fault, (api, sharding)) in enumerate(itertools.product(FAULTS, kinds)):
        found[f"{fault}, {api}, {sharding}"] = [
            Cell(api, sharding, VICTIMS[(number + number // 4 + of_stage) % 2], fault, stage)
            for of_stage, stage in enumerate(STAGES)
        ]
    for victim in VICTIMS:
        values = zip(itertools.cycle(kinds), itertools.cycle(FAULTS), STAGES, strict=False)
        found[f"{victim}, the store on rank 0"] = [
            Cell(*kind, victim, fault, stage, hosts=True) for kind, fault, stage in values
        ]
    return found


def problem_of(cell: Cell) -> str:
    """Runs one cell, and then the job again without a fault. Describes what is wrong; empty if nothing is."""
    problem = ""
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                fail(cell, folder)
                resume(cell, folder)
            except AssertionError as error:
                problem = f"{cell}: {error}"
                if not (folder / "struck").exists():
                    continue
                return problem
            return ""
    return problem


def fail(cell: Cell, folder: Path) -> None:
    """The job with its fault.

    Raises:
        AssertionError: a survivor has not ended, or has not reported the fault, or a checkpoint is wrong.
    """
    with start(*cell.command(cell.fault, folder), folder=folder, **cell.place) as ranks:
        victim = ranks.processes[cell.faulty]
        comes_true(lambda: (folder / "struck").exists() or not victim.is_alive(), TO_MEET)
        codes = ranks.wait(LIMIT, cell.survivors)
    assert (folder / "struck").exists(), f"the fault did not occur:\n{ranks.errors(cell.faulty)}"
    reported = [ranks.errors(rank) for rank in cell.survivors]
    for rank, said, code in zip(cell.survivors, reported, codes, strict=True):
        assert code is not None, f"rank {rank} has not ended:\n{said}"
        assert code != 0, f"rank {rank} has ended without an error:\n{said}"
        describes_all = "Where every rank is" in said or is_raised_by_torch(cell, said)
        assert describes_all, f"rank {rank} does not report the position of every rank:\n{said}"
    assert any(reports_faulty_rank(cell, said) for said in reported), f"none reports the faulty rank:\n{reported[0]}"
    whole = whole_checkpoints(folder / "runs")
    newest = whole[-1] if whole else ""
    assert newest == STAGES[cell.stage], f"the newest checkpoint is {newest}, and should be {STAGES[cell.stage]}"


def is_raised_by_torch(cell: Cell, said: str) -> bool:
    """Whether torch raised the error. It collects errors of writing and reading files and raises them on all ranks."""
    cause = {"raises": "ValueError: a bad batch", "exits": "SystemExit: 0"}.get(cell.fault)
    ranks = f"CheckpointException ranks:dict_keys([{cell.faulty}])"
    return cell.stage.startswith("inside") and cause is not None and ranks in said and cause in said


def reports_faulty_rank(cell: Cell, said: str) -> bool:
    """Whether a survivor's error reports the state of the faulty rank, and the unit that the others wait for."""
    if cell.hosts and cell.victim == "rank 0" and cell.fault in ("is killed", "is stopped"):
        # The store has ended, too.
        return GONE in said or SILENT in said
    says = re.search(f"rank {cell.faulty}: {SAYS[cell.fault]}", said)
    waits = re.search(WAITED_FOR.get(cell.stage, ""), said)
    return bool(says and waits) or is_raised_by_torch(cell, said)


def resume(cell: Cell, folder: Path) -> None:
    """Starts the job again without a fault. Its losses must be those of a job that never failed."""
    expected = undisturbed(cell.api, cell.sharding)
    found = finished(cell, folder)
    assert found == expected, f"the losses of the job that was started again are {found}, and should be {expected}"


def finished(cell: Cell, folder: Path) -> list[float]:
    """The losses of the job without a fault."""
    options = {"file": folder / "result", "folder": folder / "again", "limit": 2 * TO_MEET, **cell.place}
    losses: list[float] = result_of(*cell.command("none", folder), **options)
    return losses


@cache
def undisturbed(api: str, sharding: str) -> list[float]:
    """The losses of a job without a fault."""
    with tempfile.TemporaryDirectory() as folder:
        losses = finished(Cell(api, sharding, "last rank", "none", ""), Path(folder))
    assert len({*losses}) == STEPS, losses
    return losses
