"""Tensors that are sharded along dim 0 over the ranks: the sharded form of a state dict.

A checkpoint that any number of ranks can load must contain *parameters*, not shards of a flat parameter. So the sharded
form splits every parameter along its first dimension, as ``torch.chunk`` does: ranks get equal numbers of rows, the
last ones fewer or none. Three rows on two ranks::

    rank 0    rows 0 and 1
    rank 1    row 2

The rows are stored in one of two types that ``torch.distributed.checkpoint`` supports: ``ShardedTensor``, the older
one, which has a table of all shards, or ``DTensor``, which has a mesh and a placement. A local state dict stores the
local shard as a ``ShardedTensor``, as rows of one long parameter.

If tensor parallelism has already sharded a parameter, its local part on this rank is split into rows as well, and the
``DTensor`` has the dimensions of both meshes.

*In torch:* ``_shard_utils.py``.

Spec: SD-SHARD-01, SD-SHARD-02, SD-CFG-18.
"""

import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.overrides import is_tensor_like

from minifsdp.engine import collectives
from minifsdp.engine.flat_tensor import local_tensor
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import detail


def is_cut(shape: torch.Size) -> bool:
    """Whether a sharded state dict splits a tensor of this shape. A tensor without rows is saved unchanged."""
    return len(shape) > 0 and shape[0] > 0


def rows_at(index: int, num_rows: int, num_ranks: int) -> range:
    """The rows of rank ``index``; can be empty."""
    size = -(-num_rows // num_ranks)
    return range(num_rows)[index * size : (index + 1) * size]


def rows_of(full: torch.Tensor, group: Group) -> torch.Tensor:
    """A view of this rank's rows."""
    mine = rows_at(group.rank, full.shape[0], group.size)
    return full[mine.start : mine.stop]


def as_sharded_tensor(rows: torch.Tensor, shape: torch.Size, group: Group) -> ShardedTensor:
    """This rank's rows of a tensor of ``shape``, as a ``ShardedTensor``. Nothing is sent: all ranks know all sizes."""
    table = []
    for index, rank in enumerate(group.ranks):
        # A rank without rows has a shard with 0 rows. Without it, the planner of torch.distributed.checkpoint would
        # miss the key on that rank, assume a checkpoint of torch 2.3, and fail to load it.
        part = rows_at(index, shape[0], group.size)
        start = [part.start, *[0] * (len(shape) - 1)]
        table.append(ShardMetadata(start, [len(part), *shape[1:]], f"rank:{rank}/{rows.device}"))
    metadata = ShardedTensorMetadata(table, shape, TensorProperties(dtype=rows.dtype))
    with unadvised():
        sharded: ShardedTensor = ShardedTensor._init_from_local_shards_and_global_metadata(
            [LocalShard(rows, table[group.rank])], sharded_tensor_metadata=metadata, process_group=group.process_group
        )
    return sharded


@contextmanager
def unadvised() -> Generator[None]:
    """Suppresses torch's warning not to use ``ShardedTensor``, which is printed even when its dtype is read.

    The user can avoid the deprecated class with ``use_dtensor=True``.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        yield


def as_dtensor(full: torch.Tensor, group: Group, mesh: DeviceMesh, device: torch.device) -> DTensor:
    """This rank's rows of ``full`` as a ``DTensor``, sharded over the last axis of ``mesh``, without communication."""
    placements: list[Placement] = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    rows = rows_of(local_tensor(full), group).clone()
    if isinstance(full, DTensor):
        num_cuts = full._spec.num_shards_map[0]
        if num_cuts > 1:
            # Rows of the local tensor-parallel part, not of the full tensor.
            placements[-1] = _StridedShard(0, split_factor=num_cuts)
        mesh = DeviceMesh._concatenate([mesh, full.device_mesh])
        placements += full.placements
    sharded = DTensor.from_local(rows, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
    # `from_local` moves the tensor to the device of the mesh, so it is moved to `device` afterwards.
    return cast(DTensor, sharded.to(device))


def local_rows(value: Any) -> torch.Tensor | None:
    """This rank's rows of a sharded value of a state dict; ``None`` for a value that is not sharded.

    A rank without rows gets a tensor with 0 rows.
    """
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        size = value.size()
        return shards[0].tensor if shards else torch.empty((0, *size[1:]), dtype=value.dtype)
    return None


def on_this_rank(value: torch.Tensor) -> torch.Tensor:
    """The local tensor of a value: this rank's rows if it is sharded, otherwise the value."""
    rows = local_rows(value)
    return value if rows is None else rows


def misplaced_rows(value: Any, where: str, group: Group | None) -> Iterator[str]:
    """Describes how the sharding of a value differs from that of this module; empty if it does not."""
    rows, full = local_rows(value), tuple(_whole_among(value, group))
    assert rows is not None
    found, expected, start = tuple(rows.shape), full, 0
    if group is not None and full:
        mine = rows_at(group.rank, full[0], group.size)
        expected, start = (len(mine), *full[1:]), mine.start
    if found != expected:
        yield detail("rows-shape", where=where, expected=expected, found=found, cut=_cut_how(value))
    elif found and found[0] and full == tuple(value.size()) and _first_row(value) != start:
        yield detail("rows-start", where=where, start=start, found=_first_row(value), cut=_cut_how(value))


def all_full(values: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Describes the problem if no value is sharded; each value is given with its name.

    A sharded state dict may contain some full tensors, from units that were not sharded. If all are full, the dict has
    another form.
    """
    cut = [(where, value) for where, value in values if is_tensor_like(value) and is_cut(value.size())]
    if cut and all(local_rows(value) is None for _, value in cut):
        yield detail("all-full", where=cut[0][0])


def _first_row(value: Any) -> int:
    """The index of this rank's first row in the full tensor; the rank must have rows."""
    if isinstance(value, DTensor):
        _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        return offset[0]
    return cast(int, value.local_shards()[0].metadata.shard_offsets[0])


def _cut_how(value: Any) -> str:
    if not isinstance(value, DTensor):
        return ""
    return f" (the DTensor is on ranks {value.device_mesh.mesh.tolist()} with placements {value.placements})"


def gathered_rows(value: Any, group: Group | None, device: torch.device) -> torch.Tensor:
    """The full tensor of a sharded value. All ranks of the group must call it.

    Args:
        value: sharded as in this module.
        group: the ranks that share it; ``None`` if there is only one.
        device: the device of the all-gather.
    """
    rows = local_rows(value)
    assert rows is not None
    if group is None:
        return rows
    shape = _whole_among(value, group)
    size = len(rows_at(0, shape[0], group.size))
    mine = torch.zeros((size, *shape[1:]), dtype=rows.dtype, device=device)
    mine[: rows.shape[0]].copy_(rows)
    everybody = torch.empty((size * group.size, *shape[1:]), dtype=rows.dtype, device=device)
    collectives.all_gather(group, everybody.view(-1), mine.view(-1)).wait()
    return everybody[: shape[0]]


def _whole_among(value: Any, group: Group | None) -> torch.Size:
    """The shape of the tensor that the ranks of ``group`` share; with tensor parallelism, a part of the value."""
    if not isinstance(value, DTensor) or group is None:
        return torch.Size(value.size())
    mesh = value.device_mesh
    placements = [
        Replicate() if dist.get_process_group_ranks(mesh.get_group(axis)) == [*group.ranks] else placement
        for axis, placement in enumerate(value.placements)
    ]
    shape, _ = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    return torch.Size(shape)
