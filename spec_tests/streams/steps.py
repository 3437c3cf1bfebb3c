"""One training step on the simulated device for pictures: a few named moments instead of many operators.

The log of a step contains every operator and the operators that ended before it began, but no units. The tracer of the
package records units, but no streams. This module combines both, and groups related operators into one `Moment`::

    log                                           tracer            moments
    stream 3   all_gather_single                  AG 0              AG 0, gather stream
    stream 1   split_with_sizes_copy                                copy, compute stream
    stream 1   mm, relu                           F 0               F 0, compute stream
                                                  FREE 0            FREE 0, CPU

Two moments are ordered if the first ends before the second begins *in every order that the streams allow*. This is
decided with the same vector clocks that the race checker uses.

Spec: SIM-11.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from minifsdp.engine.events import events
from spec_tests.harness import simulated
from spec_tests.harness.simulated import WORLD, Operation
from spec_tests.harness.simulated.clocks import Clock
from spec_tests.subject import trace

__all__ = ["ROWS", "Moment", "Step", "recorded"]

ROWS = ("CPU", "compute stream", "gather stream", "reduce stream", "all-reduce stream")
"""Who does something, in the order in which pictures show them."""

COLLECTIVES = {"all_gather": "AG", "allgather": "AG", "reduce_scatter": "RS", "allreduce": "AR"}
SORTING = {"split_with_sizes_copy": "copy", "_chunk_cat": "pack"}
ROW_OF = {"AG": "gather stream", "RS": "reduce stream", "AR": "all-reduce stream"}


@dataclass(eq=False)
class Moment:
    """A contiguous action of one of the `ROWS`.

    Attributes:
        kind: an event kind of the tracer, ``"copy"`` for the copy-out of an all-gather, ``"pack"`` for copying
            gradients into a bucket, or ``"loss"``.
        unit: the unit; empty if there is none.
        row: one of the `ROWS`.
        place: number of operators that were launched before it.
        operations: its operators; empty for an action of the CPU.
        places: the positions of these among all operators.
        num_bytes: size of the unsharded parameters, for ``AG``.
        known: for a ``WAIT`` of the CPU, the clock of the operators that have ended afterwards.
    """

    kind: str
    unit: str
    row: str
    place: int
    operations: list[Operation] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    num_bytes: int = 0
    known: Clock = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name in tables and boxes, such as ``AG2``."""
        return self.kind + self.unit

    def is_before(self, other: Moment, order: simulated.IssueOrder | None = None) -> bool:
        """Whether this moment ends before the other begins, in every order of the streams; with ``order``, on NCCL."""
        if not self.operations:
            # Operators that the CPU has waited for end before all its later launches.
            return self.kind == "WAIT" and self.place <= other.place and self is not other
        last = self.operations[-1]
        if not other.operations:
            return other.known.get(last.stream, 0) >= last.number
        first = other.operations[0]
        return last.is_before(first) if order is None else order.is_before(last, first)


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        operations: every operator, in launch order.
        moments: the operators grouped into named moments, with the actions of the CPU between them.
    """

    operations: list[Operation]
    moments: list[Moment]

    @property
    def order(self) -> simulated.IssueOrder:
        """The order of the operators on NCCL."""
        return simulated.IssueOrder(self.operations)


class Observer(trace.Recorder):
    """A tracer that records for each event the number of launched operators and the clock of the CPU."""

    def __init__(self, log: simulated.Log) -> None:
        super().__init__()
        self.log = log
        self.notes: list[tuple[int, str, trace.Event, Clock]] = []

    def begin(self, kind: str, unit: str, **details: Any) -> trace.Event:
        event = super().begin(kind, unit, **details)
        self._note("begin", event)
        return event

    def finish(self, event: trace.Event | None) -> None:
        super().finish(event)
        if event is not None:
            self._note("finish", event)

    def _note(self, verb: str, event: trace.Event) -> None:
        self.notes.append((len(self.log.operations), verb, event, dict(WORLD.host)))


def recorded(model: nn.Module, batch: torch.Tensor) -> Step:
    """The second training step of ``model``; the first step records the order of its units."""
    for _ in range(2):
        with simulated.Log() as log:
            observer = events.recorder = Observer(log)
            try:
                model(batch).sum().backward()
            finally:
                events.recorder = None
        model.zero_grad()
    WORLD.assert_no_race()
    return Step(log.operations, list(_Reader(log.operations, observer.notes).moments()))


class _Reader:
    """Finds the moments from a log and the notes of the `Observer`."""

    def __init__(self, operations: list[Operation], notes: list[tuple[int, str, trace.Event, Clock]]) -> None:
        self.operations, self.notes = operations, notes
        begun = [event for _, verb, event, _ in notes if verb == "begin"]
        # The collectives of each kind, in launch order.
        self.events = {kind: iter([event for event in begun if event.kind == kind]) for kind in ROW_OF}
        self.row_of = {o.stream: ROW_OF[kind] for o in operations if (kind := _collective(o)) and not compares(o)}
        self.row_of[WORLD.main[0].number] = "compute stream"
        self.open: list[trace.Event] = []
        self.latest: dict[str, Moment] = {}

    def moments(self) -> Iterator[Moment]:
        for place, operation in enumerate(self.operations):
            yield from self._of_the_cpu(place)
            moment = self._with(operation, place)
            if moment is not None:
                yield moment
        yield from self._of_the_cpu(len(self.operations))

    def _of_the_cpu(self, place: int) -> Iterator[Moment]:
        for at, verb, event, known in self.notes:
            if at != place:
                continue
            if event.kind in ("F", "B", "STEP"):
                self.open.append(event) if verb == "begin" else self.open.remove(event)
            elif (event.kind, verb) == ("FREE", "begin"):
                yield Moment("FREE", event.unit, "CPU", place)
            elif (event.kind, verb) == ("WAIT", "finish"):
                yield Moment("WAIT", "", "CPU", place, known=known)

    def _with(self, operation: Operation, place: int) -> Moment | None:
        """The moment that begins with an operator; ``None`` if the operator belongs to the last one of its stream."""
        if compares(operation):
            return None
        row = self.row_of[operation.stream]
        found = self._named(operation, row, place)
        latest = self.latest.get(row)
        if latest is not None and latest.kind == "":
            latest.kind, latest.unit, latest.num_bytes = found.kind, found.unit, found.num_bytes
        elif latest is None or _collective(operation) or latest.name != found.name:
            self.latest[row] = latest = found
        latest.operations.append(operation)
        latest.places.append(place)
        return found if latest is found else None

    def _named(self, operation: Operation, row: str, place: int) -> Moment:
        """A moment for an operator; without a name if the operator prepares a later collective."""
        kind = _collective(operation)
        if kind:
            event = next(self.events[kind])
            return Moment(kind, event.unit, row, place, num_bytes=event.num_bytes)
        if operation.name == "div_" and row in self.latest:
            # The division after a collective.
            return Moment(self.latest[row].kind, self.latest[row].unit, row, place)
        if row != "compute stream":
            return Moment("", "", row, place)
        if operation.name in SORTING:
            return Moment(SORTING[operation.name], "", row, place)
        if "reduce.py" in operation.where:
            # A gradient that may share memory is copied before the reduction.
            return Moment("pack", "", row, place)
        return (
            Moment(self.open[-1].kind, self.open[-1].unit, row, place) if self.open else Moment("loss", "", row, place)
        )


def compares(operation: Operation) -> bool:
    """Whether the operator belongs to the comparison of collectives between ranks, which is not part of training."""
    return "rank_checks.py" in operation.where


def _collective(operation: Operation) -> str:
    return next((kind for name, kind in COLLECTIVES.items() if operation.name.startswith(name)), "")
