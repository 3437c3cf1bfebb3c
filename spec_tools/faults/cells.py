"""Runs and checks cells of the matrix.

A cell passes if

* every rank except the faulty one ends in time with a nonzero status, after an error that reports the position of every
  rank and the state of the faulty one;
* every existing checkpoint is complete, and the newest is the expected one;
* the job, restarted as torchrun restarts it, continues from that checkpoint, and its losses are bitwise equal to those
  of a job without a fault.
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

from minifsdp.watchdog.report import GONE, LOST, SILENT
from spec_tests.harness import pool
from spec_tests.harness.programs import start_module
from spec_tests.ports import free_port
from spec_tests.waiting import comes_true
from spec_tools.faults.job import APIS, FAULTS, SHARDINGS, STAGES, STEPS, TIMEOUT, TO_MEET

# The group's time-out, the answers of other ranks, exit records, and a busy machine.
LIMIT = TIMEOUT + 16.0
# On a busy machine a rank can reach its fault after the others have timed out. Then the cell is tried again.
ATTEMPTS = 3
ROOT = Path(__file__).resolve().parents[2]
VICTIMS = ("last rank", "rank 0")
# The host of the store of `torch.distributed`: torchrun's agent, or rank 0, with which the store ends.
STORES = ("of torchrun", "of rank 0")
# The report's text on the faulty rank.
SAYS = {
    "raises": "has ended, by ValueError: a bad batch",
    "exits": "has ended, at the end of its program",
    "is killed": f"has ended, {LOST}",
    "is stopped": "no answer: it is stopped",
    "is slow": r"STAGE\.py:1, iteration \d+; (waits for|last sent: )",
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
    """One fault of one rank at one stage, in one kind of training."""

    api: str
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
    """The result of a cell.

    Attributes:
        cell: the cell.
        seconds: from the fault until the last survivor had ended.
        problem: what is wrong; empty if nothing is.
    """

    cell: Cell
    seconds: float
    problem: str


def every_cell() -> Iterator[Cell]:
    """All cells with torchrun's store. With the store on rank 0, one per victim and stage; the other axes alternate."""
    for api, sharding, victim, stage, fault in itertools.product(APIS, SHARDINGS, VICTIMS, STAGES, FAULTS):
        yield Cell(api, sharding, victim, fault, stage)
    kinds = itertools.cycle(itertools.product(APIS, SHARDINGS))
    for victim, (number, stage) in itertools.product(VICTIMS, enumerate(STAGES)):
        yield Cell(*next(kinds), victim, FAULTS[number % len(FAULTS)], stage, "of rank 0")


def in_turns() -> Iterator[Cell]:
    """Half of the cells with torchrun's store: every fault, stage and kind of training. Victims alternate."""
    for cell in every_cell():
        axes = ((APIS, cell.api), (SHARDINGS, cell.sharding), (FAULTS, cell.fault), (STAGES, cell.stage))
        number = sum([*names].index(name) for names, name in axes)
        if cell.store == "of rank 0" or VICTIMS[number % 2] == cell.victim:
            yield cell


def run_all(cells: Iterable[Cell], at_once: int = 6, tell: Callable[[Outcome], object] | None = None) -> list[Outcome]:
    """The outcomes of cells, in order. Waiting ranks use no CPU time, so some cells run at once."""
    pool.start_early()
    cells = list(cells)
    with ThreadPoolExecutor(at_once) as threads:
        kinds = {(cell.api, cell.sharding): None for cell in cells}
        curves = dict(zip(kinds, threads.map(lambda kind: undisturbed(*kind), kinds), strict=True))
        return list(threads.map(lambda cell: run(cell, curves[cell.api, cell.sharding], tell), cells))


def undisturbed(api: str, sharding: str) -> list[float]:
    """The losses of a job without a fault."""
    with tempfile.TemporaryDirectory() as folder:
        losses: list[float] = _reported(Cell(api, sharding, "last rank", "none", ""), Path(folder))
        assert len({*losses}) == STEPS, losses
        return losses


def run(cell: Cell, losses: list[float], tell: Callable[[Outcome], object] | None = None) -> Outcome:
    """Runs one cell, and then the job again without a fault.

    Args:
        cell: the cell.
        losses: those of a job without a fault.
        tell: called with the outcome as soon as it is known.
    """
    for attempt in range(ATTEMPTS):
        with tempfile.TemporaryDirectory() as kept:
            folder = Path(kept)
            seconds, problem = _first_run(cell, folder)
            if not (folder / "struck").exists() and attempt < ATTEMPTS - 1:
                continue
            problem = problem or problem_about_disk(folder / "runs", STAGES[cell.stage])
            if not problem and (reported := _reported(cell, folder)) != losses:
                problem = f"the losses of the job that was started again are {reported}, and should be {losses}"
            break
    outcome = Outcome(cell, seconds, problem)
    if tell is not None:
        tell(outcome)
    return outcome


def _first_run(cell: Cell, folder: Path) -> tuple[float, str]:
    with _Ranks(cell, cell.fault, folder) as processes:
        victim = processes[cell.faulty]
        comes_true(lambda: (folder / "struck").exists() or not victim.is_alive(), TO_MEET)
        begun = time.time()
        for rank in cell.survivors:
            processes[rank].join(max(0.0, begun + LIMIT - time.time()))
        return time.time() - begun, _problem(cell, [processes[rank].exitcode for rank in cell.survivors], folder)


def _reported(cell: Cell, folder: Path) -> Any:
    """The losses of the job when it is restarted in ``folder`` without a fault, or the end of its error output."""
    again = folder / "again"
    again.mkdir()
    with _Ranks(cell, "none", folder, again) as processes:
        for process in processes:
            process.join(2 * TO_MEET)
        if [process.exitcode for process in processes] != [0] * cell.num_ranks:
            return "\n".join(said_by(again, rank) for rank in range(cell.num_ranks))
    return json.loads((folder / "result").read_text())


class _Ranks:
    """The processes of one run of the job. They are killed at the end of the block."""

    def __init__(self, cell: Cell, fault: str, folder: Path, outputs: Path | None = None) -> None:
        # Every run has its own store, as under torchrun.
        hosts = cell.store == "of torchrun"
        self.store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), False) if hosts else None
        arguments = (cell.api, cell.sharding, fault, cell.stage, str(cell.faulty), str(folder))
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
    """Starts a program of this folder on several ranks. Each rank writes its output to a subfolder of ``folder``.

    Args:
        program: its name.
        arguments: its command line.
        num_ranks: number of ranks.
        folder: for the outputs, and for the files of the collective log.
        port_of_store: of a store outside the ranks, like that of torchrun; by default rank 0 hosts the store.
    """
    processes, port = [], port_of_store or free_port()
    for rank in range(num_ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "MINIFSDP_LEDGER_DIR": folder}
        place |= {"TORCHELASTIC_USE_AGENT_STORE": "True"} if port_of_store else {}
        output = folder / str(rank)
        output.mkdir()
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        module = f"spec_tools.faults.{program}"
        processes.append(start_module(module, *arguments, folder=ROOT, environment=environment, output=output))
    return processes


def _problem(cell: Cell, codes: list[int | None], folder: Path) -> str:
    if not (folder / "struck").exists():
        return "the fault did not occur:\n" + said_by(folder, cell.faulty)
    reported = {rank: said_by(folder, rank) for rank in cell.survivors}
    for (rank, said), code in zip(reported.items(), codes, strict=True):
        if code is None:
            return f"rank {rank} has not ended:\n{said}"
        if code == 0:
            return f"rank {rank} has ended without an error:\n{said}"
        if "Where every rank is" not in said and not _is_raised_by_torch(cell, said):
            return f"rank {rank} does not report the position of every rank:\n{said}"
    if not any(_reports_faulty_rank(cell, said) for said in reported.values()):
        return "no rank reports the state of the faulty rank:\n" + next(iter(reported.values()))
    return ""


def _is_raised_by_torch(cell: Cell, said: str) -> bool:
    """Whether torch raised the error. It collects errors of writing and reading files and raises them on all ranks."""
    cause = {"raises": "ValueError: a bad batch", "exits": "SystemExit: 0"}.get(cell.fault)
    ranks = f"CheckpointException ranks:dict_keys([{cell.faulty}])"
    return cell.stage.startswith("inside") and cause is not None and ranks in said and cause in said


def _reports_faulty_rank(cell: Cell, said: str) -> bool:
    """Whether a survivor's error reports the state of the faulty rank, and the unit that the others wait for."""
    takes_store_along = (
        cell.store == "of rank 0" and cell.victim == "rank 0" and cell.fault in ("is killed", "is stopped")
    )
    if takes_store_along:
        return GONE in said or SILENT in said
    what = SAYS[cell.fault].replace("STAGE", cell.stage)
    says = re.search(rf"rank {cell.faulty}: {what}", said) and re.search(WAITED_FOR.get(cell.stage, ""), said)
    return says is not None or _is_raised_by_torch(cell, said)


def problem_about_disk(runs: Path, newest: str) -> str:
    """A problem if a checkpoint that is marked complete is not, or if the newest checkpoint is not ``newest``."""
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
    """The end of a rank's standard error."""
    return (folder / str(rank) / "stderr").read_text()[-6000:]
