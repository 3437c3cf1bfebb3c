"""All-gather and reduce-scatter between CPUs, by point-to-point messages of gloo.

`transport_between` returns the `Transport` of a process group. ``minifsdp/engine/events.py`` lists the methods that
minifsdp calls.

Gloo is the backend for CPUs. Its collectives do more work than necessary: its reduce-scatter copies the unsharded
gradient and sums *all* of it on every rank, although each rank needs only one shard. Also, the group runs its
collectives one after the other, in its own thread. So on CPUs minifsdp sends shards as messages, directly between the
tensors that store and receive the values. Example: two ranks, a tensor of four elements::

    all-gather        rank 0: [1 2 . .]     --1 2-->   rank 1: [. . 3 4]       both end with [1 2 3 4]
                                            <--3 4--
    reduce_scatter    rank 0: [1 2 3 4]     --3 4-->   rank 1: [5 6 7 8]
                              [5 6]         <--5 6--           [3 4]           parts of the other rank
                              [6 8]                            [10 12]         their sum

1. *Bytes.* With N ranks, each rank sends (N - 1) / N of the unsharded size, which is the minimum. Gloo's reduce-scatter
   sends twice as much.
2. *Memory.* An all-gather needs no memory in addition to its output. A reduce-scatter receives the part of one other
   rank in its output, and needs memory for N - 2 more parts. Gloo's needs memory for another gradient.
3. *Time.* Sends and receives start immediately in gloo's own thread, and run while the CPU computes. ``wait()`` blocks
   only until the remaining messages have arrived.
4. *Bits.* The parts are summed in the order of the ranks, independent of the order of arrival. So the result is the
   same in every run.
5. *Size.* A message costs some system calls, during which the CPU does not compute. Gloo's collectives make these calls
   in their own thread. So shards of less than 256 KiB use gloo's collectives. Reductions, and all-gathers between two
   ranks, use gloo's all-to-all, which is the exchange above in one call. Other all-gathers use gloo's all-gather.
   Several larger tensors, such as the parameters of a unit, are sent one by one, each directly into its output, so no
   data must be sorted later. Waking a thread takes about as long as a small transfer. So ``wait()`` polls for half a
   millisecond, yielding the core, before it blocks.
6. *Order.* Receives and sends with one tag pair up in the order of their issue, as collectives do. If a receive were
   destroyed, the next receive would get its message. So each exchange stays in a queue until it is complete, even if
   the model is destroyed earlier. All ranks issue collectives in one order, so exchanges also complete in this order.
7. *New orders.* Gloo's own collectives pair up by order alone. If two ranks issue collectives of different sizes, gloo
   ends the process in C++. So as long as an order of collectives is new, the ranks exchange one number for each
   collective. An all-gather must not wait for the numbers of other ranks when it is issued, because other ranks may
   depend on something that the program does first. So its shards are sent in messages whose tag contains its size.
   All-gathers of different sizes never receive each other's values, and ``wait()`` reads the numbers. Any other
   collective waits for the numbers before it sends data. In an order that the ranks have agreed on, they exchange none.
8. *Counts.* Programs count collectives with a ``TorchDispatchMode``. Such a mode sees the operator that another backend
   would run, on a group that sends no data. So its counts are the same as with other backends.

The environment variable ``MINIFSDP_TRANSPORT`` must be equal on *every* rank. ``collectives`` selects gloo's
collectives, as for other backends. ``messages`` sends shards of any size in messages. If
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps the process group, it compares gloo's collectives, so these are always used.

*In torch:* FSDP uses gloo's all-gather and reduce-scatter, and waits for each immediately.

Spec: WIRE-01 to WIRE-11, ORDER-10, LEDGER-15.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions
from torch.utils._python_dispatch import _disable_current_modes

# Arbitrary numbers that no program uses for its own messages. The size of a message is added to all but the first.
_REDUCE_TAG = 0x6D696E6A
_QUESTION_TAG = 0x6D697100
_SIZES_TAG = 0x6D697200
_GATHER_TAG = 0x20000000
_NUM_TAGS = 0x20000000  # for all-gathers
# 5. In bytes, chosen by measurement: `spec_tools.benchmarks` measures smaller and larger sizes.
_WORTH_A_MESSAGE = 2**18
_POLL_SECONDS = 0.0005  # seconds, chosen by measurement with `tiny`
_ALL_TO_ALL = AllToAllOptions()
# 7. The sizes of the last `_NUM_RECENT` collectives identify an order.
_NUM_RECENT = 16
_MOST_KNOWN = 8192


class Transport:
    """Replaces a process group of gloo for all-gather and reduce-scatter between CPUs.

    Args:
        backend: the gloo backend of the process group, which must have two ranks or more.
        least_bytes: size of the smallest shard that is sent in messages; smaller shards use the backend's collectives.
    """

    def __init__(self, backend: Any, least_bytes: int = _WORTH_A_MESSAGE) -> None:
        self._least_bytes = least_bytes
        self._backend = backend
        self._rank = backend.rank()
        self._size = backend.size()
        # Each rank sends to the next rank first, so that not all ranks send to the same rank at once.
        self._others = [
            (self._rank + distance) % self._size for distance in range(1, self._size)
        ]
        # 8. A group that sends no data. Dispatch modes see its collectives.
        self._for_modes: Any = dist.ProcessGroup(
            dist.HashStore(), self._rank, self._size
        )
        self._for_modes._register_backend(
            torch.device("cpu"),
            dist.ProcessGroup.BackendType.CUSTOM,
            FakeProcessGroup._create_internal(self._rank, self._size),
        )
        # 6. The incomplete exchanges.
        self._in_flight = deque[_Exchange]()
        # 7. The last sizes of an epoch, and the size that followed each order when the ranks last compared it.
        self._epoch = -1
        self._recent = deque[int]()
        self._known: dict[tuple[int, ...], int] = {}
        self._is_known = True
        # It is a part of each tag, and changes after a mismatch, so that earlier messages never match later ones.
        self._salt = 0

    def check_size(self, shape: int, epoch: int) -> Callable[[], bool | None] | None:
        """7. Called before each collective. ``shape`` is a hash of its kind, size and dtype.

        Returns:
            ``None`` if the ranks have compared this order before. Otherwise a function that waits for the numbers of
            all ranks. It returns whether they are equal, or ``None`` if the ranks found a mismatch since.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            self._recent = deque(maxlen=_NUM_RECENT)
        order = tuple(self._recent)
        self._recent.append(shape)
        self._is_known = self._known.get(order) == shape
        if self._is_known:
            return None
        if len(self._known) >= _MOST_KNOWN:
            # All ranks clear at the same position.
            self._known.clear()
        self._known[order] = shape
        # Unlike the hash of a text, the hash of numbers is the same in all processes.
        return self._compare(hash((order, shape)))

    def forget_sizes(self) -> None:
        """Forgets all known orders. All ranks call it after a mismatch."""
        self._salt = (self._salt + 2**16) % 2**28
        self._known.clear()

    def _compare(self, number: int) -> Callable[[], bool | None]:
        with _disable_current_modes():
            mine = torch.tensor([number], dtype=torch.int64, device="cpu")
            numbers = mine.repeat(self._size)
            salt = self._salt
            exchange = self.all_gather_apart(numbers, mine, tag=_SIZES_TAG)

        def agrees() -> bool | None:
            if salt != self._salt:
                return None
            exchange.wait()
            with _disable_current_modes():
                return len(set(numbers.tolist())) == 1

        return agrees

    def all_gather_single(
        self, output: torch.Tensor, local_shard: torch.Tensor, options: Any
    ) -> _Exchange | _PollingWork:
        """Issues an all-gather, with the signature of the process group's method."""
        if torch._C._len_torch_dispatch_stack():
            self._for_modes._allgather_base(output, local_shard, options)
        is_small = local_shard.nbytes < self._least_bytes and self._is_known
        if is_small and self._size > 2:
            return _PollingWork(
                self._backend._allgather_base(output, local_shard, options)
            )
        places = output.tensor_split(self._size)
        if not is_small:
            return self._send_to_all([places], [local_shard], _GATHER_TAG)
        if places[self._rank].data_ptr() != local_shard.data_ptr():
            places[self._rank].copy_(local_shard)
        return self._swap_in_thread(places[1 - self._rank], local_shard)

    def all_gather_apart(
        self,
        output: torch.Tensor,
        local_shard: torch.Tensor,
        options: Any = None,
        tag: int = _QUESTION_TAG,
    ) -> _Exchange:
        """Issues an all-gather that cannot pair up with any other collective; dispatch modes do not see it.

        With gloo's collectives, a rank that issues a collective of another size than the other ranks ends its process.
        """
        return self._send_to_all([output.tensor_split(self._size)], [local_shard], tag)

    def sends_each(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether `all_gather_each` is faster than an all-gather of all tensors together (5)."""
        return sum(output[0].nbytes for output in outputs) >= _WORTH_A_MESSAGE * len(
            outputs
        )

    def all_gather_each(
        self, outputs: Sequence[torch.Tensor], local_shards: Sequence[torch.Tensor]
    ) -> _Exchange:
        """Issues the all-gather of several tensors, each directly into its own output.

        Args:
            outputs: each of shape (number of ranks, elements), in one memory.
            local_shards: each 1-D, in one memory as well; cast to the dtype of its output.
        """
        if torch._C._len_torch_dispatch_stack():
            numel = sum(output[0].numel() for output in outputs)
            whole = outputs[0].as_strided((self._size * numel,), (1,))
            self._for_modes._allgather_base(
                whole, local_shards[0].as_strided((numel,), (1,)), AllgatherOptions()
            )
        return self._send_to_all(outputs, local_shards, _GATHER_TAG)

    def _send_to_all(
        self,
        outputs: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        local_shards: Sequence[torch.Tensor],
        tag: int,
    ) -> _Exchange:
        # 7. All-gathers of different sizes must not pair up.
        tag += (sum(output[0].nbytes for output in outputs) ^ self._salt) % _NUM_TAGS
        messages = [
            self._backend.recv([output[other]], other, tag)
            for output in outputs
            for other in self._others
        ]
        for output, local_shard in zip(outputs, local_shards, strict=True):
            own = output[self._rank]
            if own.data_ptr() != local_shard.data_ptr():
                own.copy_(local_shard)
            messages += [
                self._backend.send([own], other, tag) for other in self._others
            ]
        return _Exchange(messages, self._in_flight)

    def reduce_scatter_single(
        self, local_shard: torch.Tensor, whole: torch.Tensor, options: Any
    ) -> _Sum:
        """Issues a reduce-scatter, with the signature of the process group's method."""
        if torch._C._len_torch_dispatch_stack():
            self._for_modes._reduce_scatter_base(local_shard, whole, options)
        own = whole.tensor_split(self._size)
        is_small = local_shard.nbytes < self._least_bytes
        if is_small and self._size > 2:
            received = torch.empty_like(whole)
            work = _PollingWork(
                self._backend.alltoall_base(received, whole, [], [], _ALL_TO_ALL)
            )
            return _Sum(work, received.tensor_split(self._size), local_shard)
        # 2. One of the first two summands comes from another rank. Receive it in the output.
        parts = list(own)
        first = 1 if self._rank == 0 else 0
        for other in self._others:
            parts[other] = (
                local_shard if other == first else torch.empty_like(local_shard)
            )
        if is_small:
            return _Sum(
                self._swap_in_thread(local_shard, own[first]), parts, local_shard
            )
        tag = _REDUCE_TAG + self._salt
        messages = [
            self._backend.recv([parts[other]], other, tag) for other in self._others
        ]
        messages += [
            self._backend.send([own[other]], other, tag) for other in self._others
        ]
        return _Sum(_Exchange(messages, self._in_flight), parts, local_shard)

    def _swap_in_thread(
        self, received: torch.Tensor, sent: torch.Tensor
    ) -> _PollingWork:
        """5. Exchanges tensors between two ranks, by an all-to-all in which no rank sends to itself."""
        lengths = [0, sent.shape[0]] if self._rank == 0 else [sent.shape[0], 0]
        return _PollingWork(
            self._backend.alltoall_base(received, sent, lengths, lengths, _ALL_TO_ALL)
        )

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single


class _Exchange:
    """6. The handle of the messages of a collective. ``in_flight`` keeps them and their tensors alive until `wait`."""

    def __init__(self, messages: list[Any], in_flight: deque[_Exchange]) -> None:
        self._messages = messages
        self._in_flight = in_flight
        in_flight.append(self)

    def wait(self) -> None:
        for message in self._messages:
            message.wait()
        # Removes this exchange and all earlier ones, which are also complete. A later exchange may have done so.
        while self in self._in_flight:
            self._in_flight.popleft()


class _PollingWork:
    """The handle of a small collective that runs in gloo's thread."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        until = time.perf_counter() + _POLL_SECONDS
        while not self._work.is_completed() and time.perf_counter() < until:
            os.sched_yield()
        self._work.wait()


class _Sum:
    """The handle of a reduce-scatter: waits for the parts of all ranks, and writes their sum to ``local_shard``."""

    def __init__(
        self,
        work: _Exchange | _PollingWork,
        parts: Sequence[torch.Tensor],
        local_shard: torch.Tensor,
    ) -> None:
        self._work = work
        self._parts = parts
        self._local_shard = local_shard

    def wait(self) -> None:
        self._work.wait()
        # 4. In the order of the ranks.
        torch.add(self._parts[0], self._parts[1], out=self._local_shard)
        for part in self._parts[2:]:
            self._local_shard.add_(part)


# One transport for each process group, because messages can outlive the models that are sharded over the group.
_transports: WeakKeyDictionary[Any, Transport] = WeakKeyDictionary()


def transport_between(process_group: Any) -> Transport | None:
    """The transport for CPU tensors of a process group; ``None`` if its own collectives are used."""
    choice = os.environ.get("MINIFSDP_TRANSPORT")
    backend = None
    # Without a backend for CPUs, or without a process group of torch, there is no transport.
    with suppress(AttributeError, RuntimeError):
        backend = process_group._get_backend(torch.device("cpu"))
    if (
        choice == "collectives"
        or type(backend) is not dist.ProcessGroupGloo
        or backend.size() == 1
    ):
        return None
    if process_group not in _transports:
        _transports[process_group] = Transport(
            backend, 0 if choice == "messages" else _WORTH_A_MESSAGE
        )
    return _transports[process_group]
