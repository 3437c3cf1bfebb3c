"""Models memory like a caching allocator: which operations accessed which bytes, and which block reuses them.

The bytes are real CPU memory. Only their ownership is simulated. A `Block` is one allocation, from ``empty`` (or a
storage's ``resize_(n)``) to its last reference (or ``resize_(0)``). It belongs to the stream that was current at the
allocation. It returns to that stream *as soon as Python releases it*, even if another stream still reads it::

    on the all-gather stream    a = empty(8)    block 1 of the all-gather stream
    on the compute stream       b = a + 1       the compute stream reads block 1
                                del a           block 1 returns to the all-gather stream at once
    on the all-gather stream    c = empty(8)    the same bytes: a write here can change what `a + 1` reads

PyTorch's allocator on CUDA does this. The simulation always assumes the worst case: each new block of a stream counts
as made of all memory that was ever returned to that stream. A block keeps the last accesses of its earlier owners
(`Block.ghosts`) until a write that comes after them in all orders.

``record_stream`` delays the return: the block is kept until that stream has passed the point where it was freed. The
block cannot be reused in the meantime, but it counts as used, so the peak is higher. For a storage that is a part of a
larger one, it has no effect, because the allocator only knows the larger one.

This module also tracks host memory that a device copies from or to without waiting. Whether it is pinned decides
whether a copy is asynchronous (see ``operators.py``).

*In torch:* ``CUDACachingAllocator.cpp``, which also rounds sizes, splits and merges. None of this changes which blocks
can share memory. Peaks here are sums of exact sizes.

Spec: SIM-02.
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from spec_tests.harness.simulated.clocks import HOST, LOCK, Clock, Event, Stream, join

__all__ = ["Access", "Block", "Home", "Memory"]

_numbers = itertools.count(1)


@dataclass(slots=True)
class Access:
    """One operator that has read or written some bytes.

    Attributes:
        stream: number of the stream; `HOST` for the CPU.
        number: index of the operation in that stream.
        low, high: the bytes, counted from the beginning of the block; strides count as the span that they cover.
        is_write: whether it is a write.
        operator: the operator's name.
        where: the lines of the program that called it.
    """

    stream: int
    number: int
    low: int
    high: int
    is_write: bool
    operator: str
    where: str

    def is_before(self, clock: Clock) -> bool:
        """Whether it is complete when an operation with ``clock`` begins."""
        return clock.get(self.stream, 0) >= self.number

    def meets(self, other: Access) -> bool:
        """Whether both access a common byte and at least one of them writes."""
        return (self.is_write or other.is_write) and self.low < other.high and other.low < self.high


@dataclass(slots=True, eq=False)
class Block:
    """One allocation.

    Attributes:
        owner: number of the stream that allocated it; `HOST` for host memory.
        num_bytes: its size.
        address: address of the real memory.
        place: index of the simulated memory that contains it; successive blocks can share one.
        accesses: those that a later access can still collide with.
        ghosts: the last accesses to earlier blocks in the same memory.
        recorded: numbers of the streams given to ``record_stream``.
        where: the line that allocated it.
        is_pinned: host memory that a device can copy from or to asynchronously.
        garbage: writes of collectives that cannot complete, and that nothing has overwritten.
    """

    owner: int
    num_bytes: int
    address: int
    place: int
    ghosts: list[Access]
    where: str
    accesses: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)
    is_pinned: bool = False
    garbage: list[Access] = field(default_factory=list)

    def note(self, new: Access, clock: Clock) -> Iterator[tuple[str, Access]]:
        """Adds an access. Yields the accesses that it collides with, each with the kind of collision."""
        kept = []
        for old in self.accesses:
            in_order = old.is_before(clock)
            if not in_order and old.meets(new):
                yield "race", old
            # Every access that comes after the new one also comes after this one.
            is_covered = new.low <= old.low and old.high <= new.high and (new.is_write or not old.is_write)
            if not (in_order and is_covered):
                kept.append(old)
        kept.append(new)
        self.accesses = kept
        if self.ghosts:
            for old in self.ghosts:
                if (old.is_write or new.is_write) and not old.is_before(clock):
                    yield "reuse", old
            self.ghosts = [old for old in self.ghosts if not old.is_before(clock)]
        if self.garbage:
            if not new.is_write:
                yield from (("garbage", old) for old in self.garbage if old.meets(new))
            else:
                self.garbage = [old for old in self.garbage if not (new.low <= old.low and old.high <= new.high)]


class Home:
    """A storage, and its block if it has memory.

    Attributes:
        block: ``None`` while the storage has no bytes.
        offset: position of the storage in the block.
        is_part: the block belongs to a larger storage, and this storage is a part of it.
    """

    __slots__ = ("__weakref__", "_references", "_storage", "block", "index", "is_part", "offset")

    def __init__(self, storage: Any, block: Block | None, offset: int, is_part: bool, index: int) -> None:
        self._storage = StorageWeakRef(storage)
        self.block, self.offset, self.is_part, self.index = block, offset, is_part, index
        self._references: dict[int, weakref.ref[torch.Tensor]] = {}

    @property
    def is_gone(self) -> bool:
        """Whether the storage has no references."""
        gone: bool = self._storage.expired()
        return gone

    def living_storage(self) -> Any:
        """The storage itself."""
        return torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)

    def watch(self, tensor: torch.Tensor, on_release: Callable[[Home], None]) -> None:
        """Calls ``on_release`` when the last watched tensor is deleted or gets other memory (`unwatch`)."""
        key = id(tensor)
        self._references[key] = weakref.ref(tensor, lambda _: self._unwatch(key, on_release))

    def unwatch(self, tensor: torch.Tensor, on_release: Callable[[Home], None]) -> None:
        """Stops watching a tensor that got other memory."""
        self._unwatch(id(tensor), on_release)

    def _unwatch(self, key: int, on_release: Callable[[Home], None]) -> None:
        self._references.pop(key, None)
        if not self._references:
            on_release(self)


class Memory:
    """All blocks of the simulated devices, and the host blocks that they copy from and to.

    Attributes:
        num_bytes: size of all living blocks.
        peak: the largest sum of these and of the blocks that ``record_stream`` kept.
        num_host_blocks: number of watched host blocks; if 0, operators on the CPU have no overhead.
        first_bytes: by place, the contents of a block when the open log began or first used it.
    """

    def __init__(self, report: Callable[[str, Access, Access | None, Block | None], None]) -> None:
        self._report = report
        self.homes: dict[int, Home] = {}
        # Sorted addresses at which a block of a living storage begins. A storage can be a part of another one.
        self._addresses: list[int] = []
        self._home_at: dict[int, Home] = {}
        self._maybe_gone: list[Home] = []
        # By stream: the last access of each stream to any memory that was returned to it.
        self._given_back: dict[int, dict[int, Access]] = defaultdict(dict)
        # By stream: places that can be reused, most recently freed last.
        self._free_places: dict[int, list[int]] = defaultdict(list)
        self.size_of_place: dict[int, int] = {}
        self._held_back: list[tuple[Block, Event]] = []
        self.streams: dict[int, Stream] = {}
        self.num_bytes = self.peak = self.num_host_blocks = 0
        self.first_bytes: dict[int, torch.Tensor] | None = None

    # --- blocks ---

    def allocate(self, num_bytes: int, address: int, stream: Stream) -> Block:
        """Allocates a block for ``stream`` from memory that was returned to it."""
        self.reap()
        self._release_held_back()
        ghosts = [a for a in self._given_back[stream.number].values() if not a.is_before(Stream.host_clock)]
        block = Block(stream.number, num_bytes, address, self._place(stream.number, num_bytes), ghosts, Stream.where())
        self.streams[stream.number] = stream
        self.num_bytes += num_bytes
        self.peak = max(self.peak, self.used)
        return block

    @property
    def used(self) -> int:
        """Bytes in use or kept by ``record_stream``."""
        return self.num_bytes + sum(block.num_bytes for block, _ in self._held_back)

    def _place(self, stream: int, num_bytes: int) -> int:
        """The worst case of an allocator: the most recently freed place, if it is large enough."""
        free = self._free_places[stream]
        for i in range(len(free) - 1, -1, -1):
            if self.size_of_place[free[i]] >= num_bytes:
                return free.pop(i)
        place = next(_numbers)
        self.size_of_place[place] = num_bytes
        return place

    def free(self, block: Block) -> None:
        """Returns the block to its stream, or keeps it for the streams of ``record_stream``."""
        if block.owner == HOST:
            # Host memory. The allocator of pinned memory keeps blocks that a copy still reads or writes.
            self.num_host_blocks -= 1
            return
        self.num_bytes -= block.num_bytes
        event = Event()
        for number in block.recorded:
            join(event.clock, self.streams[number].record_event().clock)
        ghosts = self._given_back[block.owner]
        for access in [*block.ghosts, *block.accesses]:
            # The block is kept until all work that the recorded streams have received, or waited for, is complete.
            if access.stream == HOST or access.is_before(event.clock):
                continue
            if access.stream not in ghosts or ghosts[access.stream].number <= access.number:
                ghosts[access.stream] = access
        if block.recorded:
            self._held_back.append((block, event))
        else:
            self._free_places[block.owner].append(block.place)

    def _release_held_back(self) -> None:
        waiting = []
        for block, event in self._held_back:
            if event.is_passed:
                self._free_places[block.owner].append(block.place)
            else:
                waiting.append((block, event))
        self._held_back = waiting

    # --- storages ---

    def home_of(self, storage: Any, stream: Stream | None, index: int = 0) -> Home:
        """The `Home` of a storage. A new storage gets a block of ``stream``, or a host block for ``None``."""
        home = self.homes.get(storage._cdata)
        if home is not None and not home.is_gone:
            return home
        if home is not None:
            self._forget(home)
        num_bytes, address = storage.nbytes(), storage.data_ptr()
        larger = self._containing(address, num_bytes) if num_bytes else None
        if larger is not None:
            home = Home(storage, larger, address - larger.address, True, index)
        elif stream is not None:
            block = self.allocate(num_bytes, address, stream) if num_bytes else None
            home = Home(storage, block, 0, False, index)
        else:
            home = Home(storage, self._host_block(storage), 0, False, index)
        if not home.is_part:
            self._settle_at(home)
        self.homes[storage._cdata] = home
        return home

    def _containing(self, address: int, num_bytes: int) -> Block | None:
        place = bisect.bisect_right(self._addresses, address) - 1
        if place < 0:
            return None
        home = self._home_at[self._addresses[place]]
        block = home.block
        if home.is_gone or block is None or address + num_bytes > block.address + block.num_bytes:
            return None
        return block

    def _settle_at(self, home: Home) -> None:
        """Records the address of the block of ``home``."""
        if home.block is not None:
            address = home.block.address
            if address not in self._home_at:
                bisect.insort(self._addresses, address)
            self._home_at[address] = home

    def _leave(self, home: Home) -> None:
        block = home.block
        if block is not None and self._home_at.get(block.address) is home:
            del self._home_at[block.address]
            del self._addresses[bisect.bisect_left(self._addresses, block.address)]

    def _host_block(self, storage: Any) -> Block:
        self.num_host_blocks += 1
        place = next(_numbers)
        self.size_of_place[place] = storage.nbytes()
        if self.first_bytes is not None:
            # Its values were written by an operation that is not watched.
            self.first_bytes[place] = bytes_of(storage)
        return Block(HOST, storage.nbytes(), storage.data_ptr(), place, [], Stream.where())

    def resized(self, storage: Any, stream: Stream, resize: Callable[[], Any]) -> Any:
        """Resizes a storage of a device: its block ends, and a new one begins."""
        home = self.homes.get(storage._cdata)
        if home is None or home.is_gone or home.is_part or (home.block is not None and home.block.owner == HOST):
            return resize()
        if home.block is not None:
            self._leave(home)
            self.free(home.block)
        result = resize()
        num_bytes = storage.nbytes()
        home.block = self.allocate(num_bytes, storage.data_ptr(), stream) if num_bytes else None
        self._settle_at(home)
        return result

    def notice_size(self, storage: Any, stream: Stream) -> None:
        """Gives a new block to a storage that C++ has resized, as ``Tensor.resize_`` does."""
        home = self.homes.get(storage._cdata)
        if home is not None and not home.is_part:
            num_bytes = storage.nbytes()
            if num_bytes != (0 if home.block is None else home.block.num_bytes):
                self.resized(storage, stream, lambda: None)

    def released(self, home: Home) -> None:
        """Called when the last tensor of a storage is deleted. Nearly always the storage is deleted, too."""
        with LOCK:
            if home.is_gone:
                self._forget(home)
            else:
                self._maybe_gone.append(home)

    def reap(self) -> None:
        """Frees the blocks of storages that another object kept alive after their last tensor."""
        waiting, self._maybe_gone = self._maybe_gone, []
        for home in waiting:
            if home.is_gone:
                self._forget(home)
            elif not home._references:
                self._maybe_gone.append(home)

    def _forget(self, home: Home) -> None:
        if self.homes.get(home._storage.cdata) is home:
            del self.homes[home._storage.cdata]
        if not home.is_part:
            self._leave(home)
        block, home.block = home.block, None
        if block is not None and not home.is_part:
            self.free(block)

    # --- accesses ---

    def access(self, home: Home, new: Access, clock: Clock) -> None:
        """Records one access, and reports its collisions."""
        with LOCK:
            if home.block is None:
                self._report("freed", new, None, None)
                return
            for kind, old in home.block.note(new, clock):
                self._report(kind, new, old, home.block)

    def calm(self) -> None:
        """Marks all earlier accesses as complete, for the beginning of a test."""
        self.reap()
        self._given_back.clear()
        self._held_back.clear()
        self._free_places.clear()
        for home in self.homes.values():
            if home.block is not None:
                home.block.accesses, home.block.ghosts = [], []
                home.block.recorded, home.block.garbage = set(), []
        self.peak = self.num_bytes


def bytes_of(storage: Any) -> torch.Tensor:
    """A copy of the contents of a storage."""
    view = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
    return view.clone()
