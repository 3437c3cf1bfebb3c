"""Tensors in a state dict: rows of dim 0, as DTensor or ShardedTensor, and copies in memory of their own.

A checkpoint that any number of ranks can load must contain *parameters*, not shards of a flat parameter. So the sharded
form splits every parameter along its first dimension, as ``torch.chunk`` does: ranks get equal numbers of rows, the
last ones fewer or none. Three rows on two ranks::

    rank 0    rows 0 and 1
    rank 1    row 2

The rows are stored in one of two types that ``torch.distributed.checkpoint`` supports: ``ShardedTensor``, the older
one, which has a table of all shards, or ``DTensor``, which has a mesh and a placement. A local state dict stores the
local shard as a ``ShardedTensor``, as rows of one long parameter.

If tensor parallelism has already sharded a parameter, its local tensor on this rank is split into rows as well, and the
``DTensor`` has the dimensions of both meshes.

Buffers and ignored parameters belong to no unit, and ``nn.Module.state_dict()`` puts the model's own tensors into the
dict. A dict must not change when training continues, so `copy_shared` copies these tensors, or lists them to be copied
before the next forward. Most dicts are written to a file and dropped before that, and nothing is copied.

*In torch:* ``_shard_utils.py``. The dict shares buffers with the model, so they change with the next forward.

Spec: SD-SHARD-01, SD-SHARD-02, SD-CFG-18, SD-FULL-07, SAVE-01.
"""

import warnings
from collections import Counter
from collections.abc import Collection, Generator, Iterable, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from minifsdp.cases.containers import map_tensors, move
from minifsdp.engine import collectives
from minifsdp.engine.exchange import call
from minifsdp.engine.mesh import Group, MeshGroups
from minifsdp.engine.shards import local_tensor, shard_of, shard_range, shard_shape

T = TypeVar("T")

# ---- from unsharded tensors to rows ---------------------------------------------------------------------------------


def has_rows(shape: torch.Size) -> bool:
    """Whether a sharded state dict splits a tensor of this shape. A tensor without rows is saved unchanged."""
    return len(shape) > 0 and shape[0] > 0


def as_sharded_tensor(
    rows: torch.Tensor, shape: torch.Size, group: Group
) -> sharded_tensor.ShardedTensor:
    """This rank's rows of a tensor of ``shape``, as a ``ShardedTensor``, without communication."""
    table = []
    for index, rank in enumerate(group.ranks):
        # A rank without rows has a shard with 0 rows. If the key were missing on that rank, the planner of
        # torch.distributed.checkpoint would assume a checkpoint of torch 2.3, and fail to load it.
        held = shard_range(shape[0], group.size, index)
        offsets = [held.start] + [0] * (len(shape) - 1)
        table.append(
            sharded_tensor.ShardMetadata(
                offsets, [len(held), *shape[1:]], f"rank:{rank}/{rows.device}"
            )
        )
    metadata = sharded_tensor.ShardedTensorMetadata(
        table, shape, sharded_tensor.TensorProperties(dtype=rows.dtype)
    )
    with no_deprecation_warning():
        return sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata(
            [sharded_tensor.Shard(rows, table[group.rank])],
            sharded_tensor_metadata=metadata,
            process_group=group.process_group,
        )


@contextmanager
def no_deprecation_warning() -> Generator[None]:
    """Suppresses torch's warning not to use ``ShardedTensor``, which is printed even when its dtype is read.

    The user can avoid the deprecated class with ``use_dtensor=True``.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        yield


def as_dtensor(
    full: torch.Tensor, group: Group, mesh: DeviceMesh, device: torch.device
) -> DTensor:
    """This rank's rows of ``full`` as a ``DTensor``, sharded over the last axis of ``mesh``, without communication."""
    placements: list[Placement] = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    rows = shard_of(local_tensor(full), 0, group.size, group.rank).clone()
    if isinstance(full, DTensor):
        num_shards = full._spec.num_shards_map[0]
        if num_shards > 1:
            # The rows belong to the local tensor of tensor parallelism, not to the full tensor.
            placements[-1] = _StridedShard(0, split_factor=num_shards)
        mesh = DeviceMesh._concatenate([mesh, full.device_mesh])
        placements += full.placements
    sharded = DTensor.from_local(
        rows, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    # `from_local` moves the tensor to the device of the mesh, so it is moved to `device` afterwards.
    return cast(DTensor, sharded.to(device))


# ---- from rows to unsharded tensors ---------------------------------------------------------------------------------


def is_sharded(value: Any) -> bool:
    """Whether a value of a state dict is a tensor of which each rank has rows."""
    return isinstance(value, (DTensor, sharded_tensor.ShardedTensor))


def on_this_rank(value: Any) -> torch.Tensor:
    """The local tensor of a value: this rank's rows if it is sharded, otherwise the value.

    A rank without rows gets a tensor with 0 rows.
    """
    if isinstance(value, sharded_tensor.ShardedTensor):
        shards = value.local_shards()
        return (
            shards[0].tensor
            if shards
            else torch.empty((0, *value.size()[1:]), dtype=value.dtype, device="cpu")
        )
    return local_tensor(value)


def is_sharded_like(value: Any, other: Any) -> bool:
    """Whether a value is a ``DTensor`` on the mesh of ``other``, a ``DTensor`` or a spec, with the same placements."""
    return (
        isinstance(value, DTensor)
        and hasattr(other, "device_mesh")
        and value.device_mesh == other.device_mesh
        and value.placements == other.placements
    )


def complete(value: Any) -> Any:
    """The full tensor of a ``DTensor``; other values are returned. All ranks of its mesh must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gathered_rows(
    value: Any, group: Group | None, device: torch.device
) -> torch.Tensor:
    """The full tensor of a sharded value. All ranks of the group must call it.

    Args:
        value: sharded as in this module.
        group: the ranks that share it; ``None`` if there is only one.
        device: the device of the all-gather.
    """
    rows = on_this_rank(value)
    if group is None or (isinstance(value, DTensor) and not _axes_in(value, group)):
        # The ranks of the group have equal rows, which tensor parallelism has sharded.
        return rows
    shape = shape_in_group(value, group)
    mine = torch.zeros(
        shard_shape(shape, 0, group.size, 0), dtype=rows.dtype, device=device
    )
    mine[: rows.shape[0]].copy_(rows)
    gathered = torch.empty(
        (len(mine) * group.size, *shape[1:]), dtype=rows.dtype, device=device
    )
    collectives.all_gather(group, gathered.view(-1), mine.view(-1)).wait()
    return gathered[: shape[0]]


def shape_in_group(value: Any, group: Group | None) -> torch.Size:
    """The shape of the tensor that the ranks of ``group`` share; with tensor parallelism, smaller than the value."""
    if not isinstance(value, DTensor) or group is None:
        return torch.Size(value.size())
    of_fsdp = _axes_in(value, group)
    placements = [
        Replicate() if axis in of_fsdp else placement
        for axis, placement in enumerate(value.placements)
    ]
    return torch.Size(
        compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, placements
        )[0]
    )


def _axes_in(value: DTensor, group: Group) -> set[int]:
    """The axes of the value's mesh that contain several ranks of ``group``: the axes of FSDP.

    Two ranks of ``group`` never hold different parts of tensor parallelism.
    """
    mesh = value.device_mesh
    of_axes = [
        dist.get_process_group_ranks(mesh.get_group(axis)) for axis in range(mesh.ndim)
    ]
    return {
        axis for axis, ranks in enumerate(of_axes) if len({*ranks} & {*group.ranks}) > 1
    }


# ---- copies ---------------------------------------------------------------------------------------------------------


def memory_of(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's storage; ``None`` for tensors without one, such as sparse tensors."""
    try:
        return on_this_rank(tensor).untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


def copy_shared(
    state: MutableMapping[str, Any],
    keys: Iterable[str],
    own: Iterable[torch.Tensor],
    unchanged: Collection[int | None] = (),
) -> list[torch.Tensor]:
    """Copies every tensor under ``keys`` that uses the model's memory, including tensors in a list or a dict.

    If two keys refer to the same tensor, they share one copy. An expanded tensor is copied before it is expanded.

    Args:
        state: the dict.
        keys: the keys of the entries to check.
        own: tensors of the model.
        unchanged: the memory of tensors of ``own`` that nothing writes to before the next forward. An entry of the dict
            is not copied if it consists of all elements there, and no other entry uses this memory.

    Returns:
        The entries that still use the model's memory.
    """
    # The address of a storage without elements is 0.
    memory = {memory_of(tensor) for tensor in own} - {0}
    num_uses = Counter(
        memory_of(value) for value in state.values() if isinstance(value, torch.Tensor)
    )
    copies: dict[Any, torch.Tensor] = {}
    shared = []

    def unshared(tensor: torch.Tensor) -> torch.Tensor:
        where = memory_of(tensor)
        if where not in memory:
            return tensor
        if where is None or on_this_rank(tensor) is not tensor:
            return tensor.detach().clone()
        if (
            where in unchanged
            and num_uses[where] == 1
            and tensor.untyped_storage().nbytes() == tensor.nbytes
        ):
            shared.append(tensor)
            return tensor
        same = (
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if same not in copies:
            once = tensor.detach()[
                tuple(slice(None) if stride else slice(1) for stride in tensor.stride())
            ]
            copies[same] = once.clone().expand(tensor.shape)
        return copies[same]

    for key in keys:
        state[key] = map_tensors(unshared, state[key])
    return shared


# ---- from the first rank -------------------------------------------------------------------------------------------


def value_of_first_rank(value: T, groups: Iterable[Group | None]) -> T:
    """Returns the first rank's value. It is broadcast in one group after the other. ``None`` is a group of one rank."""
    existing = [group for group in groups if group is not None]
    box = [move(torch.device("cpu"), value) if existing else value]
    for group in existing:
        call(dist.broadcast_object_list, group, box, group.ranks[0])
    return box[0]


def shard_of_first_rank(
    mesh: MeshGroups, bucket: torch.Tensor | None, mine: torch.Tensor
) -> torch.Tensor:
    """Fills ``mine`` from the first rank's ``bucket``: a scatter over its shard group, then a broadcast to replicas."""
    if mesh.shard is None:
        if bucket is not None:
            mine.copy_(bucket)
    elif mesh.replicate is None or mesh.replicate.rank == 0:
        shards = None if bucket is None else list(bucket.chunk(mesh.shard.size))
        call(dist.scatter, mesh.shard, mine, shards, mesh.shard.ranks[0])
    if mesh.replicate is not None:
        call(dist.broadcast, mesh.replicate, mine, mesh.replicate.ranks[0])
    return mine
