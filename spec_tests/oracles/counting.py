"""Counting collectives.

Counting must not depend on which of PyTorch's functions a library calls. FSDP1 on the CPU all-gathers into a list of
tensors, FSDP2 into one tensor, DDP all-reduces from C++, and ours calls the process group itself. All of them reach the
same few operators of the dispatcher, and a dispatch mode intercepts all calls. It also works in backward: on the CPU,
autograd runs in the calling thread, and where it has its own threads, it passes the caller's modes to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Counts", "count_collectives"]

KINDS = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
}


@dataclass
class Counts:
    """The collectives that one rank took part in.

    Attributes:
        calls: number of collectives, by kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast``, or the
            operator's own name for others.
        num_bytes: bytes of the unsharded tensor, by the same kinds: the output of an all-gather, the input of a
            reduce-scatter, the tensor of an all-reduce. In a ring, each of N ranks sends ``(N - 1) / N`` of that, and
            twice that for an all-reduce.
        order: the kinds in the order of the calls, each with its bytes.
    """

    calls: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    order: list[tuple[str, int]] = field(default_factory=list)

    def note(self, kind: str, num_bytes: int) -> None:
        self.calls[kind] += 1
        self.num_bytes[kind] += num_bytes
        self.order.append((kind, num_bytes))

    @property
    def gathers_and_reductions(self) -> tuple[int, int]:
        """The numbers of all-gathers and reduce-scatters, which describe a sharded step best."""
        return self.calls["all_gather"], self.calls["reduce_scatter"]


class _Observer(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func._opname != "wait_tensor":
            # The larger of the input and the output is the unsharded tensor.
            num_bytes = max(sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, Tensor)) for arg in args)
            self.counts.note(KINDS.get(func._opname, func._opname), num_bytes)
        return func(*args, **(kwargs or {}))


@contextmanager
def count_collectives() -> Iterator[Counts]:
    """Counts every collective that this rank starts inside the block, from any library.

    Operators of DTensors issue collectives below the mode, so these are not counted. `CommDebugMode` counts them.
    """
    with _Observer() as observer:
        yield observer.counts
