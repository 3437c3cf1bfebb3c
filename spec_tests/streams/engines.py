"""Runs a program on an engine, intact or broken, and returns the outcome.

A broken engine is a copy of the package with one edit. A process can import only one engine, so each
run has a process of its own. It is forked from a server that has imported torch but not minifsdp. Copying, forking and
importing the package take about half a second::

    pytest ---- Engine(folder) ---- run(program) ----> process: import minifsdp from the folder, program, Outcome
                                                <----

The result of a run is an `Outcome`. `findings` compares the outcome of a broken engine with that of the intact one.

Spec: SIM-07.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import os
import pathlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from spec_tests.harness import pool, simulated
from spec_tests.harness.accounting import ROOT

__all__ = ["Outcome", "call", "findings", "num_overlaps", "run"]

LIMIT = 120.0  # seconds for one program
COLLECTIVES = ("all_gather", "allgather", "reduce_scatter", "allreduce", "broadcast")

WORLD = simulated.WORLD


@dataclass(frozen=True)
class Outcome:
    """The outcome of one program on one engine.

    Attributes:
        error: the exception that ended the program; ``None`` if it finished.
        races: the reports of the race checker.
        schedules: number of other orders that were tried.
        different: names of the orders with different results.
        bits: a digest of the results.
        stops: the places at which the CPU was stopped.
        peak: peak memory in bytes.
        num_overlaps: pairs of a collective and another operation that can run at the same time on NCCL.
        num_operations: number of operations.
    """

    error: str | None = None
    races: list[str] = field(default_factory=list)
    schedules: int = 0
    different: list[str] = field(default_factory=list)
    bits: str = ""
    stops: list[tuple[str, str]] = field(default_factory=list)
    peak: int = 0
    num_overlaps: int = 0
    num_operations: int = 0


def findings(here: Outcome, intact: Outcome) -> dict[str, str]:
    """The differences between an engine and the intact one: each way in which it is found, with a one-line report."""
    found = {}
    if here.error is not None:
        found["exception"] = here.error
    if here.races:
        found["collision"] = here.races[0]
    if here.different:
        found["other bits"] = f"{len(here.different)} of {here.schedules} schedules, first: {here.different[0]}"
    if here.error is None and here.bits != intact.bits:
        found["wrong values"] = "the results are not those of the intact engine"
    if len(here.stops) != len(intact.stops):
        found["stops"] = f"the CPU is stopped {len(here.stops)} times, not {len(intact.stops)}"
    if here.peak > intact.peak:
        found["peak"] = f"{here.peak} bytes at the peak, not {intact.peak}"
    if here.num_overlaps < intact.num_overlaps:
        what = "pairs of a collective and a computation may run at the same time"
        found["overlap"] = f"{here.num_overlaps} {what}, not {intact.num_overlaps}"
    return found


def run(program: str, folder: pathlib.Path = ROOT, num_schedules: int = 0) -> Outcome:
    """Runs a program of ``programs.py`` on the package in ``folder``, in a process of its own.

    Raises:
        RuntimeError: the process died or did not finish within the limit.
    """
    outcome: Outcome = call(__name__, "_run", folder, program, num_schedules)
    return outcome


def call(module: str, function: str, folder: pathlib.Path, *arguments: Any) -> Any:
    """Calls a function in a process of its own, which imports the package from ``folder``. Returns its result.

    Raises:
        RuntimeError: the process died or did not finish within the limit.
    """
    context = pool.fork_server()
    mine, its = context.Pipe(duplex=False)
    what = (module, function, *arguments)
    process = context.Process(target=_serve, args=(its, str(folder), what), daemon=True)
    process.start()
    its.close()
    try:
        if not mine.poll(LIMIT):
            raise RuntimeError(f"{what} has not ended in {LIMIT:g} s")
        return mine.recv()
    except EOFError as error:
        process.join()
        raise RuntimeError(f"{what}: the process died with exit code {process.exitcode}") from error
    finally:
        process.kill()
        process.join()
        mine.close()


# --- in the process ---


def _serve(pipe: Any, folder: str, what: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.path.insert(0, folder)
    simulated.install()
    module, function, *arguments = what
    importlib.import_module("spec_tests.streams.programs")
    where = str(sys.modules["minifsdp"].__file__)
    assert where.startswith(folder), f"minifsdp was imported from {where}"
    gc.collect()
    gc.freeze()
    pipe.send(getattr(importlib.import_module(module), function)(*arguments))
    pipe.close()
    # Skip the normal exit, because leftovers of a broken engine could block it.
    os._exit(0)


def _run(program: str, num_schedules: int) -> Outcome:
    return _outcome(importlib.import_module("spec_tests.streams.programs").PROGRAMS[program], num_schedules)


def _outcome(program: Any, num_schedules: int) -> Outcome:
    WORLD.begin()
    dist.init_process_group("simulated", rank=0, world_size=program.num_ranks, store=FakeStore())
    error, results = None, []
    with simulated.Log() as log:
        try:
            results = program.run()
        except Exception as caught:  # a broken engine can raise any error
            error = f"{type(caught).__name__}: {caught}"
    stops, peak = [*WORLD.stops.elements()], WORLD.memory.peak
    races = [str(race) for race in WORLD.races.values()]
    WORLD.synchronize()
    different = []
    if error is None and num_schedules:
        try:
            different = log.judge(results, num_schedules).different
        except AssertionError as wrong:
            different = [f"that of the program: {wrong}"]
    return Outcome(
        error,
        races,
        num_schedules,
        different,
        _digest(results),
        stops,
        peak,
        num_overlaps(log.operations),
        len(log.operations),
    )


def _digest(results: Sequence[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in results:
        found.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def num_overlaps(operations: Sequence[simulated.Operation]) -> int:
    """The number of pairs of a collective and another operation that can run at the same time on NCCL."""
    sent = [operation for operation in operations if operation.name.startswith(COLLECTIVES)]
    order = simulated.IssueOrder(operations)
    return sum(order.may_overlap(one, other) for one in sent for other in operations if other.stream)
