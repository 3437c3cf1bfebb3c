"""Runs the same program in another order: an independent check of the race checker.

While a `Log` is open, it keeps each operation with the bytes that it reads and writes, and the operations that had to
be complete when it began. Afterwards the operations are executed again on other memory, in other orders that the
streams allow: the all-gather stream always first, the compute stream always first, or random. Blocks that used the same
memory one after the other share it again, so an early all-gather overwrites values that are still read.

    the program          AG0 F0 AG1 F1
    all-gather first     AG0 AG1 F0 F1      allowed, if the all-gather stream does not wait for F0
    a missing wait       F0 AG0 ...         allowed only if the compute stream never waits for the all-gather

If the checker finds no collision, all orders must give the same bits. If a wait is missing, some order gives
other bits. The replay and the checker share only the log.

The values of other ranks come from `FakePeers`. Programs on several real ranks cannot be replayed.

Spec: SIM-05.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from spec_tests.harness.simulated.clocks import Clock
from spec_tests.harness.simulated.memory import bytes_of
from spec_tests.harness.simulated.tensor import SimTensor, host_home, is_watched, plain
from spec_tests.harness.simulated.world import WORLD

__all__ = ["Log", "Operation", "Verdict"]


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a tensor: a simulated memory, and the tensor's layout in it."""

    number: int
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    is_conjugate: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        """The place of a tensor of the device, or of host memory that the device copies from or to."""
        home = tensor._home if isinstance(tensor, SimTensor) else host_home(tensor)
        assert home.block is not None, "the memory was freed"
        item = tensor.element_size()
        offset = home.offset // item + tensor.storage_offset()
        is_conjugate = tensor.is_complex() and tensor.is_conj()
        return cls(home.block.place, offset, tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), is_conjugate)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the log.

    Attributes:
        stream, number: the stream and the index in it; `HOST` for the CPU.
        clock: the operations that were complete when it began.
        name: for pictures.
        function: executes it.
        args, kwargs: its arguments, with a `Place` for each tensor whose memory other operations can use.
        results: the places of its new tensors, in the order in which the function returns them.
        random_state: of the generator, for operators that draw random numbers.
        num_bytes: number of bytes that it accesses.
        where: the lines of the program.
        communicator: number of the communicator of a collective; 0 for all other operations.
    """

    stream: int
    number: int
    clock: Clock
    name: str
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: tuple[Place | None, ...]
    random_state: torch.Tensor | None
    num_bytes: int
    where: str
    communicator: int = 0

    def is_before(self, other: Operation) -> bool:
        """Whether this operation is complete when the other begins, in every order that the streams allow."""
        if other.stream == self.stream:
            return self.number < other.number
        return other.clock.get(self.stream, 0) >= self.number

    def may_overlap(self, other: Operation) -> bool:
        """Whether the streams allow the two to run at the same time. Without the order of NCCL (`IssueOrder`)."""
        return not (self.is_before(other) or other.is_before(self))


@dataclass(frozen=True)
class Verdict:
    """The result of a replay.

    Attributes:
        num_schedules: number of orders that were executed.
        different: names of the orders that gave other bits.
        num_operations: in each order.
    """

    num_schedules: int
    different: list[str]
    num_operations: int


class Log:
    """Records the operations in its ``with`` block::

    with Log() as log:
        train(model)
    verdict = log.judge([p for p in model.parameters()], num_schedules=24)
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._first_bytes: dict[int, torch.Tensor] = {}

    def __enter__(self) -> Log:
        WORLD.synchronize()
        WORLD.memory.reap()
        with _disable_current_modes():
            for home in WORLD.memory.homes.values():
                if home.block is not None and not home.is_part and not home.is_gone:
                    self._first_bytes[home.block.place] = _filling(home.block.place, bytes_of(home.living_storage()))
        WORLD.log, WORLD.memory.first_bytes = self, self._first_bytes
        return self

    def __exit__(self, *_: object) -> None:
        WORLD.log = WORLD.memory.first_bytes = None

    def note(
        self,
        launch: tuple[int, int, Clock, str],
        name: str,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        new: Sequence[torch.Tensor],
        random_state: torch.Tensor | None = None,
        communicator: int = 0,
    ) -> None:
        """Adds an operation; ``new`` contains those of its results that are new tensors."""
        stream, number, clock, where = launch
        with _disable_current_modes():
            inside = _noted(args)
            by_name = {k: _noted(v) for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")}
            results = tuple(Place.of(tensor) if tensor.numel() else None for tensor in new)
        touched = [*_places_in(inside), *_places_in([*by_name.values()]), *(r for r in results if r is not None)]
        num_bytes = sum(place.dtype.itemsize * torch.Size(place.size).numel() for place in touched)
        self.operations.append(
            Operation(
                stream,
                number,
                clock,
                name.removeprefix("aten::"),
                function,
                inside,
                by_name,
                results,
                random_state,
                num_bytes,
                where,
                communicator,
            )
        )

    def judge(self, results: Sequence[torch.Tensor], num_schedules: int, seed: int = 0) -> Verdict:
        """Executes other orders and compares the final bits of ``results``.

        Raises:
            AssertionError: a replay in program order does not give the bits of the program.
        """
        with _disable_current_modes(), torch.no_grad():
            state = torch.get_rng_state()
            shown = [t for t in results if t.numel() and (isinstance(t, SimTensor) or is_watched(t))]
            places = [Place.of(tensor) for tensor in shown]
            actual = [_bits(plain(t) if isinstance(t, SimTensor) else t) for t in shown]
            position = {id(operation): index for index, operation in enumerate(self.operations)}
            again = self._execute(places, lambda ready: min(ready, key=lambda o: position[id(o)]))
            wrong = [place for place, a, b in zip(places, actual, again, strict=True) if not torch.equal(a, b)]
            assert not wrong, f"the program, executed again in its own order, gives other bits: {wrong[:3]}"
            different = []
            for name, choose in itertools.islice(self._orders(seed), num_schedules):
                got = self._execute(places, choose)
                if not all(torch.equal(a, b) for a, b in zip(actual, got, strict=True)):
                    different.append(name)
            torch.set_rng_state(state)
        return Verdict(num_schedules, different, len(self.operations))

    def _orders(self, seed: int) -> Any:
        """Names of orders, each with a function that chooses one of the operations that can run next."""
        streams = sorted({operation.stream for operation in self.operations})
        chooser = random.Random(seed)
        for number in itertools.count():
            if number % 2 == 0:
                ranks = streams[:]
                chooser.shuffle(ranks)
                place = {stream: rank for rank, stream in enumerate(ranks)}
                name = "always first: " + " > ".join(WORLD.name_of(stream) for stream in ranks)
                yield name, lambda ready, place=place: min(ready, key=lambda o: place[o.stream])
            else:
                dice = random.Random(chooser.random())
                yield f"at random, {number}", lambda ready, dice=dice: dice.choice(ready)

    def _execute(self, results: Sequence[Place], choose: Callable[[list[Operation]], Operation]) -> list[torch.Tensor]:
        memory = {place: values.clone() for place, values in self._first_bytes.items()}
        queues: dict[int, list[Operation]] = defaultdict(list)
        for operation in self.operations:
            queues[operation.stream].append(operation)
        for queue in queues.values():
            queue.reverse()
        while True:
            heads = {stream: queue[-1] for stream, queue in queues.items() if queue}
            if not heads:
                break
            operation = choose([head for head in heads.values() if _may_run(head, heads)])
            _repeat(operation, memory)
            queues[operation.stream].pop()
        return [_bits(_look(place, memory)) for place in results]


def _may_run(operation: Operation, heads: dict[int, Operation]) -> bool:
    """Whether all operations that must come before this one are complete; ``heads`` are the next ones by stream."""
    return not any(
        stream != operation.stream and operation.clock.get(stream, 0) >= head.number for stream, head in heads.items()
    )


def _look(place: Place, memory: dict[int, torch.Tensor]) -> torch.Tensor:
    if place.number not in memory:
        memory[place.number] = _filling(place.number)
    item = place.dtype.itemsize
    row = memory[place.number]
    view = row[: row.numel() // item * item].view(place.dtype).as_strided(place.size, place.stride, place.offset)
    return view.conj() if place.is_conjugate else view


def _filling(place: int, values: torch.Tensor | None = None) -> torch.Tensor:
    """The memory of a place. It begins with ``values``; all other bytes are 255, which is NaN as floating point."""
    row = torch.full((WORLD.memory.size_of_place[place],), 255, dtype=torch.uint8)
    if values is not None:
        row[: values.numel()] = values
    return row


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(tensor.numel()).copy_(tensor.detach().reshape(-1)).view(torch.uint8)


def _repeat(operation: Operation, memory: dict[int, torch.Tensor]) -> None:
    def fill(value: Any) -> Any:
        if isinstance(value, Place):
            return _look(value, memory)
        if isinstance(value, (list, tuple)):
            return [fill(item) for item in value]
        return value

    if operation.random_state is not None:
        torch.set_rng_state(operation.random_state)
    kwargs = {name: fill(value) for name, value in operation.kwargs.items()}
    answer = operation.function(*fill(operation.args), **kwargs)
    # Results that the program did not request are `None`, and have no place either.
    made = [value for value in pytree.tree_leaves(answer) if isinstance(value, torch.Tensor)]
    for place, tensor in zip(operation.results, made, strict=False):
        if place is not None:
            _look(place, memory).copy_(tensor)


def _noted(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.numel():
            return (plain(value) if isinstance(value, SimTensor) else value).detach().clone()
        if isinstance(value, SimTensor) or is_watched(value):
            return Place.of(value)
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [_noted(item) for item in value]
    return value


def _places_in(value: Any) -> list[Place]:
    if isinstance(value, Place):
        return [value]
    if isinstance(value, list):
        return [place for item in value for place in _places_in(item)]
    return []
