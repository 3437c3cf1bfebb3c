"""Counting collectives.

Counting must not depend on which of PyTorch's functions a library calls. FSDP1 on the CPU all-gathers into a list of
tensors, FSDP2 into one tensor, DDP all-reduces from C++, and ours calls the process group itself. All of them reach the
same few operators of the dispatcher, and a dispatch mode intercepts all calls. It also works in backward: on the CPU,
autograd runs in the calling thread, and where it has its own threads, it passes the caller's modes to them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
}


def kind_of(operator: str) -> str:
    """The kind of a collective, such as ``all_gather`` for ``_allgather_base_``. Other operators keep their names."""
    name = operator.replace("_", "")
    return next((kind for beginning, kind in KINDS.items() if name.startswith(beginning)), operator)


class Counts(TorchDispatchMode):
    """The collectives that one rank took part in.

    Attributes:
        order: the kind of each collective, and its bytes. The kinds are ``all_gather``, ``reduce_scatter``,
            ``all_reduce``, ``broadcast``, or the operator's own name for others. The bytes are those of the unsharded
            tensor: the output of an all-gather, the input of a reduce-scatter, the tensor of an all-reduce. In a ring,
            each of N ranks sends ``(N - 1) / N`` of that, and twice that for an all-reduce.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func._opname != "wait_tensor":
            # The larger of the input and the output is the unsharded tensor.
            num_bytes = max(sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, Tensor)) for arg in args)
            self.order.append((kind_of(func._opname), num_bytes))
        return func(*args, **(kwargs or {}))

    @property
    def calls(self) -> Counter[str]:
        """The number of collectives, by kind."""
        return Counter(kind for kind, _ in self.order)

    @property
    def num_bytes(self) -> Counter[str]:
        """The sum of their bytes, by kind."""
        return sum((Counter({kind: num_bytes}) for kind, num_bytes in self.order), Counter())

    @property
    def gathers_and_reductions(self) -> tuple[int, int]:
        """The numbers of all-gathers and reduce-scatters, which describe a sharded step best."""
        return self.calls["all_gather"], self.calls["reduce_scatter"]


def count_collectives() -> Counts:
    """Counts every collective that this rank starts inside a ``with`` block, from any library.

    Operators of DTensors issue collectives below the mode, so these are not counted. `CommDebugMode` counts them.
    """
    return Counts()
