"""Counts the collectives of a step and the bytes that it sends, in the same way for every library.

All libraries, including the C++ code of DDP, call the same few operators of torch, such as ``c10d.allreduce_``. A
*dispatch mode* intercepts every operator that runs inside a ``with`` block. So one small class can count for all
libraries.

**Bytes sent** are the bytes that the textbook algorithms send, for N ranks and an unsharded tensor of M bytes:

==============  ==================  ================================================================
all-gather      ``(N - 1) / N * M``  each shard is sent to all other ranks
reduce-scatter  ``(N - 1) / N * M``  the same in the opposite direction
all-reduce      twice as much        a reduce-scatter, followed by an all-gather
broadcast       ``(N - 1) / N * M``  on average: all ranks but one receive the tensor, and all pass it on
==============  ==================  ================================================================

The backend can send a different number of bytes. For example, gloo implements a reduce-scatter as an all-reduce. So the
counter compares the libraries, and not the backends.

**Peak of unsharded parameters.** The output of each all-gather contains unsharded parameters until it is freed. The
counter has weak references to the storages of these outputs. At each new all-gather, it sums the storages that still
exist. The sum only grows at an all-gather, so the counter finds every peak. Worked example with three units of 100
bytes: all-gather, free, all-gather, all-gather, free, free has sums 100, 100, 200: the peak is 200.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CollectiveCounter"]

GATHERS = {"_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"}
SCATTERS = {"_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"}
REDUCES = {"allreduce_", "allreduce_coalesced_"}
BROADCASTS = {"broadcast_"}
# Operations without data. They are not counted.
SILENT = {"barrier", "monitored_barrier_"}


class CollectiveCounter(TorchDispatchMode):
    """Counts this rank's collectives inside a ``with`` block.

    Attributes:
        num_calls: the calls of each kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ``"broadcast"``,
            and any other operator of ``c10d`` under its own name, so that all communication is counted.
        num_bytes: the bytes that each of the four kinds has sent, by the formulas above.
        peak_gathered: the largest number of bytes of all-gather outputs that existed at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.peak_gathered = 0
        self._gathered: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._count(func._schema.name.removeprefix("c10d::"), args)
        return result

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        # In every schema of c10d, the outputs come first, then the inputs, then the process group.
        num_ranks = next((size for arg in args if (size := _group_size(arg)) is not None), 1)
        if name in GATHERS:
            outputs = list(_tensors(args[0]))
            self._add("all-gather", outputs, num_ranks)
            self._watch(outputs)
        elif name in SCATTERS:
            self._add("reduce-scatter", _tensors(args[1]), num_ranks)
        elif name in REDUCES:
            self._add("all-reduce", _tensors(args[0]), num_ranks, journeys=2)
        elif name in BROADCASTS:
            self._add("broadcast", _tensors(args[0]), num_ranks)
        elif name not in SILENT:
            self.num_calls[name.strip("_")] += 1

    def _add(self, kind: str, whole: Iterable[Tensor], num_ranks: int, journeys: int = 1) -> None:
        self.num_calls[kind] += 1
        self.num_bytes[kind] += journeys * _num_bytes(whole) * (num_ranks - 1) // num_ranks

    @property
    def bytes_sent(self) -> int:
        """The bytes sent by all kinds together."""
        return self.num_bytes.total()

    def _watch(self, outputs: list[Tensor]) -> None:
        for output in outputs:
            self._gathered.add(output.untyped_storage())
        # A library can delete the tensor or resize its storage to 0. The sum is correct in both cases.
        self.peak_gathered = max(self.peak_gathered, sum(storage.nbytes() for storage in self._gathered))


def _tensors(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _tensors(item)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _group_size(argument: Any) -> int | None:
    if not isinstance(argument, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(argument).size()
    except RuntimeError:  # Another boxed class, such as a ReduceOp.
        return None
