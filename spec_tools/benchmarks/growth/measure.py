"""One point: times for sharding the model, for the first step, for a later step, and for a state dict.

Times are measured in a new process that has imported torch and minifsdp. As in practice, later imports of a library
are part of its first construction or its first step.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

# Imported here, and not when the first contender prepares its model.
import minifsdp  # noqa: F401
from spec_tests.engine.count_calls import calls_by_file
from spec_tools.benchmarks.contenders import Trained
from spec_tools.benchmarks.growth.points import FSDPS, Point
from spec_tools.benchmarks.workloads import Workload

__all__ = ["calls_per_step", "count", "join", "measure", "timed"]

NUM_WARM = 3
NUM_TIMED = 7
NUM_STATE_DICTS = 3


def join(num_ranks: int) -> None:
    """Makes this process rank 0 of a fake world."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """The time of ``action`` in milliseconds, and its result."""
    begin = time.perf_counter()
    result = action()
    return 1000 * (time.perf_counter() - begin), result


def _stepper(model: nn.Module, workload: Workload) -> Callable[[], None]:
    inputs, targets = workload.batches(0, 0)[0]

    def step() -> None:
        workload.loss(model(inputs), targets).backward()

    return step


def calls_per_step(contender: str, point: Point) -> int:
    """Python calls in a step after the warm-up, minus those of the plain model."""
    workload = point.workload()
    return _calls(_take(contender, workload).model, workload) - _calls(workload.model(), workload)


def count(contender: str, point: Point) -> dict[str, float]:
    """Only the ``calls`` of `measure`, which do not depend on the load; must run in a process of its own."""
    join(point.ranks)
    return {"calls": calls_per_step(contender, point) / point.units}


def _take(contender: str, workload: Workload) -> Trained:
    return FSDPS[contender].take(workload.model(), workload)


def _calls(model: nn.Module, workload: Workload) -> int:
    step = _stepper(model, workload)
    _warm_up(model, step)
    return calls_by_file(step).total()


def _warm_up(model: nn.Module, step: Callable[[], None]) -> None:
    for _ in range(NUM_WARM):
        step()
        model.zero_grad()


def _later(model: nn.Module, step: Callable[[], None]) -> float:
    milliseconds, _ = timed(step)
    model.zero_grad()
    return milliseconds


def measure(contender: str, point: Point) -> dict[str, float]:
    """All measurements of one point; must run in a process of its own, because it joins a fake world.

    Returns:
        ``construct``, ``first``, ``step`` and ``state_dict`` in milliseconds; and for each unit ``overhead``, the time
        of a step minus that of the plain model in microseconds, and ``calls``.
    """
    join(point.ranks)
    workload = point.workload()
    plain = workload.model()
    construct, trained = timed(lambda: FSDPS[contender].take(plain, workload))
    model, step = trained.model, _stepper(trained.model, workload)
    first, _ = timed(step)
    model.zero_grad()
    _warm_up(model, step)
    gc.collect()
    gc.disable()
    later, alone = _median_step(model, step), _median_of_plain(workload)
    state_dict = statistics.median(timed(model.state_dict)[0] for _ in range(NUM_STATE_DICTS))
    gc.enable()
    calls = (calls_by_file(step).total() - _calls(workload.model(), workload)) / point.units
    overhead = 1000 * (later - alone) / point.units
    times = {"construct": construct, "first": first, "step": later, "state_dict": state_dict}
    return {**times, "overhead": overhead, "calls": calls}


def _median_step(model: nn.Module, step: Callable[[], None]) -> float:
    return statistics.median(_later(model, step) for _ in range(NUM_TIMED))


def _median_of_plain(workload: Workload) -> float:
    model = workload.model()
    step = _stepper(model, workload)
    _warm_up(model, step)
    return _median_step(model, step)
