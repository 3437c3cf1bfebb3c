"""The ledger: what this rank has sent to others, in order, always kept.

A job on many ranks ends badly in two ways that say nothing: it hangs, since one rank does not come to a collective in
which the others wait, or it trains on wrong numbers, since two ranks came to different ones. Both are seen at once if
one can lay side by side what each rank has sent. So every collective of this package is written down as it is issued:

1. *Who, what, where.* Kind, unit, bytes, iteration, and the line of the program that led to it. A name is looked up
   when it is read, not when it is written; what is kept is a reference to the code and a number.
2. *Which place in its group.* Collectives of one process group pair up by their order. So each group has a *chain*: a
   number, and a hash of all that was issued in it so far. Equal chains, equal order; where two chains part, the two
   ranks send each other the wrong thing.
3. *In which epoch.* Chains are compared at the end of each backward (``comparison.py``) and begin anew then. What was
   equal once is never looked at again, and a rank that is merely slow has the beginning of the other's chain.

4. *Asked before, where that is needed.* Between CPUs a message that is larger than what was expected ends the process
   that receives it, in C++. So each rank knows which sizes have followed each other before, on all ranks, and asks the
   others before it sends anything else. Of two ranks that part at least one does something new, so sizes never differ.
   What repeats itself, as steps do, is asked about once.

Worked example, two ranks in the group ``0``, one unit each that the other has not::

    rank 0      #0 all-gather a      #1 all-gather b      chain (2, 5f1d...)
    rank 1      #0 all-gather a      #1 all-gather c      chain (2, 90ab...)     they part at #1

Who issues a collective gets the promise of its result. If the backend reports an error to who waits for it, the promise
knows of which collective. What every *other* rank was doing must be asked for:
that is done by those who have put themselves down in `explainers`, in a room of their own (``minifsdp/ledger``).

Price: a unit takes seven calls of Python for each step, and the last 2,048 entries are kept, a megabyte.

*In torch:* the flight recorder does this for NCCL, in C++; what it has recorded is written to files, for a tool to
compare afterwards. Gloo has nothing.

Spec: LEDGER-01 to LEDGER-03, LEDGER-11, ORDER-01, ORDER-10, ORDER-11.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

from minifsdp.engine.messages import NOT_THE_PROGRAM, message, way_out_of_main_thread

# The last that were issued, each as the fields of an `Entry` of ``ledger/report.py``: a plain tuple is made without a
# call of Python, and the garbage collector need not look at it.
entries: deque[tuple[Any, ...]] = deque(maxlen=2048)
# 4. How many of the last ones count. Their order has a number: a polynomial of their shapes, modulo a prime.
_NUM_RECENT, _BASE, _PRIME = 16, 1_000_003, 2**61 - 1
_OLDEST = pow(_BASE, _NUM_RECENT, _PRIME)
_MOST_KNOWN = 8192
# How many outermost forwards have begun on this rank, and how many steps optimizers have taken.
iteration = num_steps = 0
# The collective that this rank waits for right now; chain and epoch of the last one that was issued; an accelerator's
# event behind what was put on a lane last.
waiting: Collective | None = None
latest: tuple[Chain, int] | None = None
on_its_way: Any = None
# Asked for more words when a collective has failed, with its chain and epoch; each may return none.
explainers: list[Callable[[Chain, int], str]] = []
# Why no more may be sent, if another thread has found that out.
verdict: RuntimeError | None = None


class Chain:
    """The order of what this rank has issued in one process group, since the last comparison.

    Args:
        name: of the process group, the same on all of its ranks.
        ranks: global ranks in it.

    Attributes:
        epoch: how often it was compared.
        number: entries since then.
        hash: of all of them.
        last_epoch: epoch, number and digest of the one before.
        ask: tells a number to all ranks, and returns those of all; ``None`` where it need not be asked (4).
        known: what has followed an order, the last time that all ranks said so.
        recent, context: kinds and sizes of the last ones of this epoch between CPUs, and one number for their order.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], process_group: Any) -> None:
        self.name, self.ranks, self.process_group = name, ranks, process_group
        self.epoch, self.number, self.hash = -1, 0, blake2b(digest_size=7)
        self.ask: Callable[[int], list[int]] | None = None
        self.known: dict[int, int] = {}
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """What was issued so far was found equal on all ranks, or was reported."""
        self.last_epoch = (self.epoch, self.number, self.digest)
        self.epoch, self.number, self.hash = self.epoch + 1, 0, blake2b(digest_size=7)
        # All ranks are at this place, so what follows it may be known from the last epoch already.
        self.recent, self.context = deque([0] * _NUM_RECENT, maxlen=_NUM_RECENT), 0

    def place(self) -> tuple[int, Any]:
        """Where the chain is now, for `return_to`."""
        return self.number, self.hash.copy()

    def return_to(self, place: tuple[int, Any]) -> None:
        """Takes back the last entry, to which no other rank has come: the next one has its number."""
        self.number, self.hash = place
        entries.pop()

    @property
    def digest(self) -> int:
        """56 bits of all that was issued in this epoch, and of its order."""
        return int.from_bytes(self.hash.digest(), "big")


chains: WeakKeyDictionary[Any, Chain] = WeakKeyDictionary()


def chain_of(process_group: Any, ranks: tuple[int, ...]) -> Chain:
    """The chain of a process group, one for all who use it."""
    if process_group not in chains:
        chains[process_group] = Chain(getattr(process_group, "group_name", str(ranks)), ranks, process_group)
    return chains[process_group]


class Collective:
    """A collective that is issued by making this, and the promise of its result.

    Args:
        kind, num_bytes: as in `Entry`.
        group: whose ranks must all issue the same.
        issue: the function that sends; what it returns is waited for, if it returns anything.
        arguments: for ``issue``.
        on_cpu: whether it is sent from the memory of a CPU, by the process group.
        unit: the name of the unit that it is for, which of the outermost module is empty; ``None`` if it is for none.
        parts: which of the unit's parameters have a gradient, if each has its own.

    Attributes:
        about: kind and unit.
        chain, epoch: its place.

    Raises:
        RuntimeError: it cannot be sent: another rank has gone, has sent something else, or is about to.
    """

    __slots__ = ("_work", "about", "chain", "epoch")

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
    ) -> None:
        global waiting, latest
        if verdict:
            raise verdict
        self.chain = chain = group.chain
        self.epoch, self.about = chain.epoch, kind if unit is None else f"{kind} of {unit!r}"
        parts = tuple(parts)
        chain.hash.update(f"{self.about} {parts};".encode())
        # 1. The way from here out to the program.
        inside = frame = sys._getframe(1)
        while frame and frame.f_globals.get("__name__", "").partition(".")[0] in NOT_THE_PROGRAM:
            inside, frame = frame, frame.f_back  # type: ignore[assignment]
        where = (inside and inside.f_code, frame and frame.f_code, frame and frame.f_lineno)
        if frame is None:
            # A thread of autograd, as accelerators have. The program waits for it in the main thread.
            where = way_out_of_main_thread()
        entries.append((kind, unit, parts, num_bytes, iteration, chain.name, chain.epoch, chain.number, *where))
        chain.number += 1
        waiting, latest = self, (chain, chain.epoch)
        try:
            if on_cpu and chain.ask is not None:
                # 4. Nothing is sent to a rank that expects another size.
                shape, recent = crc32(kind.encode()) + (num_bytes << 32), chain.recent
                if chain.known.get(chain.context) != shape:
                    self._ask(chain.ask, shape)
                chain.context = (chain.context * _BASE + shape - recent[0] * _OLDEST) % _PRIME
                recent.append(shape)
            try:
                self._work = issue(*arguments)
            except RuntimeError as error:
                raise failed(self, error) from error
        finally:
            # Also if the program catches what was raised: it waits no more.
            waiting = None

    def _ask(self, numbers_of_all: Callable[[int], list[int]], shape: int) -> None:
        """Makes sure that all ranks are about to send as much in the same way, and remembers it.

        If they do, and mean another unit, it is the comparison that tells.
        """
        chain = self.chain
        try:
            numbers = numbers_of_all((chain.context * _BASE + shape) % _PRIME)
        except RuntimeError as error:
            raise failed(self, error) from error
        if len({*numbers}) > 1:
            # All ranks know, and may begin again together.
            chain.begin_epoch()
            raise RuntimeError(message("about-to-part", ranks=list(chain.ranks), report=explained(chain, self.epoch)))
        if len(chain.known) >= _MOST_KNOWN:
            # At the same place on all ranks.
            chain.known.clear()
        chain.known[chain.context] = shape

    def wait(self) -> None:
        """Until this returns, what was promised must not be used on the compute stream.

        Raises:
            RuntimeError: the backend has given up: another rank has gone, or did not come in time.
        """
        global waiting
        if self._work is None:
            return
        waiting = self
        try:
            self._work.wait()
        except RuntimeError as error:
            raise failed(self, error) from error
        finally:
            waiting = None
        # The watcher may be looking at this, and must not keep tensors alive.
        self._work = None

    def wait_for(self, complete: Callable[[], Any]) -> None:
        """From now on `wait` calls ``complete``."""
        self._work = SimpleNamespace(wait=complete)


def skip(kind: str, group: Any, unit: str) -> None:
    """Writes down what is *not* sent though it might be, as a gradient that is kept: others must not send it either."""
    Collective(kind, group, 0, lambda: None, unit=unit)


def failed(collective: Collective, error: Exception) -> RuntimeError:
    """What to raise when ``collective`` has failed with ``error``: that, and what is known of the other ranks."""
    if verdict:
        return verdict
    chain, what = collective.chain, collective.about
    report = explained(chain, collective.epoch)
    return RuntimeError(message("collective-failed", what=what, ranks=list(chain.ranks), error=error, report=report))


def explained(chain: Chain, epoch: int) -> str:
    """What is known of the other ranks of a chain, in lines of their own."""
    return "".join(f"\n{text}" for text in (explain(chain, epoch) for explain in explainers) if text)
