"""Runs cells of the matrix, and judges them.

A cell is good if every rank but the faulty one ends in time, with a status that is not 0, after an error that tells
where every rank is and what has become of the faulty one; and if the checkpoint from before is as it was.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_tests.faults.job import DOORS, FAULTS, SHARDINGS, STAGES, TIMEOUT
from spec_tests.harness import pool
from spec_tests.harness.programs import start_module
from tutorials.gpt.manifest import read_manifest

# The group's time-out, the answers of other ranks, last words, and a machine that does other things as well.
LIMIT = TIMEOUT + 12.0
ROOT = Path(__file__).resolve().parents[2]
# What the report says of the faulty rank.
SAYS = {
    "raises": "has ended, by ValueError: a bad batch",
    "exits": "has ended, at the end of its program",
    "is killed": "says nothing: it was killed",
    "is stopped": "says nothing: it was killed or is stopped",
    "is slow": "job.py:",
}


@dataclass(frozen=True)
class Cell:
    """One fault at one stage, in one kind of training."""

    door: str
    sharding: str
    fault: str
    stage: str

    @property
    def num_ranks(self) -> int:
        return SHARDINGS[self.sharding]


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
    for names in itertools.product(DOORS, SHARDINGS, FAULTS, STAGES):
        yield Cell(*names)


def run_all(cells: Iterable[Cell], at_once: int = 6) -> list[Outcome]:
    """Their outcomes, in order. Ranks that wait take no time of the processor, so some cells are run at once."""
    pool.start_early()
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(run, cells))


def run(cell: Cell) -> Outcome:
    """Runs one cell."""
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        arguments = (cell.door, cell.sharding, cell.fault, cell.stage, kept)
        processes = start_ranks("job", *arguments, num_ranks=cell.num_ranks, folder=folder)
        try:
            *survivors, victim = processes
            until = time.monotonic() + 60.0
            while not (folder / "struck").exists() and time.monotonic() < until and victim.is_alive():
                time.sleep(0.05)
            begun = time.time()
            for process in survivors:
                process.join(max(0.0, begun + LIMIT - time.time()))
            seconds = time.time() - begun
            complaint = _complaint(cell, survivors, folder)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return Outcome(cell, seconds, complaint)


def start_ranks(program: str, *arguments: str, num_ranks: int, folder: Path) -> list[Any]:
    """The processes of a program of this folder, each with an output in ``folder``, by its rank."""
    processes, port = [], pool.free_port()
    for rank in range(num_ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "MINIFSDP_LEDGER_DIR": folder}
        output = folder / str(rank)
        output.mkdir()
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        module = f"spec_tests.faults.{program}"
        processes.append(start_module(module, *arguments, folder=ROOT, environment=environment, output=output))
    return processes


def _complaint(cell: Cell, survivors: list[Any], folder: Path) -> str:
    if not (folder / "struck").exists():
        return "the fault never came:\n" + said_by(folder, cell.num_ranks - 1)
    for rank, process in enumerate(survivors):
        said = said_by(folder, rank)
        if process.exitcode is None:
            return f"rank {rank} has not ended:\n{said}"
        if process.exitcode == 0:
            return f"rank {rank} has ended as if nothing had happened:\n{said}"
        if "Where every rank is" not in said:
            return f"rank {rank} does not tell where every rank is:\n{said}"
    if not any(SAYS[cell.fault] in said_by(folder, rank) for rank in range(len(survivors))):
        return "no rank tells what has become of the faulty one:\n" + said_by(folder, 0)
    if STAGES.index(cell.stage) > STAGES.index("first forward"):
        read_manifest(folder / "runs" / "step-000001")
        if (folder / "runs" / "newest").read_text() != "step-000001" and cell.stage != "load":
            return "the checkpoint is not the one from before"
    return ""


def said_by(folder: Path, rank: int) -> str:
    """The end of what a rank has written to its standard error."""
    return (folder / str(rank) / "stderr").read_text()[-6000:]
