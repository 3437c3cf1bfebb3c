"""How many bytes of tensors are alive on the CPU: now, and at most.

A GPU's allocator counts its bytes and the CPU's does not. But every operator of PyTorch passes a dispatch mode, also
those of a backward, and an operator's results are where new storages come from. So the mode remembers each storage that
it sees by a weak reference, and adds up the sizes of those that are still alive before and after each operator::

    with LiveBytes() as live:
        model = build()             # what is made inside is known from the beginning
        live.forget_peak()
        model(batch)
    live.now(), live.peak

Two things make the sum right. A storage is counted once, however many tensors look into it. And its size is asked
again each time: the unsharded storage of a unit is resized to nothing and back without any operator.

What it does not see: memory that C++ code takes for itself, such as gloo's copy of what it reduces. What it sees of
such a copy is that somebody looks into it, so results that are views of something else are no news. Neither is it fast;
models here are small.
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
    """Counts the bytes of the storages that operators inside the block have made.

    Attributes:
        peak: bytes at the worst moment since the block began, or since `forget_peak`.
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
            # A number that was another storage's may come again: the newer reference is the right one.
            self._storages[reference.cdata] = reference

    def now(self) -> int:
        """Bytes that are alive."""
        total = 0
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total

    def forget_peak(self) -> None:
        """The worst moment is looked for from here on."""
        self.peak = self.now()
