"""The race: the work of each process.

1. Every contender prepares the model and trains three steps. The losses must equal those of one process on all batches.
2. Rounds: one step of each contender, in a random order with the number of the round as its seed. There is a barrier
   before each step. Otherwise the time of a step could contain the end of the step before it on another rank.
3. Two more steps of each contender for the measurements of ``figures.py``. These steps are not timed.
4. Memory, one contender after the other, because a second model in the process would be counted too.

Garbage is collected between the rounds and never in a step. A collection takes milliseconds and visits the modules of
all contenders. It would start in the step of any contender, because it depends on the number of allocated objects.
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

from spec_tools.benchmarks import closed_form, figures
from spec_tools.benchmarks.contenders import CONTENDERS, Contender, Trained
from spec_tools.benchmarks.workloads import Batch, Workload, adamw

__all__ = ["PARTS", "Entrant", "Lap", "Outcome", "Times", "race", "reference_losses"]

NUM_CHECKED = 3
PARTS = ("forward", "backward", "optimizer")


class Times(NamedTuple):
    """Seconds of three clocks.

    Attributes:
        wall: wall-clock time.
        thread: CPU time of the Python thread. The difference to ``wall`` is waiting: for other ranks, for
            communication, or for a core.
        process: CPU time of all threads of this rank, including those that communicate.
    """

    wall: float = 0.0
    thread: float = 0.0
    process: float = 0.0

    @classmethod
    def now(cls) -> Times:
        """The current time of the clocks."""
        return cls(time.perf_counter(), time.thread_time(), time.process_time())

    def until(self, later: Times) -> Times:
        """The difference from this time to a later one."""
        return Times(*(b - a for a, b in zip(self, later, strict=True)))

    def and_(self, other: Times) -> Times:
        """The sum of both."""
        return Times(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Lap:
    """Times of the `PARTS` of one step, from the end of the barrier to the end of the optimizer.

    Attributes:
        forward, backward: times of all micro-batches.
        optimizer: time of the optimizer step and of clearing the gradients.
    """

    forward: Times
    backward: Times
    optimizer: Times

    @property
    def whole(self) -> Times:
        """The sum of all parts."""
        return self.forward.and_(self.backward).and_(self.optimizer)

    @property
    def wall(self) -> float:
        """Seconds of the whole step."""
        return self.whole.wall


@dataclass
class Outcome:
    """The measurements of one rank for one contender.

    Attributes:
        contender: its name.
        difference: largest relative difference of a loss from the reference.
        laps: the timed steps, one for each round.
        calls: number of Python calls in a step.
        collectives: number of collectives in a step, by kind.
        asked: bytes that textbook algorithms send for these collectives from this rank.
        inside: the part of ``asked`` for all-gathers and reduce-scatters. In a hybrid workload these run inside the
            shard group, and all other collectives between the replicas.
        wired: bytes that this rank's sockets have sent in a step.
        between_steps: bytes in live tensors between two steps, relative to the state before the model was built.
        computing: maximum in forward and backward.
        peak: maximum during a step.
        priced_computing, priced: the values of `minifsdp_tools.cost` for ``computing`` and ``peak``; 0 for contenders
            that it does not support.
        curve: positions in the step, from 0 to 1, each with the maximum of live bytes in this part of it.
    """

    contender: str
    difference: float
    laps: list[Lap] = field(default_factory=list)
    calls: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    asked: int = 0
    inside: int = 0
    wired: int = 0
    between_steps: int = 0
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
        """Runs one step; returns the loss of each micro-batch and the times."""
        begin = Times.now()
        self.optimizer.zero_grad()
        cleared = Times.now()
        losses, forward, backward = self.compute(batches)
        computed = Times.now()
        self.optimizer.step()
        end = Times.now()
        return losses, Lap(forward, backward, begin.until(cleared).and_(computed.until(end)))

    def compute(self, batches: list[Batch]) -> tuple[list[Tensor], Times, Times]:
        """Runs forward and backward of each micro-batch; returns the losses and the times of both."""
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
    """The losses of a single process that trains on the batches of all ranks: (steps, ranks, micro-batches)."""
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
    """1. Trains a few steps and compares the losses of this rank with ``expected``: (steps, micro-batches).

    Returns:
        The largest relative difference of a loss.

    Raises:
        AssertionError: it is larger than the tolerance of the workload.
    """
    # For `single`, only the first step is compared: later steps would need the gradients of other ranks' batches.
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
    """The outcomes of all contenders that can train the workload, in their order. Every rank must call it.

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
    """4. Measures the memory, and computes the expected memory."""
    entrants: list[Entrant] = []

    def prepare() -> None:
        entrants.append(Entrant(contender, workload))
        # The first step creates the optimizer's state and everything that a library keeps between steps.
        entrants[0].step(batches)

    found = figures.live_bytes(
        prepare,
        clear=lambda: entrants[0].optimizer.zero_grad(),
        compute=lambda: entrants[0].compute(batches),
        update=lambda: entrants[0].optimizer.step(),
    )
    outcome.between_steps, outcome.computing, outcome.peak = found.between_steps, found.computing, found.peak
    outcome.curve = found.curve
    if contender.peer is not None:
        cost = closed_form.cost_of(entrants[0].trained.model, workload, batches)
        outcome.priced_computing, outcome.priced = int(max(cost.peak_forward, cost.peak_backward)), int(cost.peak)
    entrants.clear()
    gc.collect()
