"""The collective log: every collective of this rank, in order.

A job on many ranks can fail in two ways without an explanation. It hangs, because one rank does not issue a collective
that the others wait for. Or it trains on wrong numbers, because two ranks issued different collectives. A comparison of
the collectives of all ranks finds both. So ``collective.py`` calls `CollectiveLog.record` for each collective:

1. *Kind, unit, size, code line.* The entry has the kind, the unit, the number of bytes, the iteration, and the line of
   the program that led to the collective. This line is looked up once for each forward and each backward, because that
   takes longer than the rest of the entry. The entry stores code objects, whose names are looked up when it is read.
2. *Position in its process group.* Collectives of one process group pair up by order. So each group has a
   `CollectiveSequence`: a position, and a hash of all collectives up to this position. Equal hashes mean equal order.
3. *Epoch.* The ranks compare their hashes at the end of each backward (``rank_checks.py``) and then start a new epoch.
   A position is an epoch and a number in it. Ranks in different epochs are not compared.

The ranks compare the `identity` of each collective: kind, number of bytes, dtype, and the numbers of the reduced
parameters. All ranks of a correct collective have these in common. A second hash contains the number of each unit in
its root. It only leads to a warning, because a rank may build the same unit in another root. The ranks never compare
names, nor the line in the program.

Worked example, two ranks in group ``0``::

    rank 0      0: all-gather of 40 bytes      1: all-gather of 80 bytes      hash 5f1d...
    rank 1      0: all-gather of 40 bytes      1: all-gather of 96 bytes      hash 90ab...     differ at position 1

Cost: one Python call for each collective. The log keeps the last 2,048 entries, about one megabyte.

*In torch:* the flight recorder does this for NCCL in C++ and writes files that a tool compares. Gloo has no recorder.

Spec: LEDGER-01, LEDGER-02, LEDGER-19, ORDER-01, ORDER-11.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from functools import lru_cache
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from minifsdp.checks.place import Place, called, way_out, way_out_of_main_thread, where
from minifsdp.engine.events import events
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import message

MOST_ENTRIES: int | None = 2048  # in each sequence


class UnitName(str):
    """The full name of a unit inside its root, with the facts that the log needs.

    Args:
        name: full name of the unit's module inside the root.
        number: the number of the unit among the units of its root with the same ranks.
        used: the sequences in which units of this root issued a collective since the last backward began.

    Attributes:
        number, used: as given.
    """

    def __new__(cls, name: str, *_: Any) -> UnitName:
        """Creates the string."""
        return super().__new__(cls, name)

    def __init__(self, _: str, number: int, used: set[CollectiveSequence]) -> None:
        self.number = number
        self.used = used

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Makes a copy an ordinary string, because the copy does not belong to a root of this process."""
        return str, (str(self),)


class CollectiveSequence:
    """The order of the collectives that this rank issued in one process group since the last comparison.

    Args:
        key: name and generation of the process group; the name is equal on all of its ranks.
        group: the group.

    Attributes:
        ranks, process_group: its global ranks, and a weak reference to it, because it is the key of this sequence in
            the log.
        entries: the last collectives, each a plain tuple, which the garbage collector ignores; see `Entry`.
        store: a weak reference to the store of the default process group.
        now: the epoch, which is the number of comparisons so far; the number of collectives since the last comparison;
            the hash of these collectives, and of the numbers of their units. A tuple, because the watchdog reads it.
        last_epoch: the same at the end of the previous epoch.
        transport: the transport between CPUs, or ``None``.
    """

    def __init__(self, key: str, group: Group) -> None:
        self.key = key
        self.ranks = group.ranks
        self.process_group: Any = weakref.ref(group.process_group)
        self.entries: deque[Entry] = deque(maxlen=MOST_ENTRIES)
        self.now = (0, 0, 0, 0)
        self.last_epoch = (-1, 0, 0, 0)
        self.transport = group.transport
        # Only torch.distributed references the store, until the default group, and with it all groups, is destroyed.
        self.store = weakref.ref(
            c10d._get_default_store() if dist.is_initialized() else group.process_group
        )

    def begin_epoch(self) -> None:
        """Starts a new epoch, at the same position on all ranks."""
        self.last_epoch = self.now
        self.now = (self.now[0] + 1, 0, 0, 0)

    def undo(self, before: tuple[int, int, int, int]) -> None:
        """Removes the last entry, which no other rank has. Pass the earlier value of `now`."""
        self.now = before
        self.entries.pop()

    def forget_sizes(self) -> None:
        """Forgets the sizes that the ranks have compared. All ranks call it after a mismatch."""
        if self.transport is not None:
            self.transport.forget_sizes()


Position = tuple[
    CollectiveSequence, int, int
]  # a sequence, an epoch, and a number in it
Parts = tuple[int, ...]  # numbers of parameters
# One entry of the log:
#
# * the key of the group's sequence, the epoch, and the number in it;
# * the name of the collective, the unit or ``None``, the numbers of the unit's parameters that have a gradient;
# * the size of the input or of the output, whichever is larger, and the iteration of this rank;
# * what the ranks compare: a hash of what all ranks have in common, and the number of the unit in its root, or -1;
# * the `Place` in the program. For a collective of a unit, its line is the call of the outermost forward or of the
#   backward. It is ``None`` in a thread that the program did not start.
Entry = tuple[Any, ...]


def as_line(entry: Entry) -> list[Any]:
    """An entry as a line of a report, with texts for the collective, "all-gather of 'a' in forward", and the place."""
    *position, kind, unit, parts, num_bytes, iteration, identity, of_unit = entry[:-3]
    inside, code, line = entry[-3:]
    which = "" if unit is None else f" of {unit!r}" if unit else " of the root unit"
    if parts:
        which += f", its parameters {list(parts)}"
    what = f"{kind}{which} in {called(inside)}"
    at = where(code, line)
    return [*position, what, at, iteration, num_bytes, identity, of_unit]


@lru_cache(maxsize=4096)
def _shape(kind: str, num_bytes: int, dtype: Any) -> int:
    # A step repeats the collectives of earlier steps.
    return crc32(f"{kind} {num_bytes} {dtype}".encode())


class CollectiveLog:
    """The collectives of this process. There is one log, `log`. The watchdog thread reads it.

    Attributes:
        sequences: the sequence of each process group.
        iteration: number of outermost forwards on this rank.
        num_steps: number of optimizer steps.
        waiting: the `Collective` that the main thread waits for.
        latest: the position of the last collective.
        place: the place in the program that runs a forward or a backward; ``None`` outside of both.
        fatal_error: set by the watchdog if no further collective can complete: the text of the error.
        watchdog: the watchdog of the default process group, if there is one.
        store: a weak reference to the store of the default process group. The log is cleared when the store is deleted.
        exit_status: an object that ends the process with another exit status when Python deletes this log.
    """

    def __init__(self) -> None:
        self.sequences: weakref.WeakKeyDictionary[Any, CollectiveSequence] = (
            weakref.WeakKeyDictionary()
        )
        self.iteration = self.num_steps = 0
        self.waiting: Any = None
        self.latest: Position | None = None
        self.place: Place | None = None
        self.fatal_error = ""
        self.watchdog: Any = None
        self.store: weakref.ref[Any] | None = None
        self.exit_status: Any = None
        self._generations = Counter[str]()

    def sequence_of(self, group: Group) -> CollectiveSequence:
        """The sequence of a group's process group."""
        process_group: Any = group.process_group
        if process_group not in self.sequences:
            name = getattr(process_group, "group_name", str(group.ranks))
            # A later group with the same name gets another key.
            self._generations[name] += 1
            self.sequences[process_group] = CollectiveSequence(
                f"{name}#{self._generations[name]}", group
            )
        # The next lookup for this group needs no call.
        group.notes["sequence"] = self.sequences[process_group]
        return self.sequences[process_group]

    def record(
        self,
        sequence: CollectiveSequence,
        kind: str,
        num_bytes: int,
        unit: str | None,
        parts: Parts,
        dtype: Any,
    ) -> tuple[Position, int]:
        """Adds a collective, which the caller issues next. Returns its position, and a hash of kind, size and dtype.

        Args:
            sequence, kind, num_bytes, unit, parts: as in `Entry`; ``unit`` is empty for the outermost module's unit.
            dtype: dtype of the elements, if known.

        Raises:
            RuntimeError: if the process group was destroyed.
        """
        if sequence.store() is None:
            raise RuntimeError(message("destroyed-group"))
        of_unit = -1
        if isinstance(unit, UnitName):
            unit.used.add(sequence)
            of_unit = unit.number
            unit = str(unit)
        shape = _shape(kind, num_bytes, dtype)
        # Unlike the hash of a text, the hash of numbers is the same in all processes.
        identity = hash((shape, *parts))
        # 1. The units of a forward or of a backward share its place.
        place = (
            self.place
            if unit is not None and self.place is not None
            else self.place_in_program()
        )
        epoch, number, digest, of_units = sequence.now
        entry = (kind, unit, parts, num_bytes, self.iteration, identity, of_unit)
        sequence.entries.append((sequence.key, epoch, number, *entry, *place))
        digests = (hash((digest, identity)), hash((of_units, of_unit)))
        sequence.now = (epoch, number + 1, *digests)
        self.latest = (sequence, epoch, number)
        return self.latest, shape

    def place_in_program(self) -> Place:
        """The innermost line of the program that has called this function, and the function that it has called."""
        place = way_out(sys._getframe(1))
        # An autograd thread, on an accelerator, has no such line. The program waits for it in the main thread.
        return way_out_of_main_thread() if place[1] is None else place

    def diagnosis(self, position: Position) -> str:
        """The watchdog's report about all ranks, on separate lines. Empty if there is no watchdog."""
        return "" if self.watchdog is None else f"\n{self.watchdog.ask(position)}"

    @property
    def last_position(self) -> Position | None:
        """The position for which the main thread waits, or the last one that it issued."""
        # Read once, because the watchdog thread calls this while the main thread changes it.
        waiting = self.waiting
        return self.latest if waiting is None else waiting.position

    def clear(self) -> None:
        """Called when a default process group, and with it all other groups, was destroyed."""
        self.waiting = self.latest = self.place = None
        events.last_event = None
        self.fatal_error = ""
        for process_group, sequence in list(self.sequences.items()):
            if sequence.store() is None:
                sequence.entries.clear()
                del self.sequences[process_group]


log = CollectiveLog()
