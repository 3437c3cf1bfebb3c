"""Replays one training step of a broken engine in an order in which the missing wait matters.

The streams of a broken engine allow orders that the intact engine excludes. The race checker names two operations that
have lost their order: ``new`` should run after ``old``. This module replays the step with ``new`` as early as possible
and ``old`` after it::

    launched      AG0 F0 AG1 F1         with the wait: F0 runs after AG0
    replayed      F0 AG0 AG1 F1         without it: F0 (new) reads bytes that AG0 (old) writes later

1. The operations are grouped into boxes: the moments of ``steps.py``. A box is divided if only a part of it can run
   early.
2. The column of a box is one more than that of the latest box that it waits for, on its stream, by events, or in the
   communicator. In addition, ``old`` waits for ``new``. So boxes of one column can run at the same time.
3. The operations are executed twice on the same memory: in the order of launch, and by columns. The results of a box
   are wrong if their bits differ. Without a race the two orders give the same bits.

A break without a race is shown in the order of launch. Its replay has other boxes, more memory or fewer boxes in one
column.

Spec: COUNTERFACTUAL-01 to COUNTERFACTUAL-03.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from minifsdp.engine.events import events
from spec_tests.harness import device, pool, simulated
from spec_tests.harness.simulated import WORLD, Operation
from spec_tests.harness.simulated.replay import Place, _look, _places_in, _repeat
from spec_tests.streams import blocks, engines
from spec_tests.streams.parts import local
from spec_tests.streams.steps import SORTING, Moment, Observer, _Reader, compares

__all__ = ["MODELS", "NUM_RANKS", "record"]

NUM_RANKS = 4
NUM_ROWS = 3  # of the batch
MODELS = {"flat": blocks.flat, "per parameter": blocks.per_parameter}


class MeasuringLog(simulated.Log):
    """A log that also records the bytes in use at each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[int] = []

    def note(self, *arguments: Any, **named: Any) -> None:
        super().note(*arguments, **named)
        self.used.append(WORLD.memory.used)


class Window:
    """The log of an optimizer step and of the training step after it.

    Attributes:
        log: its operations.
        moments: the operations as moments, including those of the comparison between ranks.
        race: the first collision; ``None`` if there is none.
        error: the exception that ended the step; empty if it ended normally.
        results: the rank's shards of the parameters, after the second optimizer step.
    """

    def __init__(self, model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        x = torch.randn(NUM_ROWS, blocks.WIDTH, device=device())
        # The first step records the order of the units. The window begins with an optimizer step.
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model(x).square().sum().backward()
        WORLD.synchronize()
        # The allocator reuses what `record_stream` has kept for the first step.
        WORLD.memory._release_held_back()
        WORLD.races.clear()
        self.error = ""
        with MeasuringLog() as self.log:
            observer = events.recorder = Observer(self.log)
            try:
                self._update(optimizer, observer)
                model(x).square().sum().backward()
                self._update(optimizer, observer)
            except Exception as error:  # a broken engine can raise any error
                self.error = f"{type(error).__name__}: {error}"
            finally:
                events.recorder = None
        self.race = next(iter(WORLD.races.values()), None)
        self.moments = list(_Reader(self.log.operations, observer.notes).moments())
        seen = {id(one) for moment in self.moments for one in moment.operations}
        for place, one in enumerate(self.log.operations):
            if id(one) not in seen:
                assert compares(one)
                self.moments.append(Moment("", "", "", place, [one], [place]))
        self.results = [Place.of(local(parameter.detach())) for parameter in model.parameters()]

    def _update(self, optimizer: torch.optim.Optimizer, observer: Observer) -> None:
        event = observer.begin("STEP", "")
        optimizer.step()
        observer.finish(event)
        optimizer.zero_grad()


# --- boxes and columns ---


def _starts_before(one: Moment, other: Moment, order: simulated.IssueOrder) -> bool:
    """Whether a part of ``one`` ends before a part of the other begins, or the CPU has waited for it."""
    if not one.operations or not other.operations:
        return one.is_before(other)
    return order.is_before(one.operations[0], other.operations[-1])


def _divided(moments: Iterable[Moment], at: Operation, *, is_last: bool) -> list[Moment]:
    """The moments, with a cut after an operation if it is the last of its part, otherwise before it."""
    found = []
    for moment in moments:
        cut = next((n for n, one in enumerate(moment.operations) if one is at), None)
        cut = None if cut is None else cut + is_last
        if cut is None or cut in (0, len(moment.operations)):
            found.append(moment)
            continue
        parts = moment.operations, moment.places
        found.append(replace(moment, operations=parts[0][:cut], places=parts[1][:cut]))
        found.append(replace(moment, operations=parts[0][cut:], places=parts[1][cut:], place=parts[1][cut]))
    return found


def _apart(moment: Moment) -> Iterator[Moment]:
    """Copies into buckets that were launched with other operators between them, such as a reduce-scatter, are separate
    boxes."""
    if moment.kind not in SORTING.values():
        yield moment
        return
    for operation, place in zip(moment.operations, moment.places, strict=True):
        yield replace(moment, operations=[operation], places=[place], place=place)


def _box_of(operation: Operation, moments: Iterable[Moment]) -> Moment:
    return next(moment for moment in moments if any(one is operation for one in moment.operations))


class Boxes:
    """The moments of a window with their columns, from 1; see 1. and 2. in the docstring of the module.

    Attributes:
        boxes: in the order of launch, without the frees of the CPU.
        new, old: the boxes of the race; ``None`` without a race.
        column: by box.
    """

    def __init__(self, window: Window) -> None:
        operations = {(one.stream, one.number): one for one in window.log.operations}
        order = simulated.IssueOrder(window.log.operations)
        moments = [part for moment in window.moments if moment.kind != "FREE" for part in _apart(moment)]
        self.new: Moment | None = None
        self.old: Moment | None = None
        race = window.race
        if race is not None and race.old is not None:
            new, old = (operations[one.stream, one.number] for one in (race.new, race.old))
            assert not order.is_before(old, new), "the communicator orders the two accesses"
            self.new, self.old = (_box_of(one, moments) for one in (new, old))
            if self.new is self.old or _starts_before(self.old, self.new, order):
                moments = _divided(_divided(moments, new, is_last=True), old, is_last=False)
                self.new, self.old = (_box_of(one, moments) for one in (new, old))
        self.boxes = sorted(moments, key=lambda moment: moment.place)
        waits = {
            box: [one for one in self.boxes if one is not box and _starts_before(one, box, order)] for box in moments
        }
        if self.old is not None and self.new is not None:
            waits[self.old].append(self.new)
        self.column: dict[Moment, int] = {}
        while len(self.column) < len(waits):
            ready = [box for box in waits if box not in self.column and all(one in self.column for one in waits[box])]
            assert ready, "the boxes wait for each other"
            for box in ready:
                self.column[box] = 1 + max((self.column[one] for one in waits[box]), default=0)


# --- values ---

Values = dict[int, list[tuple[torch.Tensor, torch.Tensor]]]
"""By the identity of an operation: the bytes before and after it in each place that it uses."""


def _executed(window: Window, operations: Iterable[Operation]) -> tuple[Values, list[torch.Tensor]]:
    """Executes the operations in this order. Returns the bytes around each, and the bytes of the window's results."""
    memory = {place: values.clone() for place, values in window.log._first_bytes.items()}
    found: Values = {}
    for one in operations:
        places = [*_places_in(one.args), *_places_in([*one.kwargs.values()]), *filter(None, one.results)]
        before = [_elements(place, memory) for place in places]
        _repeat(one, memory)
        found[id(one)] = [*zip(before, [_elements(place, memory) for place in places], strict=True)]
    return found, [_elements(place, memory) for place in window.results]


def _elements(place: Place, memory: dict[int, torch.Tensor]) -> torch.Tensor:
    """The bytes at a place, one row for each element."""
    tensor = _look(place, memory)
    values = tensor.new_empty(tensor.numel()).copy_(tensor.reshape(-1))
    return values.view(torch.uint8).reshape(tensor.numel(), place.dtype.itemsize)


def _num_wrong(actual: torch.Tensor, expected: torch.Tensor) -> int:
    return int((actual != expected).any(1).sum())


def _wrong_results(box: Moment, actual: Values, expected: Values) -> tuple[int, int]:
    """The number of elements that the box wrote with other bits, and the number of all elements that it wrote."""
    wrong = total = 0
    for one in box.operations:
        for here, there in zip(actual[id(one)], expected[id(one)], strict=True):
            is_written = any(not torch.equal(before, after) for before, after in (here, there))
            if is_written:
                wrong, total = wrong + _num_wrong(here[1], there[1]), total + len(here[1])
    return wrong, total


# --- the record ---


def record(api: str, num_blocks: int) -> dict[str, Any]:
    """The replay of a step of the package that this process has imported, as JSON.

    Returns:
        ``boxes``: for each box its name, row, column, the number of wrong elements among those that it writes, the
        number of these, and the bytes in use at its launch; ``frees``: unit and column of each reshard; ``race``: the
        two accesses, or None; ``error``; ``wrong``: the number of wrong elements in the rank's parameters after the
        step, and the number of all elements; ``peak`` in bytes; ``overlaps``: pairs of a collective and another
        operation that can run at the same time.
    """
    pool.use_device("simulated")
    WORLD.begin()
    dist.init_process_group("simulated", rank=0, world_size=NUM_RANKS, store=FakeStore())
    window = Window(MODELS[api](num_blocks))
    found = Boxes(window)
    with _disable_current_modes(), torch.no_grad():
        expected, results = _executed(window, window.log.operations)
        by_column = sorted(found.boxes, key=lambda box: (found.column[box], box.place))
        replayed = itertools.chain.from_iterable(box.operations for box in by_column)
        actual, replayed_results = _executed(window, replayed)
    shown = [box for box in by_column if box.row]
    used = window.log.used
    boxes = []
    for box in shown:
        at_launch = max((used[place] for place in box.places), default=0)
        wrong = _wrong_results(box, actual, expected)
        boxes.append([box.name, box.row.removesuffix(" stream"), found.column[box], *wrong, at_launch])
    pairs = zip(replayed_results, results, strict=True)
    return {
        "boxes": boxes,
        "frees": [[one.unit, _last_column(one, found)] for one in window.moments if one.kind == "FREE"],
        "race": None if window.race is None else _race(window.race, found, shown),
        "error": window.error,
        "wrong": [sum(_num_wrong(*pair) for pair in pairs), sum(map(len, results))],
        "peak": max(used),
        "overlaps": engines.num_overlaps(window.log.operations),
    }


def _last_column(free: Moment, found: Boxes) -> int:
    """The column of the last box of the compute stream that was launched before a free."""
    before = [box for box in found.boxes if box.row == "compute stream" and box.place < free.place]
    return max((found.column[box] for box in before), default=0)


def _race(race: simulated.Race, found: Boxes, shown: Sequence[Moment]) -> dict[str, Any]:
    """The kind of the race, and for each of its accesses: the box, verb, operator and bytes."""
    result: dict[str, Any] = {"kind": race.kind}
    for key, access, box in (("new", race.new, found.new), ("old", race.old, found.old)):
        if access is not None and box is not None:
            verb = "writes" if access.is_write else "reads"
            result[key] = [shown.index(box), verb, access.operator, access.low, access.high]
    return result
