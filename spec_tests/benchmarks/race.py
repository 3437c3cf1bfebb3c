"""The race: what each of the processes does.

1. every contender takes the model and trains three steps; the losses must be those of one process on all batches;
2. rounds: one step of each contender, in an order that all ranks draw from the number of the round. A barrier before
   each step, or it would be charged with what the step before it did on another rank;
3. two more steps of each, watched (see ``figures.py``) and for that reason not timed;
4. memory, one contender after the other: a second model beside the first would be counted with it.

Garbage is collected between the rounds and never in a step. A collection takes milliseconds, is set off by whoever
happens to allocate the seven-hundredth object, and walks through the modules of all contenders.
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from spec_tests.benchmarks import closed_form, figures
from spec_tests.benchmarks.contenders import CONTENDERS, Contender, Trained
from spec_tests.benchmarks.workloads import Batch, Workload, adamw

__all__ = ["PARTS", "Entrant", "Lap", "Outcome", "Times", "race", "reference_losses"]

NUM_CHECKED = 3
PARTS = ("forward", "backward", "optimizer")


class Times(NamedTuple):
    """Seconds of three clocks.

    Attributes:
        wall: as a watch has it.
        thread: CPU time of the thread that runs Python. What is missing to ``wall`` was waiting: for other ranks, for
            what they send, or for a core.
        process: CPU time of all threads of this rank, those that send included.
    """

    wall: float = 0.0
    thread: float = 0.0
    process: float = 0.0

    @classmethod
    def now(cls) -> Times:
        """What the clocks show."""
        return cls(time.perf_counter(), time.thread_time(), time.process_time())

    def until(self, later: Times) -> Times:
        """What has gone by."""
        return Times(*(b - a for a, b in zip(self, later, strict=True)))

    def and_(self, other: Times) -> Times:
        """Both together."""
        return Times(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Lap:
    """One timed step, from the end of the barrier until the optimizer is done; its `PARTS`.

    Attributes:
        forward, backward: of all micro-batches.
        optimizer: its step, and to clear gradients.
    """

    forward: Times
    backward: Times
    optimizer: Times

    @property
    def whole(self) -> Times:
        """All parts."""
        return self.forward.and_(self.backward).and_(self.optimizer)

    @property
    def wall(self) -> float:
        """Seconds of the whole step."""
        return self.whole.wall


@dataclass
class Outcome:
    """What one rank has measured of one contender.

    Attributes:
        contender: its name.
        difference: largest relative distance of a loss from the reference.
        laps: one for each round.
        calls: of Python functions in a step.
        collectives: of a step, by kind.
        asked: bytes that textbook algorithms send for these collectives, from this rank.
        inside: of these, by the collectives of sharding, all-gather and reduce-scatter. In a hybrid workload they run
            inside of the shard group, and all others between the replicas.
        wired: bytes that this rank's sockets have sent in a step.
        resting: bytes in live tensors between two steps, above what was there before the model.
        computing: the most in forward and backward.
        peak: the most during a step.
        priced_computing, priced: what `minifsdp.tools.cost` says that these two are; 0 of a contender that it does not
            know.
        curve: from the begin of a step, 0, to its end, 1: bytes in live tensors, the most in each part of it.
    """

    contender: str
    difference: float
    laps: list[Lap] = field(default_factory=list)
    calls: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    asked: int = 0
    inside: int = 0
    wired: int = 0
    resting: int = 0
    computing: int = 0
    peak: int = 0
    priced_computing: int = 0
    priced: int = 0
    curve: list[tuple[float, int]] = field(default_factory=list)


class Entrant:
    """A contender with a model of its own."""

    def __init__(self, contender: Contender, workload: Workload) -> None:
        self.contender, self.workload = contender, workload
        self.trained: Trained = contender.take(workload.model(), workload)
        self.optimizer: Any = self.trained.optimizer(self.trained.model)

    def step(self, batches: list[Batch]) -> tuple[list[Tensor], Lap]:
        """One step; the loss of each micro-batch, and the times."""
        begin = Times.now()
        self.optimizer.zero_grad()
        cleared = Times.now()
        losses, forward, backward = self.compute(batches)
        computed = Times.now()
        self.optimizer.step()
        end = Times.now()
        return losses, Lap(forward, backward, begin.until(cleared).and_(computed.until(end)))

    def compute(self, batches: list[Batch]) -> tuple[list[Tensor], Times, Times]:
        """Forward and backward of each micro-batch; the losses, and the times of both."""
        losses = []
        forward = backward = Times()
        for number, batch in enumerate(batches):
            with self.trained.no_sync() if number < len(batches) - 1 else contextlib.nullcontext():
                begin = Times.now()
                loss = self._loss(batch)
                middle = Times.now()
                self.trained.backward(loss / self.workload.accumulate)
                forward, backward = forward.and_(begin.until(middle)), backward.and_(middle.until(Times.now()))
            losses.append(loss.detach())
        return losses, forward, backward

    def _loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        with torch.autocast("cpu", torch.bfloat16, enabled=self.trained.autocasts):
            output = self.trained.model(inputs)
        return self.workload.loss(output.float(), targets)


def reference_losses(workload: Workload, num_ranks: int, num_steps: int) -> Tensor:
    """The losses of one process that plays all ranks: (steps, ranks, micro-batches)."""
    model = workload.model()
    optimizer = adamw(model)
    losses = torch.empty(num_steps, num_ranks, workload.accumulate)
    for step in range(num_steps):
        total: list[Tensor] = []
        for rank in range(num_ranks):
            optimizer.zero_grad()
            for number, (inputs, targets) in enumerate(workload.batches(step, rank)):
                with torch.autocast("cpu", torch.bfloat16, enabled=workload.bf16):
                    output = model(inputs)
                loss = workload.loss(output.float(), targets)
                (loss / workload.accumulate).backward()
                losses[step, rank, number] = loss.detach()
            mine = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            total = [a + b for a, b in zip(total, mine, strict=True)] if total else [grad.clone() for grad in mine]
        for parameter, gradient in zip(model.parameters(), total, strict=True):
            parameter.grad = gradient / num_ranks
        optimizer.step()
    return losses


def check_losses(entrant: Entrant, expected: Tensor) -> float:
    """1. Trains a few steps.

    Returns:
        The largest relative distance from ``expected``, (steps, micro-batches), of the losses of this rank.

    Raises:
        AssertionError: it is larger than the workload allows.
    """
    # Of `single` only the first step is anything to be compared: it has seen nothing of the other ranks' batches since.
    num_equal = NUM_CHECKED if entrant.contender.name != "single" else 1
    found = torch.stack(
        [torch.stack(entrant.step(entrant.workload.batches(s, dist.get_rank()))[0]) for s in range(NUM_CHECKED)]
    )
    distance = float(((found - expected).abs() / expected.abs())[:num_equal].max())
    if not distance <= entrant.workload.tolerance:
        raise AssertionError(
            f"rank {dist.get_rank()}: {entrant.contender.name} trains {entrant.workload.name} to other losses than one "
            f"process does: {found[:num_equal].tolist()} and not {expected[:num_equal].tolist()}; a relative distance "
            f"of {distance:.1e}, where {entrant.workload.tolerance:.0e} is allowed. Its times mean nothing"
        )
    return distance


def race(workload: Workload, rounds: int, seed: int = 0) -> list[Outcome]:
    """All contenders that can train the workload, in their order. Every rank must call it.

    Raises:
        AssertionError: the losses of a contender are wrong.
    """
    rank = dist.get_rank()
    expected = reference_losses(workload, dist.get_world_size(), NUM_CHECKED)[:, rank]
    entrants = [Entrant(contender, workload) for contender in CONTENDERS if contender.runs(workload)]
    outcomes = [Outcome(entrant.contender.name, check_losses(entrant, expected)) for entrant in entrants]
    _run_rounds(entrants, outcomes, rounds, seed)
    batches = workload.batches(NUM_CHECKED + rounds, rank)
    for entrant, outcome in zip(entrants, outcomes, strict=True):
        outcome.calls = figures.python_calls(lambda entrant=entrant: entrant.step(batches))
        sent = figures.collectives(lambda entrant=entrant: entrant.step(batches))
        outcome.collectives, outcome.asked, outcome.inside, outcome.wired = sent
    contenders = [entrant.contender for entrant in entrants]
    entrants.clear()
    gc.unfreeze()
    gc.collect()
    for contender, outcome in zip(contenders, outcomes, strict=True):
        _weigh(contender, outcome, workload, batches)
    return outcomes


def _run_rounds(entrants: list[Entrant], outcomes: list[Outcome], rounds: int, seed: int) -> None:
    gc.collect()
    gc.freeze()
    for number in range(rounds):
        batches = entrants[0].workload.batches(NUM_CHECKED + number, dist.get_rank())
        order = list(zip(entrants, outcomes, strict=True))
        random.Random(seed * 10_007 + number).shuffle(order)
        for entrant, outcome in order:
            gc.disable()
            dist.barrier()
            _, lap = entrant.step(batches)
            outcome.laps.append(lap)
            gc.enable()
        gc.collect()


def _weigh(contender: Contender, outcome: Outcome, workload: Workload, batches: list[Batch]) -> None:
    """4. What lies in memory, and what was said about it."""
    entrants: list[Entrant] = []

    def prepare() -> None:
        entrants.append(Entrant(contender, workload))
        # The optimizer's state comes with the first step, and what a library keeps from one step to the next by then.
        entrants[0].step(batches)

    found = figures.live_bytes(
        prepare,
        clear=lambda: entrants[0].optimizer.zero_grad(),
        compute=lambda: entrants[0].compute(batches),
        update=lambda: entrants[0].optimizer.step(),
    )
    outcome.resting, outcome.computing, outcome.peak = found.resting, found.computing, found.peak
    outcome.curve = found.curve
    if contender.peer is not None:
        cost = closed_form.cost_of(entrants[0].trained.model, workload, batches)
        outcome.priced_computing, outcome.priced = int(max(cost.peak_forward, cost.peak_backward)), int(cost.peak)
    entrants.clear()
    gc.collect()
