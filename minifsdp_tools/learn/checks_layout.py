"""Checks of the exercises about shards: the flat parameter, an uneven last shard, and a DTensor.

Each function checks one behaviour, and raises `NotMetError` with the entry that explains the mistake. Worked example,
`shards_of_example`: parameters with 3 and 4 elements on two ranks must become ``[1 2 3 4]`` and ``[5 6 7 0]``.

*In torch:* no such tool.

Spec: LEARN-03.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import _dtensor_spec as dtensor_spec
from torch.distributed.tensor.debug import CommDebugMode

from minifsdp import fully_shard
from minifsdp.engine import flat_tensor, sharded_param, shards
from minifsdp.engine.sharded_param import ShardedParam
from minifsdp_tools.learn.checking import expect, full_values, train

# --- 1: flatten and shard ---

# Numbers of elements and of shards.
_EXAMPLES = (((3, 4), 2), ((5,), 3), ((1, 1), 4))


def ranges_of_ranks() -> None:
    """The ranges of all ranks cover the padded flat tensor, in order."""
    for numels, num_shards in _EXAMPLES:
        sharding = flat_tensor.FlatSharding(numels, num_shards)
        for index in range(num_shards):
            found = sharding.shard_range(index)
            size = sharding.shard_numel
            expect(isinstance(found, slice), "no-slice", got=type(found).__name__)
            right = slice(index * size, (index + 1) * size)
            here = {"numels": numels, "num_shards": num_shards, "rank": index}
            mine = dist.get_rank()
            is_mine = index != mine and found == slice(mine * size, (mine + 1) * size)
            expect(not is_mine, "not-index", index=index, other=mine)
            expect(
                (found.start, found.stop) == (right.start, right.stop),
                "range",
                got=found,
                right=right,
                **here,
            )


def shards_of_example() -> None:
    """The worked example: 3 and 4 elements on two ranks; also more ranks than elements."""
    for numels, num_shards in _EXAMPLES:
        sharding = flat_tensor.FlatSharding(numels, num_shards)
        values = [*torch.arange(1.0, sharding.numel + 1).split(numels)]
        padded = torch.zeros(sharding.padded_numel)
        padded[: sharding.numel] = torch.cat(values)
        for index, right in enumerate(padded.chunk(num_shards)):
            shard = sharding.make_shard(values, index)
            expect(
                len(values) == len(numels),
                "changes-list",
                got=len(values),
                right=len(numels),
            )
            here = {
                "numels": numels,
                "num_shards": num_shards,
                "rank": index,
                "right": right.tolist(),
            }
            size = sharding.shard_numel
            expect(
                isinstance(shard, torch.Tensor), "no-tensor", got=type(shard).__name__
            )
            expect(
                shard.shape == (size,),
                "size",
                got=tuple(shard.shape),
                size=size,
                **here,
            )
            num_values = max(0, min(size, sharding.numel - index * size))
            others = [
                other
                for other, chunk in enumerate(padded.chunk(num_shards))
                if torch.equal(shard, chunk)
            ]
            expect(
                index in others or not others,
                "not-index",
                index=index,
                other=others and others[0],
            )
            expect(
                torch.equal(shard[:num_values], right[:num_values]),
                "values",
                got=shard.tolist(),
                **here,
            )
            expect(torch.equal(shard, right), "padding", got=shard.tolist(), **here)


def shards_have_own_memory() -> None:
    """A shard does not keep the unsharded tensor alive, and does not change with the original values."""
    for numels, num_shards in (((4, 4), 2), ((8,), 2), ((8,), 1)):
        values = [torch.ones(numel) for numel in numels]
        shard = flat_tensor.FlatSharding(numels, num_shards).make_shard(values, 0)
        num_bytes = shard.untyped_storage().nbytes()
        size = shard.nbytes
        expect(
            num_bytes == size, "memory", got=num_bytes, size=size, num_shards=num_shards
        )
        for value in values:
            value.fill_(7)
        expect(shard.eq(1).all(), "shared", num_shards=num_shards)


def shards_of_any_tensor() -> None:
    """Matrices, tensors that are not contiguous, and other dtypes."""
    matrix = torch.arange(6.0).view(2, 3)
    # The last one has values that float32 rounds.
    for value in (matrix, matrix.T, matrix.bfloat16(), matrix.double() / 3):
        shard = flat_tensor.FlatSharding((6,), 2).make_shard([value], 1)
        right = value.reshape(-1)[3:]
        expect(shard.dtype is value.dtype, "dtype", got=shard.dtype, right=value.dtype)
        expect(
            torch.equal(shard, right),
            "matrix",
            got=shard.tolist(),
            right=right.tolist(),
        )
    shard = flat_tensor.FlatSharding((6,), 2).make_shard([matrix.to("meta")], 0)
    expect(shard.device.type == "meta", "device", got=shard.device)


# --- 8: an uneven last shard ---

SIZES = ((5, 4), (4, 2), (1, 2), (3, 4), (7, 3), (2, 1), (0, 2))


def ranges_along_dim() -> None:
    """The ranges are those of ``torch.chunk``."""
    for size, num_shards in SIZES:
        chunks = [list(chunk) for chunk in torch.arange(size).chunk(num_shards) if size]
        right = [[int(row) for row in chunk] for chunk in chunks] + [[]] * (
            num_shards - len(chunks)
        )
        found = [
            shards.shard_range(size, num_shards, index) for index in range(num_shards)
        ]
        expect(all(isinstance(one, range) for one in found), "no-range", got=found[0])
        is_within = all(one.start <= size and one.stop <= size for one in found)
        expect(is_within, "beyond", got=found, size=size, num_shards=num_shards)
        got = [[*one] for one in found]
        here = {"size": size, "num_shards": num_shards, "got": got, "right": right}
        expect(
            [row for one in got for row in one] == list(range(size)),
            "not-all-rows",
            **here,
        )
        expect(got == right, "rows", **here)


def equal_messages() -> None:
    """Each rank sends the same number of elements: that of the largest shard."""
    for shape, dim, num_shards, right in (
        ((5, 3), 0, 4, 6),
        ((1, 4), 0, 2, 4),
        ((2, 6), 1, 3, 4),
        ((3,), 0, 4, 1),
    ):
        got = shards.padded_shard_numel(torch.Size(shape), dim, num_shards)
        expect(
            got == right,
            "sent",
            shape=shape,
            dim=dim,
            num_shards=num_shards,
            got=got,
            right=right,
        )


def shards_are_views() -> None:
    """The shard of each rank is a view of its rows; a rank without rows gets no rows, and no error."""
    for shape, dim, num_shards in (((5, 3), 0, 4), ((2, 6), 1, 3), ((1, 2), 0, 3)):
        tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
        chunks = tensor.chunk(num_shards, dim)
        for index in range(num_shards):
            right = chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)
            got = shards.shard_of(tensor, dim, num_shards, index)
            here = {
                "shape": shape,
                "dim": dim,
                "num_shards": num_shards,
                "index": index,
            }
            expect(
                got.shape == right.shape,
                "shard-shape",
                got=tuple(got.shape),
                right=tuple(right.shape),
                **here,
            )
            expect(
                torch.equal(got, right),
                "shard-values",
                got=got.tolist(),
                right=right.tolist(),
                **here,
            )
            is_view = (
                not got.numel()
                or got.untyped_storage().data_ptr()
                == tensor.untyped_storage().data_ptr()
            )
            expect(is_view, "copy", **here)


# --- 10: a DTensor from a shard ---


def _spec_of(original: torch.Tensor, mesh: DeviceMesh, dim: int = 0) -> Any:
    param: Any = ShardedParam.__new__(ShardedParam)
    param.dim = dim
    param._tensor_parallel = None
    return param._make_spec(original, mesh)


def spec_of_mesh() -> None:
    """The placements on a mesh with one axis, and on a mesh (replicate, shard)."""
    original = torch.arange(6.0).view(3, 2)
    flat = init_device_mesh("cpu", (2,))
    hybrid = init_device_mesh("cpu", (1, 2))
    spec = _spec_of(original, flat)
    expect(
        isinstance(spec, dtensor_spec.DTensorSpec), "no-spec", got=type(spec).__name__
    )
    for mesh, dim, right in (
        (flat, 0, (Shard(0),)),
        (flat, 1, (Shard(1),)),
        (hybrid, 0, (Replicate(), Shard(0))),
    ):
        got = tuple(_spec_of(original, mesh, dim).placements)
        expect(len(got) == mesh.ndim, "axes", got=got, right=right, axes=mesh.ndim)
        expect(got == right, "placements", got=got, right=right, dim=dim)


def spec_of_unsharded_tensor() -> None:
    """The spec describes the unsharded tensor: its shape, stride and dtype."""
    original = torch.arange(6.0).view(3, 2).bfloat16()
    mesh = init_device_mesh("cpu", (2,))
    meta = _spec_of(original, mesh).tensor_meta
    expect(meta is not None, "no-meta")
    expect(meta.shape == (3, 2), "local-shape", got=tuple(meta.shape))
    expect(tuple(meta.stride) == (2, 1), "stride", got=meta.stride)
    transposed = _spec_of(original.view(2, 3).T, mesh).tensor_meta.stride
    expect(tuple(transposed) == (1, 3), "transposed", got=tuple(transposed))
    expect(meta.dtype is torch.bfloat16, "spec-dtype", got=meta.dtype)


def around_shard() -> None:
    """The DTensor uses the memory of the shard, and has the unsharded shape, also if the shard has fewer rows."""
    rank = dist.get_rank()
    original = torch.arange(6.0).view(3, 2)
    spec = _spec_of(original, init_device_mesh("cpu", (2,)))
    shard = original.chunk(2)[rank]
    with CommDebugMode() as comm:
        tensor = sharded_param._around(shard, spec)
        num_collectives = comm.get_total_counts()
    expect(isinstance(tensor, DTensor), "no-dtensor", got=type(tensor).__name__)
    expect(num_collectives == 0, "communicates", got=num_collectives)
    expect(tensor._local_tensor.data_ptr() == shard.data_ptr(), "copied")
    expect(tensor.shape == (3, 2), "uneven-shape", got=tuple(tensor.shape), rank=rank)
    expect(not tensor.requires_grad, "requires-grad")
    full = tensor.full_tensor()
    expect(
        torch.equal(full, original), "full", got=full.tolist(), right=original.tolist()
    )
    half = sharded_param._around(shard.bfloat16(), spec)
    described = half._spec.tensor_meta and half._spec.tensor_meta.dtype
    expect(half._local_tensor.dtype is torch.bfloat16, "cast")
    expect(
        half.dtype is described is torch.bfloat16,
        "dtype-of-shard",
        got=half.dtype,
        described=described,
    )
    same = (
        half.shape == (3, 2)
        and half.stride() == (2, 1)
        and half._spec.placements == spec.placements
    )
    expect(
        same,
        "only-dtype",
        shape=tuple(half.shape),
        stride=half.stride(),
        placements=half._spec.placements,
    )
    columns = original[:, rank : rank + 1]
    tensor = sharded_param._around(columns, _spec_of(original, spec.mesh, 1))
    expect(tensor._local_tensor.data_ptr() == columns.data_ptr(), "copied")
    expect(spec.tensor_meta.dtype is torch.float32, "changed-spec")


def hybrid_trains() -> None:
    """A model on a mesh (replicate, shard) trains as in one process."""
    train(
        lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2, 1))),
        full_values,
    )
