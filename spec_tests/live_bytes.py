"""Counts the bytes of living tensors on the CPU: the current number and the peak.

A GPU's allocator counts its bytes, and the CPU's does not. But a dispatch mode receives every operator of PyTorch, also
in a backward, and new storages come from the results of operators. So the mode keeps a weak reference to each storage
that it finds, and sums the sizes of the living ones before and after each operator::

    with LiveBytes() as live:
        model = build()             # tensors made inside are counted from the beginning
        live.forget_peak()
        model(batch)
    live.now(), live.peak

A storage is counted once, even if several tensors use it. Its size is read each time, because the unsharded storage of
a unit is resized to zero and back without an operator.

It does not count memory that C++ code allocates itself, such as gloo's copy of a tensor that it reduces. Operators can
return views of such memory, so views are not counted as new storages. It is slow, so use it for small models only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators inside the block have created.

    Attributes:
        peak: the largest number of bytes since the block began, or since `forget_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.peak = max(self.peak, self.now())
        result = func(*args, **(kwargs or {}))
        if not any(returned.alias_info for returned in func._schema.returns):
            for leaf in tree_leaves(result):
                self._note(leaf)
        self.peak = max(self.peak, self.now())
        return result

    def _note(self, leaf: Any) -> None:
        if isinstance(leaf, DTensor):
            leaf = leaf._local_tensor
        if isinstance(leaf, Tensor):
            reference = StorageWeakRef(leaf.untyped_storage())
            # The ID of a deleted storage can be reused; the newer reference is the correct one.
            self._storages[reference.cdata] = reference

    def now(self) -> int:
        """Bytes of all living storages."""
        total = 0
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def forget_peak(self) -> None:
        """Restarts the measurement of the peak."""
        self.peak = self.now()
