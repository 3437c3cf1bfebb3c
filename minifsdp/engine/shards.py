"""Pure functions for sharding one parameter: sizes, shapes and views.

A parameter is split along one of its dims, by default the first dim, like ``torch.chunk``: every rank gets the same
number of rows until no rows are left. Each rank *sends* the same number of elements, so that one all-gather works for
all ranks; the last ranks add padding.

Worked example, shape (3, 2) on two ranks::

    rows           a a | b b | c c
    rank 0 has     a a | b b              2 rows
    rank 1 has     c c                    1 row
    rank 1 sends   c c | . .              1 row and 1 row of padding
    all-gathered   a a | b b | c c | . .  the parameter is the beginning of this buffer, without a copy

Along another dim, the shards are not contiguous in the unsharded parameter. The all-gathered shards are concatenated.
Padding would be in the middle, so the size of the dim must be divisible by the number of ranks.

Trade-off against the flat layout: a rank can have no rows, and a parameter with one row is on one rank only. In return,
every shard consists of whole rows of one named tensor.

*In torch:* ``FSDPParam._init_sharded_param``.

Spec: FS2-05, FS2-06, FS2-08.
"""

import torch
from torch.distributed.tensor import DTensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a ``DTensor``, without autograd; other tensors are returned unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def shard_range(size: int, num_shards: int, index: int) -> range:
    """The indices of shard ``index`` along a dim of ``size`` elements; can be empty."""
    most = -(-size // num_shards)
    return range(min(index * most, size), min((index + 1) * most, size))


def shard_shape(shape: torch.Size, dim: int, num_shards: int, index: int) -> torch.Size:
    """The shape of shard ``index``, without padding. The first shard is the largest."""
    return torch.Size(
        (
            *shape[:dim],
            len(shard_range(shape[dim], num_shards, index)),
            *shape[dim + 1 :],
        )
    )


def padded_shard_numel(shape: torch.Size, dim: int, num_shards: int) -> int:
    """The number of elements that each rank sends, including padding."""
    return shard_shape(shape, dim, num_shards, 0).numel()


def shard_of(
    tensor: torch.Tensor, dim: int, num_shards: int, index: int
) -> torch.Tensor:
    """Shard ``index`` of an unsharded tensor, as a view. Some tensor classes can only be split."""
    shards = tensor.chunk(num_shards, dim)
    return shards[index] if index < len(shards) else tensor.narrow(dim, 0, 0)


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """``view`` as a tensor whose storage is only this range of the memory. Each of the two keeps the memory alive."""
    storage = view.untyped_storage()
    if storage.device.type == "meta":
        return view
    start = view.storage_offset() * view.itemsize
    # A separate storage for the same bytes, without a copy.
    own = storage[start : start + view.numel() * view.itemsize]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(
        own, 0, view.shape, view.stride()
    )
