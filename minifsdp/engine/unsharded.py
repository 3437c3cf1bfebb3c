"""The unsharded tensor, which autograd owns and which has memory only while it is needed.

It is created once and lives as long as its unit. Only its memory is allocated and freed:

1. Its storage is *resized* between full size and 0 bytes, never replaced. The tensors that autograd saves in forward
   are views of this storage, and backward needs the values under the same views.
2. An all-gather writes through an *alias*: the same storage with another version counter. To autograd the values do not
   change between forward and backward, which is correct. After a direct write, the tensor would look modified, and
   backward would raise an error.

Worked example, 4 float32 elements::

    made         sizes (4,), storage  0 bytes
    allocate     sizes (4,), storage 16 bytes, values undefined until the all-gather is done
    release      sizes (4,), storage  0 bytes; views keep their sizes, too, and must not be read

A unit that is neither sharded nor cast needs no second memory: its unsharded tensor *borrows* the shard's.

*In torch:* ``_full_param_padded``, ``_mp_shard`` and ``_full_prec_full_param_padded`` of ``FlatParameter``.

Spec: SHARD-09, SHARD-13, MP-02, MP-03.
"""

import torch

from minifsdp.engine import lifetime
from minifsdp.engine.lifetime import ReleaseEvent


class Unsharded:
    """An unsharded tensor with its own memory, or with the memory of ``lender``.

    Args:
        numel: elements, including padding.
        dtype: the compute dtype.
        device: the compute device.
        lender: a tensor of this size, dtype and device whose memory to use instead.

    Attributes:
        leaf: the tensor; autograd accumulates gradients into it.
        alias: the same memory, for writing.
        num_bytes: its size while it has memory.
    """

    __slots__ = ("alias", "is_borrowed", "leaf", "num_bytes")

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, lender: torch.Tensor | None = None
    ) -> None:
        self.is_borrowed = lender is not None
        tensor = torch.empty(numel, dtype=dtype, device=device) if lender is None else lender.detach()
        self.num_bytes = numel * tensor.element_size()
        # 2. `.data` has its own version counter, `.detach()` does not.
        self.alias = tensor.data
        self.leaf = tensor.requires_grad_()
        if lender is None:
            self.alias.untyped_storage().resize_(0)

    def wait_compute(self, lender: torch.Tensor) -> None:
        """Uses the memory of ``lender`` from now on, if the user has given the shard other memory."""
        if lender.data_ptr() != self.alias.data_ptr():
            self.alias = self.leaf.data = lender

    def allocate(self) -> None:
        """Allocates memory, with undefined values."""
        # 1. Resized, not replaced.
        self.alias.untyped_storage().resize_(self.num_bytes)

    def release(self) -> ReleaseEvent | None:
        """Frees the memory; returns ``None`` if it is borrowed."""
        return None if self.is_borrowed else lifetime.release(self.alias)
