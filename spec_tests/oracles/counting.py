"""Counting collectives.

Counting must not depend on *who* calls *which* of PyTorch's functions: FSDP1 on the CPU gathers into a list of tensors,
FSDP2 into one tensor, DDP all-reduces from C++, and ours calls the process group itself. All of them end up in the same
few operators of the dispatcher, and a dispatch mode sees every one. It sees backward as well: on the CPU autograd runs
in the thread that called it, and where it has threads of its own it hands the caller's modes on to them.
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
    """What one rank has taken part in.

    Attributes:
        calls: how many collectives, by kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast``, or the
            operator's own name for others.
        num_bytes: by the same kinds, bytes of the whole: of what a gather puts out, of what a reduce-scatter takes in,
            of what an all-reduce changes. A ring sends ``(N - 1) / N`` of that from each of N ranks, for an all-reduce
            twice that.
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
        """The two numbers that say most about a sharded step."""
        return self.calls["all_gather"], self.calls["reduce_scatter"]


class _Witness(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func._opname != "wait_tensor":
            # Of what goes in and what comes out the larger one is the whole.
            num_bytes = max(sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, Tensor)) for arg in args)
            self.counts.note(KINDS.get(func._opname, func._opname), num_bytes)
        return func(*args, **(kwargs or {}))


@contextmanager
def count_collectives() -> Iterator[Counts]:
    """Counts every collective that this rank starts inside the block, whichever library does."""
    with _Witness() as witness:
        yield witness.counts
