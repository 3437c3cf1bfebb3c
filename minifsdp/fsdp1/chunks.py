"""Rows of a tensor, spread over the ranks: the sharded form of a state dict.

A checkpoint that any number of ranks can read must speak of *parameters*, not of slices of a flat one. So the sharded
form cuts every parameter along its first dimension, as ``torch.chunk`` does: ranks get equal numbers of rows, the last
ones fewer or none. Three rows on two ranks::

    rank 0    rows 0 and 1
    rank 1    row 2

The pieces travel in one of two wrappings that ``torch.distributed.checkpoint`` understands: ``ShardedTensor``, the
older one, which carries a table of all pieces, or ``DTensor``, which carries a mesh and a placement.

*In torch:* ``_shard_utils.py``.

Spec: SD-SHARD-01, SD-SHARD-02, SD-CFG-18.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from minifsdp.engine.mesh import Group

__all__ = ["as_dtensor", "as_sharded_tensor", "from_local_slice", "local_rows", "rows_of", "rows_per_rank"]


def rows_per_rank(num_rows: int, num_ranks: int) -> int:
    """Rows of every rank but the last ones."""
    return -(-num_rows // num_ranks)


def rows_of(tensor: torch.Tensor, index: int, num_ranks: int) -> torch.Tensor:
    """A view of the rows that rank ``index`` gets; it may have none."""
    size = rows_per_rank(tensor.shape[0], num_ranks)
    start = min(index * size, tensor.shape[0])
    return tensor[start : min(start + size, tensor.shape[0])]


def as_sharded_tensor(full: torch.Tensor, group: Group, device: torch.device) -> ShardedTensor:
    """This rank's rows of ``full`` as a ``ShardedTensor``, without communication: everybody knows all sizes."""
    table = []
    start = 0
    for index in range(group.size):
        rows = rows_of(full, index, group.size)
        if rows.shape[0]:
            offsets = [start] + [0] * (full.ndim - 1)
            table.append(ShardMetadata(offsets, list(rows.shape), f"rank:{group.ranks[index]}/{device}"))
            start += rows.shape[0]
    mine = (
        [LocalShard(rows_of(full, group.rank, group.size).clone(), table[group.rank])]
        if group.rank < len(table)
        else []
    )
    properties = TensorProperties(dtype=full.dtype, requires_grad=False)
    metadata = ShardedTensorMetadata(table, full.shape, properties)
    return _assembled(mine, metadata, group)


def from_local_slice(piece: torch.Tensor, group: Group) -> ShardedTensor:
    """A 1-D slice of equal size on every rank as a ``ShardedTensor``, without communication."""
    size = piece.numel()
    table = [ShardMetadata([i * size], [size], f"rank:{group.ranks[i]}/{piece.device}") for i in range(group.size)]
    metadata = ShardedTensorMetadata(table, torch.Size([size * group.size]), TensorProperties(dtype=piece.dtype))
    return _assembled([LocalShard(piece, table[group.rank])], metadata, group)


def _assembled(mine: list[LocalShard], metadata: ShardedTensorMetadata, group: Group) -> ShardedTensor:
    with warnings.catch_warnings():
        # That the class is on its way out is for the user to decide, by use_dtensor=True.
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        sharded: ShardedTensor = ShardedTensor._init_from_local_shards_and_global_metadata(
            mine, sharded_tensor_metadata=metadata, process_group=group.process_group
        )
    return sharded


def as_dtensor(full: torch.Tensor, group: Group, mesh: DeviceMesh) -> DTensor:
    """This rank's rows of ``full`` as a ``DTensor``, sharded over the last axis of ``mesh``."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    rows = rows_of(full, group.rank, group.size).clone()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def local_rows(value: Any) -> torch.Tensor | None:
    """This rank's rows of a value from a sharded state dict; ``None`` if the value is no sharded one.

    A rank without rows gets a tensor with 0 rows.
    """
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        size = value.size()
        return shards[0].tensor if shards else torch.empty((0, *size[1:]), dtype=value.dtype)
    return None
