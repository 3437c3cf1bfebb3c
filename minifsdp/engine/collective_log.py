"""The collective log: every collective of this rank, in order.

A job on many ranks can fail in two ways without an explanation. It hangs, because one rank does not issue a collective
that the others wait for. Or it trains on wrong numbers, because two ranks issued different collectives. A comparison of
the collectives of all ranks finds both. So ``collectives.py`` calls `CollectiveLog.record` for each collective:

1. *Kind, unit, size, code line.* The entry has the kind, the unit, the number of bytes, the iteration, and the line of
   the program that led to the collective. This line is looked up once for each forward and each backward, because that
   takes longer than the rest of the entry. The entry stores code objects, whose names are looked up when it is read.
2. *Position in its process group.* Collectives of one process group pair up by order. So each group has a
   `CollectiveSequence`: a position, and a hash of all collectives up to this position. Equal hashes mean equal order.
3. *Epoch.* The ranks compare their hashes at the end of each backward (``rank_checks.py``) and then start a new epoch.
   A position is an epoch and a number in it. Ranks in different epochs are not compared.

The ranks compare the `identity` of each collective: kind, number of bytes, dtype, and unit. The unit is identified by
its parameters' shapes and names (see `Unit.named`), and by the number of its root in this group. The ranks never
compare the line in the program, because correct ranks may issue the same collective from different lines.

Worked example, two ranks in group ``0``, each with one unit that the other rank does not have::

    rank 0      0: all-gather a      1: all-gather b      hash 5f1d...
    rank 1      0: all-gather a      1: all-gather c      hash 90ab...     the ranks diverge at position 1

Cost: one Python call for each collective. The log keeps the last 2,048 entries, about one megabyte.

*In torch:* the flight recorder does this for NCCL in C++ and writes files that a tool compares. Gloo has no recorder.

Spec: LEDGER-01, LEDGER-02, LEDGER-19, ORDER-01, ORDER-11.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple
from zlib import crc32

from minifsdp.engine.messages import Place, message, way_out, way_out_of_main_thread

# Name components that wrappers add and that do not identify a parameter.
_OF_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module"}
_tree_numbers = itertools.count()


class RootId:
    """The units of one root, for the log.

    Attributes:
        number: number of this root in this process.
        used: the sequences in which these units issued a collective since the last backward began.
    """

    def __init__(self) -> None:
        self.number, self.used = next(_tree_numbers), set[CollectiveSequence]()


class UnitName(str):
    """The full name of a unit, and how the ranks identify it.

    Args:
        name: full name of the unit's module inside the root.
        digest: hash of the unit's number among equal units, and of the shapes and names of the parameters, without
            indices and without the components that wrappers add.
        root_id: the units of the same root.
        facts: returns the properties of the unit that are equal on all ranks, as text.
        built: a key that equal units have in common, and the number of equal units that this process constructed
            earlier, see `CollectiveSequence.count_unit`.

    Attributes:
        identities: the identity of the unit in each sequence. Cleared if the facts change.
        digest, root_id, facts, built: as given.
    """

    digest: int
    root_id: RootId
    identities: dict[CollectiveSequence, int]
    facts: Callable[[], list[str]]
    built: tuple[int, int]

    def __new__(
        cls, name: str, digest: int, root_id: RootId, facts: Callable[[], list[str]], built: tuple[int, int]
    ) -> UnitName:
        """Adds the attributes to an ordinary string."""
        made = super().__new__(cls, name)
        made.digest, made.root_id, made.facts, made.built, made.identities = digest, root_id, facts, built, {}
        return made

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Makes a copy an ordinary string, because the copy does not belong to a root of this process."""
        return str, (str(self),)


def clean_path(path: str) -> str:
    """A path without the components that can be different on each rank: indices, and names from wrappers."""
    return ".".join(part for part in path.split(".") if not (part.isdigit() or part in _OF_WRAPPERS))


class CollectiveSequence:
    """The order of the collectives that this rank issued in one process group since the last comparison.

    Args:
        key: name and generation of the process group; the name is equal on all of its ranks.
        ranks: the global ranks of the process group.
        process_group: the group, referenced weakly, because it is the key of this sequence in the log.

    Attributes:
        epoch, number: number of comparisons so far, and of collectives issued since the last one.
        hash: hash of these collectives.
        last_epoch: epoch, number and digest of the previous epoch.
        transport, device: the transport between CPUs, and the accelerator of the group's last model; or ``None``.
        agreed: identities of the units that all ranks agreed to all-gather (``rank_checks.py``).
        num_disagreements: how often they did not agree.
    """

    def __init__(self, key: str, ranks: tuple[int, ...], process_group: Any) -> None:
        self.key, self.ranks, self.process_group = key, ranks, weakref.ref(process_group)
        self.epoch, self.number = 0, 0
        self.hash: Any = blake2b(digest_size=7)
        self.last_epoch = (-1, 0, self.digest)
        self.transport: Any = None
        self.device: Any = None
        self.agreed, self.num_disagreements = set[int](), 0
        self._root_numbers: dict[int, int] = {}
        self._built = Counter[int]()

    def begin_epoch(self) -> None:
        """Starts a new epoch, at the same position on all ranks."""
        self.last_epoch = (self.epoch, self.number, self.digest)
        self.epoch, self.number, self.hash = self.epoch + 1, 0, blake2b(digest_size=7)

    def forget_sizes(self) -> None:
        """Forgets the sizes that the ranks have compared. All ranks call it after a mismatch."""
        if self.transport is not None:
            self.transport.forget_sizes()

    def mark(self) -> tuple[Position, Any]:
        """The position of the next collective, and a copy of the hash, for `CollectiveLog.undo`."""
        return (self, self.epoch, self.number), self.hash.copy()

    def identity_of(self, unit: UnitName) -> int:
        """Identifies a unit on this group: its parameters, and the number of its root among the roots that used it."""
        number = self._root_numbers.setdefault(unit.root_id.number, len(self._root_numbers))
        unit.identities[self] = identity = crc32(f"{number} {unit.facts()}".encode(), unit.digest)
        return identity

    def number_of(self, root_id: RootId) -> str:
        """The number of a root among the roots that used this group, as text; empty before its first collective."""
        number = self._root_numbers.get(root_id.number)
        return "" if number is None else f" model number {number + 1} in the order of first use"

    def count_unit(self, key: int) -> tuple[int, int]:
        """Counts a unit that was constructed over this group. Returns ``key`` and the number of earlier equal units.

        Args:
            key: hash of the parameters; the same for equal units.
        """
        self._built[key] += 1
        return key, self._built[key] - 1

    def question_about(self, unit: UnitName) -> int:
        """The identity of a unit (32 bits), its number among equal units, and how many of these there are."""
        key, number = unit.built
        return self.identity_of(unit) | number % 2**15 << 32 | self._built[key] % 2**15 << 47

    @staticmethod
    def agree(questions: Sequence[int]) -> bool:
        """Whether all ranks refer to the same unit.

        If the ranks constructed different numbers of equal units, the order of construction proves nothing.
        """
        numbers = {question >> 32 & 0x7FFF for question in questions}
        totals = {question >> 47 for question in questions}
        return len({question & 0xFFFFFFFF for question in questions}) == 1 and (len(numbers) == 1 or len(totals) > 1)

    @property
    def digest(self) -> int:
        """The hash of this epoch's order, 56 bits."""
        return int.from_bytes(self.hash.digest(), "big")


class _DestroyedGroup:
    """Replaces the hash of a sequence, and refuses collectives of a process group that was destroyed."""

    def update(self, _: bytes) -> None:
        raise RuntimeError(message("destroyed-group"))


Position = tuple[CollectiveSequence, int, int]  # a sequence, an epoch, and a number in it
Parts = tuple[int, ...]  # numbers of parameters


class Entry(NamedTuple):
    """One entry of the log.

    Attributes:
        kind: the name of the collective, ``"all-gather"``.
        unit, parts: the unit, or ``None``, and the numbers of its parameters that have a gradient.
        num_bytes: the size of the input or of the output, whichever is larger.
        iteration: the iteration of this rank.
        identity: the value that the ranks compare.
        group, epoch, number: its position: the key of the group's sequence, the epoch, and the number in it.
        inside: the function that the program called; ``None`` if unknown.
        code, line: the line of the program that called it. For a collective of a unit, this is the call of the
            outermost forward or of the backward. ``None`` in a thread that the program did not start.
    """

    kind: str
    unit: str | None
    parts: Parts
    num_bytes: int
    iteration: int
    identity: bytes
    group: str
    epoch: int
    number: int
    inside: CodeType | None
    code: CodeType | None
    line: int | None

    @property
    def what(self) -> str:
        """The collective as text: "all-gather of 'a' in forward"."""
        unit = "" if self.unit is None else f" of {self.unit!r}" if self.unit else " of the root unit"
        parts = f", its parameters {list(self.parts)}" if self.parts else ""
        return f"{self.kind}{unit}{parts} in {called(self.inside)}"


def where(code: CodeType | None, line: int | None) -> str:
    """A line of the program, ``train.py:88``."""
    return f"{Path(code.co_filename).name}:{line}" if code else "a thread of autograd"


def called(code: CodeType | None) -> str:
    """The function that the program called: ``forward``, ``backward``, ``state_dict``, ``Linear()``."""
    if code is None:
        return "a thread"
    if code.co_name == "__call__" or code.co_name.endswith("_call_impl"):
        return "forward"
    return f"{code.co_qualname.split('.')[-2:][0]}()" if code.co_name == "__init__" else code.co_name


@lru_cache(maxsize=4096)
def _identity(kind: str, num_bytes: int, dtype: Any, unit: Any, parts: Parts) -> bytes:
    # A step repeats the collectives of earlier steps.
    return f"{kind} {num_bytes} {dtype} {unit} {parts};".encode()


class CollectiveLog:
    """The collectives of this process. There is one log, `log`. The watchdog thread reads it.

    Attributes:
        entries: the last collectives, as plain tuples of the fields of `Entry`, which the garbage collector ignores.
        sequences: the sequence of each process group.
        iteration: number of outermost forwards on this rank.
        num_steps: number of optimizer steps.
        waiting: the `Collective` that the main thread waits for.
        latest: the position of the last collective.
        last_event: an accelerator's event after the last work on a communication stream.
        place: the place in the program that runs a forward or a backward; ``None`` outside of both.
        fatal_error: set by the watchdog if no further collective can complete: the text of the error.
        watchdog: the watchdog of the default process group, if there is one.
        store: a weak reference to the store of the default process group. The log is cleared when the store is deleted.
        exit_status: an object that ends the process with another exit status when Python deletes this log.
    """

    def __init__(self) -> None:
        self.entries: deque[tuple[Any, ...]] = deque(maxlen=2048)
        self.sequences: weakref.WeakKeyDictionary[Any, CollectiveSequence] = weakref.WeakKeyDictionary()
        self.iteration = self.num_steps = 0
        self.waiting: Any = None
        self.latest: Position | None = None
        self.last_event: Any = None
        self.place: Place | None = None
        self.fatal_error = ""
        self.watchdog: Any = None
        self.store: weakref.ref[Any] | None = None
        self.exit_status: Any = None
        self._generations = Counter[str]()

    def sequence_of(self, process_group: Any, ranks: tuple[int, ...]) -> CollectiveSequence:
        """The sequence of a process group."""
        if process_group not in self.sequences:
            name = getattr(process_group, "group_name", str(ranks))
            # A later group with the same name gets another key.
            self._generations[name] += 1
            key = f"{name}#{self._generations[name]}"
            self.sequences[process_group] = CollectiveSequence(key, ranks, process_group)
        return self.sequences[process_group]

    def record(
        self, sequence: CollectiveSequence, kind: str, num_bytes: int, unit: str | None, parts: Parts, dtype: Any
    ) -> tuple[Position, bytes]:
        """Adds a collective, which the caller issues next. Returns its position and its identity.

        Args:
            sequence, kind, num_bytes, unit, parts: as in `Entry`; ``unit`` is empty for the outermost module's unit.
            dtype: dtype of the elements, if known.
        """
        of_unit: Any = unit
        if isinstance(unit, UnitName):
            unit.root_id.used.add(sequence)
            of_unit = unit.identities.get(sequence) or sequence.identity_of(unit)
            unit = str(unit)
        identity = _identity(kind, num_bytes, dtype, of_unit, parts)
        sequence.hash.update(identity)
        # 1. The units of a forward or of a backward share its place.
        place = self.place if unit is not None and self.place is not None else self.place_in_program()
        position = (sequence.key, sequence.epoch, sequence.number)
        self.entries.append((kind, unit, parts, num_bytes, self.iteration, identity, *position, *place))
        self.latest = (sequence, sequence.epoch, sequence.number)
        sequence.number += 1
        return self.latest, identity

    def place_in_program(self) -> Place:
        """The innermost line of the program that has called this function, and the function that it has called."""
        place = way_out(sys._getframe(1))
        # An autograd thread, on an accelerator, has no such line. The program waits for it in the main thread.
        return way_out_of_main_thread() if place[1] is None else place

    def undo(self, position: Position, hash_before: Any) -> None:
        """Removes the last entry, which no other rank has. Pass the earlier result of `CollectiveSequence.mark`."""
        sequence, _, number = position
        sequence.number, sequence.hash = number, hash_before
        self.entries.pop()

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
        """Called when the default process group, and with it all other groups, was destroyed."""
        self.waiting = self.latest = self.last_event = self.place = None
        self.fatal_error = ""
        for sequence in self.sequences.values():
            sequence.hash = _DestroyedGroup()
        self.sequences.clear()
        self.entries.clear()


log = CollectiveLog()
