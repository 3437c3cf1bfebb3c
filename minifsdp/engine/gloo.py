"""Gloo's own transport: gather and reduce-scatter on CPUs, by the exchange of pieces and nothing else.

Gloo is the backend for CPUs, and its collectives make detours. Its reduce-scatter copies the whole gradient and sums
*all* of it on every rank, though each rank wants one piece. Every collective runs in a thread of the group, one after
the other. So on CPUs minifsdp sends pieces, straight from the memory where the values are into the memory where
they will be used. Two ranks, a tensor of four elements, what goes over the wire::

    gather            rank 0: [1 2 . .]     --1 2-->   rank 1: [. . 3 4]       both end with [1 2 3 4]
                                            <--3 4--
    reduce_scatter    rank 0: [1 2 3 4]     --3 4-->   rank 1: [5 6 7 8]
                              [5 6]         <--5 6--           [3 4]           parts of the others
                              [6 8]                            [10 12]         their sum

1. *Bytes.* With N ranks each sends (N - 1) / N of the whole, which is the least that can do. Gloo's reduce-scatter
   sends twice that.
2. *Memory.* A gather needs none beside its output. A reduce-scatter receives the first of the others' parts where the
   result will be, and needs room for N - 2 more; gloo's needs room for another whole.
3. *Time.* Sending and receiving begin at once, in gloo's own thread, and go on while the CPU computes. Who waits is
   stopped only for what has not come yet.
4. *Bits.* The parts are summed in the order of the ranks, whichever comes first. The result is the same in every run.

5. *Size.* A message takes some system calls, for which the CPU stops computing; gloo's collectives make them in a
   thread of their own. So pieces of less than 256 KiB go by these: to add up, by its all-to-all, which is the exchange
   above as one call; to gather, among two ranks by the same, among more by its all-gather. Of larger ones, say the
   parameters of a unit, several are sent one by one, each straight into its own place, so that nothing has to be sorted
   afterwards. To be woken takes as long as a small piece is on its way. So who waits for one looks for it half a
   millisecond, leaving the core to whoever wants it, and sleeps only then.

6. *Order.* Receives and sends with one tag pair up in the order in which they are issued, as collectives do. If a
   receive were destroyed, its message would go to the next one. So each exchange stays in a queue until it is complete,
   even if the model is destroyed before.

7. *New orders.* Gloo's own collectives pair up by order alone, and a wrong size ends the process. So as long as an
   order of collectives is new (``ledger.py``), pieces of any size go in messages whose tag contains the identity of the
   all-gather. Ranks that issue different all-gathers never receive each other's values.

The switch: with ``MINIFSDP_TRANSPORT=collectives`` in the environment of *every* rank, gloo's collectives are used as
those of any other backend are; with ``MINIFSDP_TRANSPORT=messages`` pieces of any size go in messages. Both are left to
the collectives, too, if a process group is wrapped for ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, for then it is they that
torch compares.

Programs count collectives with a ``TorchDispatchMode``. Such a mode is shown the operator that would have been called,
on a group that sends nothing; what it counts is what other backends do.

*In torch:* FSDP's all-gather and reduce-scatter are gloo's, and are waited for at once.

Spec: WIRE-01 to WIRE-11.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, FakeProcessGroup, HashStore
from torch.utils._python_dispatch import _disable_current_modes

from minifsdp.engine.lanes import Promise

# Any numbers that no program uses for its own messages.
_REDUCE_TAG, _QUESTION_TAG, _SIZES_TAG = 0x6D696E6A, 0x6D697100, 0x6D697200
_GATHER_TAGS = 0x20000000  # and as many numbers after it
# 5. In bytes, measured: `spec_tests.benchmarks` has both sides of it.
_WORTH_A_MESSAGE = 2**18
_SOON = 0.0005  # seconds, measured with `tiny`
_ALL_TO_ALL = AllToAllOptions()


class Transport:
    """Stands in the place of a process group of gloo, for the two collectives that it does better between CPUs.

    Args:
        backend: gloo's part of the process group, of two ranks or more.
        least_bytes: of a piece that is sent in messages of its own; smaller ones go by the backend's collectives.
    """

    def __init__(self, backend: Any, least_bytes: int = _WORTH_A_MESSAGE) -> None:
        self._least_bytes = least_bytes
        self._backend, self._rank, self._size = backend, backend.rank(), backend.size()
        # Everyone begins with the next one, so that not all send to the same rank at once.
        self._others = [(self._rank + distance) % self._size for distance in range(1, self._size)]
        shown = dist.ProcessGroup(HashStore(), self._rank, self._size)
        sends_nothing = FakeProcessGroup._create_internal(self._rank, self._size)
        shown._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, sends_nothing)
        self._show_gather, self._show_reduce_scatter = _collectives_of(shown)
        self._gather_in_thread, _ = _collectives_of(backend)
        self._gathers, self._reductions, self._questions = _Queue(), _Queue(), _Queue()
        self._is_known, self._gather_tag, self._salt = True, _GATHER_TAGS, 0

    def prepare(self, is_known: bool, identity: int, num_errors: int) -> None:
        """Called before each collective.

        Args:
            is_known: all ranks have asked about this order of collectives.
            identity: of the collective; of a known one its size is enough.
            num_errors: how often the ranks have disagreed so far.
        """
        self._is_known, self._salt = is_known, num_errors % 4096 << 16
        self._gather_tag = _GATHER_TAGS + (identity ^ self._salt) % _GATHER_TAGS

    def all_gather_single(self, output: torch.Tensor, piece: torch.Tensor, options: Any) -> Promise:
        """Issues an all-gather, as the method of a process group."""
        if torch._C._len_torch_dispatch_stack():
            self._show_gather(output, piece, options)
        if piece.nbytes >= self._least_bytes or not self._is_known:
            return self._send_to_all([output.view(self._size, *piece.shape)], [piece])
        if self._size > 2:
            return _Soon(self._gather_in_thread(output, piece, options))
        places = output.tensor_split(2)
        if places[self._rank].data_ptr() != piece.data_ptr():
            places[self._rank].copy_(piece)
        return self._swap_in_thread(places[1 - self._rank], piece)

    def all_gather_apart(
        self, output: torch.Tensor, piece: torch.Tensor, options: Any, tag: int = _QUESTION_TAG
    ) -> Promise:
        """Issues an all-gather that meets no other collective, whatever else the ranks have issued; unseen by modes.

        With gloo's collectives a rank that issues another one than the others, of another size, ends its process.
        """
        outputs = [output.view(self._size, *piece.shape)]
        # Questions of different sizes must not meet either.
        return self._send_to_all(outputs, [piece], tag + piece.nbytes, self._questions)

    def numbers_of_all(self, number: int) -> Callable[[], list[int]]:
        """Sends a number to all ranks; every rank must call it. The function that it returns waits for all numbers."""
        with _disable_current_modes():
            numbers = torch.empty(self._size, dtype=torch.int64)
            exchange = self.all_gather_apart(numbers, torch.tensor([number]), None, _SIZES_TAG)

        def answers() -> list[int]:
            exchange.wait()
            with _disable_current_modes():
                found: list[int] = numbers.tolist()
            return found

        return answers

    def gathers_each(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether several tensors are better gathered one by one than side by side (5)."""
        return sum(output[0].nbytes for output in outputs) >= _WORTH_A_MESSAGE * len(outputs)

    def all_gather_each(self, outputs: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> Promise:
        """Issues the all-gather of several tensors, each straight into an output of its own, a line for each rank.

        They lie side by side in one memory, and so do their outputs.
        """
        if torch._C._len_torch_dispatch_stack():
            numel = sum(output[0].numel() for output in outputs)
            whole, piece = outputs[0].as_strided((self._size * numel,), (1,)), pieces[0].as_strided((numel,), (1,))
            self._show_gather(whole, piece, AllgatherOptions())
        return self._send_to_all(outputs, pieces)

    def _send_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        pieces: Sequence[torch.Tensor],
        tag: int | None = None,
        queue: _Queue | None = None,
    ) -> Promise:
        works, tag = [], (self._gather_tag if tag is None else tag + self._salt)
        for output in outputs:
            works += [self._backend.recv([output[other]], other, tag) for other in self._others]
        for output, piece in zip(outputs, pieces, strict=True):
            own = output[self._rank]
            if own.data_ptr() != piece.data_ptr():
                own.copy_(piece)
            works += [self._backend.send([own], other, tag) for other in self._others]
        return _Exchange(works, queue or self._gathers)

    def reduce_scatter_single(self, piece: torch.Tensor, whole: torch.Tensor, options: Any) -> Promise:
        """Issues a reduce-scatter, as the method of a process group."""
        if torch._C._len_torch_dispatch_stack():
            self._show_reduce_scatter(piece, whole, options)
        own = whole.tensor_split(self._size)
        is_small = piece.nbytes < self._least_bytes
        if is_small and self._size > 2:
            received = torch.empty_like(whole)
            work = _Soon(self._backend.alltoall_base(received, whole, [], [], _ALL_TO_ALL))
            return _Sum(work, received.tensor_split(self._size), piece)
        # 2. One of the first two summands is another rank's, and has its place already.
        parts, first = list(own), 1 if self._rank == 0 else 0
        for other in self._others:
            parts[other] = piece if other == first else torch.empty_like(piece)
        if is_small:
            return _Sum(self._swap_in_thread(piece, own[first]), parts, piece)
        works = [self._backend.recv([parts[other]], other, _REDUCE_TAG + self._salt) for other in self._others]
        works += [self._backend.send([own[other]], other, _REDUCE_TAG + self._salt) for other in self._others]
        return _Sum(_Exchange(works, self._reductions), parts, piece)

    def _swap_in_thread(self, received: torch.Tensor, sent: torch.Tensor) -> Promise:
        """5. What two ranks give each other: an all-to-all in which none gives itself anything."""
        length = sent.shape[0]
        lengths = [0, length] if self._rank == 0 else [length, 0]
        return _Soon(self._backend.alltoall_base(received, sent, lengths, lengths, _ALL_TO_ALL))

    # As they were called before torch 2.13.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single


def _collectives_of(group: Any) -> tuple[Callable[..., Promise], Callable[..., Promise]]:
    """All-gather and reduce-scatter, under their names since torch 2.13 or those before."""
    if hasattr(group, "all_gather_single"):
        return group.all_gather_single, group.reduce_scatter_single
    return group._allgather_base, group._reduce_scatter_base


class _Queue:
    """6. The incomplete exchanges of one kind, with the tensors that they read and write."""

    def __init__(self) -> None:
        self._num_issued = 0
        self._waiting: deque[tuple[int, list[Any]]] = deque()

    def add(self, works: list[Any]) -> int:
        """Keeps ``works``; returns their number."""
        self._num_issued += 1
        self._waiting.append((self._num_issued, works))
        return self._num_issued

    def drop_until(self, number: int) -> None:
        """Number ``number`` has come, and so have all before it."""
        while self._waiting and self._waiting[0][0] <= number:
            self._waiting.popleft()


class _Exchange:
    """The promise of all messages of one collective."""

    __slots__ = ("_number", "_queue", "_works")

    def __init__(self, works: list[Any], queue: _Queue) -> None:
        self._works, self._queue = works, queue
        self._number = queue.add(works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._queue.drop_until(self._number)


class _Soon:
    """The promise of what gloo's thread does with a small piece."""

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        until = time.perf_counter() + _SOON
        while not self._work.is_completed() and time.perf_counter() < until:
            os.sched_yield()
        self._work.wait()


class _Sum:
    """The promise of the parts of all ranks, and of their sum in ``piece``."""

    __slots__ = ("_parts", "_piece", "_work")

    def __init__(self, work: Promise, parts: Sequence[torch.Tensor], piece: torch.Tensor) -> None:
        self._work, self._parts, self._piece = work, parts, piece

    def wait(self) -> None:
        self._work.wait()
        # 4. By rank.
        torch.add(self._parts[0], self._parts[1], out=self._piece)
        for part in self._parts[2:]:
            self._piece.add_(part)


# By process group: what is sent in a group outlives the models that are sharded over it.
_transports: WeakKeyDictionary[Any, Transport] = WeakKeyDictionary()


def transport_between(process_group: Any) -> Transport | None:
    """How to send tensors of the CPU in a process group; ``None`` if its own collectives shall do it."""
    choice = os.environ.get("MINIFSDP_TRANSPORT")
    if choice == "collectives":
        return None
    try:
        backend = process_group._get_backend(torch.device("cpu"))
    except (AttributeError, RuntimeError):
        # A backend for accelerators only, or a group that is not torch's.
        return None
    if type(backend) is not dist.ProcessGroupGloo or backend.size() == 1:
        return None
    if process_group not in _transports:
        _transports[process_group] = Transport(backend, 0 if choice == "messages" else _WORTH_A_MESSAGE)
    return _transports[process_group]
