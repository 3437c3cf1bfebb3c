"""The collective log: every collective of this rank, in order.

A job on many ranks can fail in two ways without an explanation. It hangs, because one rank does not issue a collective
that the others wait for. Or it trains on wrong numbers, because two ranks issued different collectives. A comparison of
the collectives of all ranks finds both. So each collective of this package is recorded when it is issued:

1. *Kind, unit, size, code line.* The record has the kind, the unit, the number of bytes, the iteration, and the line of
   the program that led to the collective. It refers to code objects; names are looked up when the record is read.
2. *Position in its process group.* Collectives of one process group pair up by order. So each group has a `Chain`: a
   position, and a hash of all collectives up to there. Equal hashes mean equal order.
3. *Epoch.* The ranks compare their hashes at the end of each backward (``comparison.py``) and then start a new epoch.
   A position is an epoch and a number in it. Ranks in different epochs are not compared.

The comparison uses the `identity` of each collective: the kind, the number of bytes, the dtype, and the unit. The unit
is identified by its parameters' names and shapes, without the name components that wrappers add, and by the number of
its root on this group. The line in the program is printed, but never compared: healthy ranks may issue the same
collective from different lines.

4. *Sizes between CPUs.* If two ranks issue collectives of different sizes, gloo ends the process in C++. So as long as
   an order of collectives is new, the ranks exchange one number for each. An all-gather must not wait for the answers
   when it is issued, because the program may first do something else on which other ranks depend. So it is sent in
   messages whose tag contains its identity (``gloo.py``): different all-gathers never meet, and the answers are read in
   `Collective.wait`. Any other collective waits for them before it is sent. Orders that the ranks have agreed on are
   remembered, so repeated steps exchange nothing.

Worked example, two ranks, group ``0``, each with one unit that the other one lacks::

    rank 0      0: all-gather a      1: all-gather b      hash 5f1d...
    rank 1      0: all-gather a      1: all-gather c      hash 90ab...     the ranks diverge at position 1

A `Collective` is also the handle of its result. If the backend raises an error during `Collective.wait`, the message
names the collective, and the watchdog (``minifsdp/ledger``) adds what it knows about the other ranks.

Cost: about seven Python calls for each unit and step. The log keeps the last 2,048 records, about one megabyte.

*In torch:* the flight recorder does this for NCCL in C++ and writes files that a tool compares. Gloo has no recorder.

Spec: LEDGER-01 to LEDGER-03, LEDGER-11, LEDGER-19, ORDER-01, ORDER-10, ORDER-11, ORDER-13.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any
from zlib import crc32

from minifsdp.engine.messages import MORE, NOT_THE_PROGRAM, message, way_out_of_main_thread

# The last records, each with the fields of `Entry` in ``ledger/report.py``. A plain tuple costs no Python call, and the
# garbage collector does not track it.
entries: deque[tuple[Any, ...]] = deque(maxlen=2048)
# 4. An order of the last `_NUM_RECENT` collectives has one number: a polynomial of their sizes, modulo a prime.
_NUM_RECENT, _BASE, _PRIME = 16, 1_000_003, 2**61 - 1
_OLDEST = pow(_BASE, _NUM_RECENT, _PRIME)
_MOST_KNOWN = 8192
# Name components that wrappers add and that do not identify a parameter.
_OF_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module"}
# Number of outermost forwards on this rank, and of optimizer steps.
iteration = num_steps = 0
# The collective that the main thread waits for; chain, epoch and number of the last one that was issued; an
# accelerator's event after the last work on a communication stream.
waiting: Collective | None = None
latest: tuple[Chain, int, int] | None = None
on_its_way: Any = None
# Functions that return a report about the other ranks, given a position. The report may be empty.
explainers: list[Callable[[tuple[Chain, int, int]], str]] = []
# Set by the watchdog if no further collective can complete: the ranks, and the report.
verdict: dict[str, Any] = {}
_numbers, _generations = itertools.count(), Counter[str]()


class Tree:
    """The units of one root, for the log.

    Attributes:
        number: number of this root in this process.
        used: the chains in which these units issued a collective since the last backward began.
    """

    def __init__(self) -> None:
        self.number, self.used = next(_numbers), set[Chain]()


class UnitName(str):
    """The full name of a unit, and how the ranks identify it.

    Args:
        name: full name of the unit's module inside the root.
        parameters: name inside the unit, and shape, of each parameter.
        tree: the units of the same root.

    Attributes:
        identities: the identity of the unit in each chain.
        digest: equal for units with equal parameter shapes and names, without the components that wrappers add.
        tree: as given.
        text: the name as an ordinary string, shared by all records of the unit.
    """

    digest: int
    tree: Tree
    identities: dict[Chain, int]
    text: str

    def __new__(cls, name: str, parameters: Iterable[tuple[str, Sequence[int]]], tree: Tree) -> UnitName:
        """Computes the digest once, because it is part of every record."""
        made = super().__new__(cls, name)
        paths = [(f"{name}.{path}".split("."), tuple(shape)) for path, shape in parameters]
        cleaned = [([part for part in parts if part not in _OF_WRAPPERS], shape) for parts, shape in paths]
        made.digest, made.tree, made.identities, made.text = crc32(repr(cleaned).encode()), tree, {}, name
        return made

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """A copy is an ordinary string: it belongs to no root of this process."""
        return str, (str(self),)


class Chain:
    """The order of the collectives that this rank issued in one process group since the last comparison.

    Args:
        name: name of the process group, equal on all of its ranks.
        ranks: global ranks in it.
        process_group: referenced weakly, because the process group is the key of this chain in `chains`.

    Attributes:
        key: name and generation; differs from the key of an earlier group of the same name.
        epoch: number of comparisons so far.
        number: collectives issued since the last comparison.
        hash: hash of all of them.
        last_epoch: epoch, number and digest of the previous epoch.
        transport: sends between CPUs; ``None`` if the process group sends.
        known: the size of the next collective, for each order that the ranks have compared.
        agreed: identities of the units that all ranks agreed to all-gather (``order_check.py``).
        num_errors: how often the ranks disagreed. Part of each tag, so that earlier messages never match later ones.
        recent, context: sizes of the last collectives of this epoch between CPUs, and one number for their order.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], process_group: Any) -> None:
        _generations[name] += 1
        self.name, self.ranks, self.process_group = name, ranks, weakref.ref(process_group)
        self.key = f"{name}#{_generations[name]}"
        self.epoch, self.number, self.hash = -1, 0, blake2b(digest_size=7)
        self.transport: Any = None
        self.known: dict[int, int] = {}
        self.agreed: set[int] = set()
        self.num_errors = 0
        self._trees: dict[int, int] = {}
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Starts a new epoch, at the same position on all ranks."""
        self.last_epoch = (self.epoch, self.number, self.digest)
        self.epoch, self.number, self.hash = self.epoch + 1, 0, blake2b(digest_size=7)
        self.recent, self.context = deque([0] * _NUM_RECENT, maxlen=_NUM_RECENT), 0

    def forget(self) -> None:
        """Forgets all known orders. All ranks call it after a mismatch."""
        self.num_errors += 1
        self.known.clear()

    def identity_of(self, unit: UnitName) -> int:
        """Identifies a unit on this group: its parameters, and the number of its root among the roots that used it."""
        number = self._trees.setdefault(unit.tree.number, len(self._trees))
        unit.identities[self] = identity = crc32(b"%d" % number, unit.digest)
        return identity

    def place(self) -> tuple[int, Any]:
        """The current position, for `return_to`."""
        return self.number, self.hash.copy()

    def return_to(self, place: tuple[int, Any]) -> None:
        """Removes the last record, which no other rank has. The next record gets its number."""
        self.number, self.hash = place
        entries.pop()

    @property
    def digest(self) -> int:
        """The hash of this epoch's order, 56 bits."""
        return int.from_bytes(self.hash.digest(), "big")


chains: weakref.WeakKeyDictionary[Any, Chain] = weakref.WeakKeyDictionary()


def chain_of(process_group: Any, ranks: tuple[int, ...]) -> Chain:
    """The chain of a process group."""
    if process_group not in chains:
        chains[process_group] = Chain(getattr(process_group, "group_name", str(ranks)), ranks, process_group)
    return chains[process_group]


def forget_groups() -> None:
    """Called when the default process group was destroyed, and with it all other groups."""
    global waiting, latest, on_its_way, verdict
    waiting = latest = on_its_way = None
    verdict = {}
    chains.clear()
    entries.clear()


class Collective:
    """Issues a collective, and is the handle of its result.

    Args:
        kind, num_bytes: as in `Entry`.
        group: the group; all of its ranks must issue the same collective.
        issue: the function that issues the collective. It returns a handle or ``None``.
        arguments: arguments of ``issue``.
        on_cpu: whether the process group sends from CPU memory.
        unit: the name of the unit, empty for the outermost module's unit; ``None`` if there is no unit.
        parts: numbers of the parameters whose gradients it contains, in the per-parameter layout.
        dtype: dtype of the elements, if known.

    Attributes:
        about: kind and unit, as text.
        chain, epoch, number: the position.

    Raises:
        RuntimeError: it cannot complete, because another rank has exited or issues a different collective.
    """

    __slots__ = ("_question", "_work", "about", "chain", "epoch", "number")

    def __init__(
        self,
        kind: str,
        group: Any,
        num_bytes: int,
        issue: Callable[..., Any],
        *arguments: Any,
        on_cpu: bool = False,
        unit: str | None = None,
        parts: Sequence[int] = (),
        dtype: Any = None,
    ) -> None:
        global waiting, latest
        if verdict:
            raise cannot_complete()
        self.chain = chain = group.chain
        self.epoch, self.number = chain.epoch, chain.number
        self.about = kind if unit is None else f"{kind} of {unit!r}"
        parts = tuple(parts)
        name: str | None = unit
        of_unit: Any = unit
        if isinstance(unit, UnitName):
            unit.tree.used.add(chain)
            name, of_unit = unit.text, unit.identities.get(chain) or chain.identity_of(unit)
        identity = f"{kind} {num_bytes} {dtype} {of_unit} {parts};".encode()
        chain.hash.update(identity)
        # 1. The frame of the program that led here.
        inside = frame = sys._getframe(1)
        while frame and frame.f_globals.get("__name__", "").partition(".")[0] in NOT_THE_PROGRAM:
            inside, frame = frame, frame.f_back  # type: ignore[assignment]
        where = (inside and inside.f_code, frame and frame.f_code, frame and frame.f_lineno)
        if frame is None:
            # An autograd thread, on an accelerator. The program waits for it in the main thread.
            where = way_out_of_main_thread()
        position = (chain.key, chain.epoch, chain.number)
        entries.append((kind, name, parts, num_bytes, iteration, crc32(identity), *position, *where))
        chain.number += 1
        waiting, latest = self, (chain, self.epoch, self.number)
        self._question: tuple[int, Callable[[], list[int]]] | None = None
        try:
            if on_cpu and chain.transport is not None:
                self._agree(kind, num_bytes, identity)
            try:
                self._work = issue(*arguments)
            except RuntimeError as error:
                raise failed(self, error) from error
        finally:
            # Also if the program catches the exception: the main thread no longer waits.
            waiting = None

    def _agree(self, kind: str, num_bytes: int, identity: bytes) -> None:
        """4. Makes sure that no rank receives a size that it does not expect."""
        chain, shape = self.chain, crc32(kind.encode()) + (num_bytes << 32)
        is_known = chain.known.get(chain.context) == shape
        chain.transport.prepare(is_known, num_bytes if is_known else crc32(identity), chain.num_errors)
        if not is_known:
            if len(chain.known) >= _MOST_KNOWN:
                # At the same position on all ranks.
                chain.known.clear()
            chain.known[chain.context] = shape
            answers = chain.transport.numbers_of_all((chain.context * _BASE + shape) % _PRIME)
            self._question = chain.num_errors, answers
            if kind != "all-gather":
                self._read_answers()
        chain.context = (chain.context * _BASE + shape - chain.recent[0] * _OLDEST) % _PRIME
        chain.recent.append(shape)

    def _read_answers(self) -> None:
        """Raises on all ranks if they issue collectives of different kinds or sizes."""
        assert self._question is not None
        chain, (num_errors, answers) = self.chain, self._question
        self._question = None
        if num_errors != chain.num_errors:
            # The ranks have disagreed since. All of them drop the collectives from before.
            self._work = None
            return
        try:
            numbers = answers()
        except RuntimeError as error:
            raise failed(self, error) from error
        if len({*numbers}) > 1:
            self._work = None
            report = explained((chain, self.epoch, self.number))
            chain.begin_epoch()
            chain.forget()
            raise RuntimeError(message("about-to-part", ranks=list(chain.ranks), report=report))

    def wait(self) -> None:
        """Waits until the result may be used on the compute stream.

        Raises:
            RuntimeError: the backend reports an error: another rank has exited, or the time-out has passed.
        """
        global waiting
        waiting = self
        try:
            if self._question is not None:
                self._read_answers()
            if self._work is not None:
                self._work.wait()
        except RuntimeError as error:
            # An error of `_read_answers` already has a report.
            raise error if MORE in str(error) else failed(self, error) from error
        finally:
            waiting = None
        # The watchdog may hold this object, which must not keep tensors alive.
        self._work = None

    def wait_for(self, complete: Callable[[], Any]) -> None:
        """Makes `wait` call ``complete``."""
        self._work = SimpleNamespace(wait=complete)


def failed(collective: Collective, error: Exception) -> RuntimeError:
    """The error to raise when ``collective`` failed with ``error``, with a report about the other ranks."""
    if verdict:
        return cannot_complete()
    chain, what = collective.chain, collective.about
    report = explained((chain, collective.epoch, collective.number))
    return RuntimeError(message("collective-failed", what=what, ranks=list(chain.ranks), error=error, report=report))


def cannot_complete() -> RuntimeError:
    """The error for every further collective."""
    return RuntimeError(message("waits-in-vain", ranks=verdict["ranks"], report=verdict["report"]))


def explained(place: tuple[Chain, int, int]) -> str:
    """A report about the other ranks of a chain, on separate lines."""
    return "".join(f"\n{text}" for text in (explain(place) for explain in explainers) if text)
