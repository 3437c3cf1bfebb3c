"""Runs cells of the matrix, and judges them.

A cell is good if

* every rank but the faulty one ends in time, with a status that is not 0, after an error that tells where every rank is
  and what has become of the faulty one;
* every checkpoint that was there is whole, and the newest is the one that it should be;
* the job, started again as torchrun starts it again, goes on from it, and has the losses of a job in which nothing has
  happened, to the last bit.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from minifsdp.ledger.report import GONE, LOST, SILENT
from spec_tests.faults.job import DOORS, FAULTS, SHARDINGS, STAGES, STEPS, TIMEOUT, TO_MEET
from spec_tests.harness import pool
from spec_tests.harness.programs import start_module
from spec_tests.waiting import comes_true

# The group's time-out, the answers of other ranks, last words, and a machine that does other things as well.
LIMIT = TIMEOUT + 16.0
# On a busy machine a rank may come to its fault later than others wait for it. Then nothing was tried.
ATTEMPTS = 3
ROOT = Path(__file__).resolve().parents[2]
VICTIMS = ("last rank", "rank 0")
# Where the store of `torch.distributed` lives: torchrun's agent has it, or rank 0, which takes it along when it ends.
STORES = ("of torchrun", "of rank 0")
# What the report says of the faulty rank.
SAYS = {
    "raises": "has ended, by ValueError: a bad batch",
    "exits": "has ended, at the end of its program",
    "is killed": f"has ended, {LOST}",
    "is stopped": "no answer: it is stopped",
    "is slow": r"STAGE\.py:1, iteration \d+; (waits for|last sent: )",
}
# What the others wait for then, or have sent in vain; what the faulty rank has sent just before may be lost on its way.
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
    """One fault of one rank at one stage, in one kind of training."""

    door: str
    sharding: str
    victim: str
    fault: str
    stage: str
    store: str = "of torchrun"

    @property
    def num_ranks(self) -> int:
        return SHARDINGS[self.sharding]

    @property
    def faulty(self) -> int:
        return 0 if self.victim == "rank 0" else self.num_ranks - 1

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.num_ranks) if rank != self.faulty]


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        cell: which.
        seconds: from the fault until the last survivor had ended.
        complaint: what is not as it should be; empty if all is.
    """

    cell: Cell
    seconds: float
    complaint: str


def every_cell() -> Iterator[Cell]:
    """All of them with torchrun's store; with rank 0's one of each victim and stage, the rest in turn."""
    for door, sharding, victim, stage, fault in itertools.product(DOORS, SHARDINGS, VICTIMS, STAGES, FAULTS):
        yield Cell(door, sharding, victim, fault, stage)
    kinds = itertools.cycle(itertools.product(DOORS, SHARDINGS))
    for victim, (number, stage) in itertools.product(VICTIMS, enumerate(STAGES)):
        yield Cell(*next(kinds), victim, FAULTS[number % len(FAULTS)], stage, "of rank 0")


def in_turns() -> Iterator[Cell]:
    """Half of those with torchrun's store: every fault at every stage of every kind of training, victims in turn."""
    for cell in every_cell():
        axes = ((DOORS, cell.door), (SHARDINGS, cell.sharding), (FAULTS, cell.fault), (STAGES, cell.stage))
        number = sum([*names].index(name) for names, name in axes)
        if cell.store == "of rank 0" or VICTIMS[number % 2] == cell.victim:
            yield cell


def run_all(cells: Iterable[Cell], at_once: int = 6, tell: Callable[[Outcome], object] | None = None) -> list[Outcome]:
    """Their outcomes, in order. Ranks that wait take no time of the processor, so some cells are run at once."""
    pool.start_early()
    cells = list(cells)
    with ThreadPoolExecutor(at_once) as threads:
        kinds = {(cell.door, cell.sharding): None for cell in cells}
        curves = dict(zip(kinds, threads.map(lambda kind: undisturbed(*kind), kinds), strict=True))
        return list(threads.map(lambda cell: run(cell, curves[cell.door, cell.sharding], tell), cells))


def undisturbed(door: str, sharding: str) -> list[float]:
    """The losses of a job in which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        losses: list[float] = _told(Cell(door, sharding, "last rank", "none", ""), Path(folder))
        assert len({*losses}) == STEPS, losses
        return losses


def run(cell: Cell, losses: list[float], tell: Callable[[Outcome], object] | None = None) -> Outcome:
    """Runs one cell, and the job once more.

    Args:
        cell: which.
        losses: those of an undisturbed job.
        tell: is told at once.
    """
    for attempt in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as kept:
            folder = Path(kept)
            seconds, complaint = _first_life(cell, folder)
            if not (folder / "struck").exists() and attempt < ATTEMPTS - 1:
                continue
            complaint = complaint or complaint_about_disk(folder / "runs", STAGES[cell.stage])
            if not complaint and (told := _told(cell, folder)) != losses:
                complaint = f"the losses of the job that was started again are {told}, and should be {losses}"
            break
    outcome = Outcome(cell, seconds, complaint)
    if tell is not None:
        tell(outcome)
    return outcome


def _first_life(cell: Cell, folder: Path) -> tuple[float, str]:
    with _Ranks(cell, cell.fault, folder) as processes:
        victim = processes[cell.faulty]
        comes_true(lambda: (folder / "struck").exists() or not victim.is_alive(), TO_MEET)
        begun = time.time()
        for rank in cell.survivors:
            processes[rank].join(max(0.0, begun + LIMIT - time.time()))
        return time.time() - begun, _complaint(cell, [processes[rank].exitcode for rank in cell.survivors], folder)


def _told(cell: Cell, folder: Path) -> Any:
    """The losses that the job tells which is started in ``folder`` and in which nothing happens; or its last words."""
    again = folder / "again"
    again.mkdir()
    with _Ranks(cell, "none", folder, again) as processes:
        for process in processes:
            process.join(2 * TO_MEET)
        if [process.exitcode for process in processes] != [0] * cell.num_ranks:
            return "\n".join(said_by(again, rank) for rank in range(cell.num_ranks))
    return json.loads((folder / "told").read_text())


class _Ranks:
    """The processes of a life of the job; in the end they are gone."""

    def __init__(self, cell: Cell, fault: str, folder: Path, outputs: Path | None = None) -> None:
        # Every life has a store of its own, as under torchrun.
        hosts = cell.store == "of torchrun"
        self.store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), False) if hosts else None
        arguments = (cell.door, cell.sharding, fault, cell.stage, str(cell.faulty), str(folder))
        port = self.store.port if self.store else None
        self.processes = start_ranks(
            "job", *arguments, num_ranks=cell.num_ranks, folder=outputs or folder, port_of_store=port
        )

    def __enter__(self) -> list[Any]:
        return self.processes

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def start_ranks(
    program: str, *arguments: str, num_ranks: int, folder: Path, port_of_store: int | None = None
) -> list[Any]:
    """The processes of a program of this folder, each with an output in ``folder``, by its rank.

    Args:
        program: its name.
        arguments: its command line.
        num_ranks: how many ranks.
        folder: for their outputs, and for what the ledger writes.
        port_of_store: of a store that lives outside of the ranks, as torchrun's does; else rank 0 has it.
    """
    processes, port = [], port_of_store or pool.free_port()
    for rank in range(num_ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "MINIFSDP_LEDGER_DIR": folder}
        place |= {"TORCHELASTIC_USE_AGENT_STORE": "True"} if port_of_store else {}
        output = folder / str(rank)
        output.mkdir()
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        module = f"spec_tests.faults.{program}"
        processes.append(start_module(module, *arguments, folder=ROOT, environment=environment, output=output))
    return processes


def _complaint(cell: Cell, codes: list[int | None], folder: Path) -> str:
    if not (folder / "struck").exists():
        return "the fault never came:\n" + said_by(folder, cell.faulty)
    told = {rank: said_by(folder, rank) for rank in cell.survivors}
    for (rank, said), code in zip(told.items(), codes, strict=True):
        if code is None:
            return f"rank {rank} has not ended:\n{said}"
        if code == 0:
            return f"rank {rank} has ended as if nothing had happened:\n{said}"
        if "Where every rank is" not in said and not _is_told_by_torch(cell, said):
            return f"rank {rank} does not tell where every rank is:\n{said}"
    if not any(_says_what_has_become(cell, said) for said in told.values()):
        return "no rank tells what has become of the faulty one:\n" + next(iter(told.values()))
    return ""


def _is_told_by_torch(cell: Cell, said: str) -> bool:
    """What a rank raises while all of them write or read files is gathered by torch, and raised on every rank."""
    cause = {"raises": "ValueError: a bad batch", "exits": "SystemExit: 0"}.get(cell.fault)
    ranks = f"CheckpointException ranks:dict_keys([{cell.faulty}])"
    return cell.stage.startswith("inside") and cause is not None and ranks in said and cause in said


def _says_what_has_become(cell: Cell, said: str) -> bool:
    """Whether a survivor's last words say it of the faulty rank, and name the unit that the others wait for."""
    takes_store_along = (
        cell.store == "of rank 0" and cell.victim == "rank 0" and cell.fault in ("is killed", "is stopped")
    )
    if takes_store_along:
        return GONE in said or SILENT in said
    what = SAYS[cell.fault].replace("STAGE", cell.stage)
    says = re.search(rf"rank {cell.faulty}: {what}", said) and re.search(WAITED_FOR.get(cell.stage, ""), said)
    return says is not None or _is_told_by_torch(cell, said)


def complaint_about_disk(runs: Path, newest: str) -> str:
    """Whether something that is complete by its name is not so by its contents, or the newest is not this one."""
    for checkpoint in sorted(runs.glob("step-*")):
        listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
        there = sorted({path.name for path in checkpoint.iterdir()} - {"manifest.json"})
        if there != sorted(listed):
            return f"{checkpoint.name} should have the files {sorted(listed)}, and has {there}"
        for name, seal in listed.items():
            contents = (checkpoint / name).read_bytes()
            if [len(contents), hashlib.sha256(contents).hexdigest()] != [seal["bytes"], seal["sha256"]]:
                return f"{name} of {checkpoint.name} is damaged"
    found = (runs / "newest").read_text() if (runs / "newest").exists() else ""
    return "" if found == newest else f"the newest checkpoint should be {newest or 'none'}, and is {found or 'none'}"


def said_by(folder: Path, rank: int) -> str:
    """The end of what a rank has written to its standard error."""
    return (folder / str(rank) / "stderr").read_text()[-6000:]
