"""Checks of the exercises about shards: the flat parameter, an uneven last shard, and a DTensor.

Each function checks one behaviour, and raises `NotMetError` with the entry that explains the mistake. Worked example,
`shards_of_example`: parameters with 3 and 4 elements on two ranks must become ``[1 2 3 4]`` and ``[5 6 7 0]``.

*In torch:* no such tool.

Spec: LEARN-03.
"""

from itertools import chain
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
from minifsdp_tools.learn.checking import expect, train

# --- 1: flatten and shard ---

# Numbers of elements and of shards.
_EXAMPLES = (((3, 4), 2), ((5,), 3), ((1, 1), 4))


def ranges_of_ranks() -> None:
    """The ranges of all ranks cover the padded flat tensor, in order."""
    mine = dist.get_rank()
    for numels, num_shards in _EXAMPLES:
        sharding = flat_tensor.FlatSharding(numels, num_shards)
        size = sharding.shard_numel
        ranges = [slice(i * size, (i + 1) * size) for i in range(num_shards)]
        for index, right in enumerate(ranges):
            found = sharding.shard_range(index)
            expect({"no-slice": isinstance(found, slice)}, got=type(found).__name__)
            expect(
                {
                    "not-index": index == mine or found != ranges[mine],
                    "range": (found.start, found.stop) == (right.start, right.stop),
                },
                got=found,
                right=right,
                numels=numels,
                num_shards=num_shards,
                index=index,
                other=mine,
                rank=index,
            )


def shards_of_example() -> None:
    """The worked example: 3 and 4 elements on two ranks; also more ranks than elements."""
    for numels, num_shards in _EXAMPLES:
        sharding = flat_tensor.FlatSharding(numels, num_shards)
        size = sharding.shard_numel
        values = [*torch.arange(1.0, sharding.numel + 1).split(numels)]
        padded = torch.zeros(sharding.padded_numel)
        padded[: sharding.numel] = torch.cat(values)
        chunks = padded.chunk(num_shards)
        for index, right in enumerate(chunks):
            shard = sharding.make_shard(values, index)
            expect(
                {
                    "changes-list": len(values) == len(numels),
                    "no-tensor": isinstance(shard, torch.Tensor),
                },
                got=len(values),
                right=len(numels),
                type=type(shard).__name__,
            )
            others = [i for i in range(num_shards) if torch.equal(shard, chunks[i])]
            num_values = max(0, min(size, sharding.numel - index * size))
            expect(
                {
                    "size": shard.shape == (size,),
                    "not-index": index in others or not others,
                    "values": torch.equal(
                        shard.reshape(-1)[:num_values], right[:num_values]
                    ),
                    "padding": torch.equal(shard, right),
                },
                shape=tuple(shard.shape),
                size=size,
                got=shard.tolist(),
                right=right.tolist(),
                numels=numels,
                num_shards=num_shards,
                index=index,
                other=others and others[0],
                rank=index,
            )


def shards_have_own_memory() -> None:
    """A shard does not keep the unsharded tensor alive, and does not change with the original values."""
    for numels, num_shards in (((4, 4), 2), ((8,), 2), ((8,), 1)):
        values = [torch.ones(numel) for numel in numels]
        shard = flat_tensor.FlatSharding(numels, num_shards).make_shard(values, 0)
        num_bytes = shard.untyped_storage().nbytes()
        for value in values:
            value.fill_(7)
        expect(
            {"memory": num_bytes == shard.nbytes, "shared": shard.eq(1).all()},
            got=num_bytes,
            size=shard.nbytes,
            num_shards=num_shards,
        )


def shards_of_any_tensor() -> None:
    """Matrices, tensors that are not contiguous, and other dtypes."""
    matrix = torch.arange(6.0).view(2, 3)
    # The last one has values that float32 rounds.
    for value in (matrix, matrix.T, matrix.bfloat16(), matrix.double() / 3):
        shard = flat_tensor.FlatSharding((6,), 2).make_shard([value], 1)
        right = value.reshape(-1)[3:]
        expect(
            {"dtype": shard.dtype is value.dtype}, got=shard.dtype, right=value.dtype
        )
        expect(
            {"matrix": torch.equal(shard, right)},
            got=shard.tolist(),
            right=right.tolist(),
        )
    shard = flat_tensor.FlatSharding((6,), 2).make_shard([matrix.to("meta")], 0)
    expect({"device": shard.device.type == "meta"}, got=shard.device)


# --- 8: an uneven last shard ---

SIZES = ((5, 4), (4, 2), (1, 2), (3, 4), (7, 3), (2, 1), (0, 2))


def ranges_along_dim() -> None:
    """The ranges are those of ``torch.chunk``."""
    for size, num_shards in SIZES:
        chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(num_shards)]
        right = (chunks + [[]] * num_shards)[:num_shards]
        found = [shards.shard_range(size, num_shards, i) for i in range(num_shards)]
        expect({"no-range": all(isinstance(one, range) for one in found)}, got=found[0])
        got = [[*one] for one in found]
        expect(
            {
                "beyond": all(max(one.start, one.stop) <= size for one in found),
                "not-all-rows": [*chain(*got)] == [*range(size)],
                "rows": got == right,
            },
            size=size,
            num_shards=num_shards,
            found=found,
            got=got,
            right=right,
        )


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
            {"sent": got == right},
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
            memory = got.untyped_storage().data_ptr()
            expect(
                {
                    "shard-shape": got.shape == right.shape,
                    "shard-values": torch.equal(got, right),
                    "copy": not got.numel()
                    or memory == tensor.untyped_storage().data_ptr(),
                },
                got_shape=tuple(got.shape),
                right_shape=tuple(right.shape),
                got=got.tolist(),
                right=right.tolist(),
                shape=shape,
                dim=dim,
                num_shards=num_shards,
                index=index,
            )


# --- 10: a DTensor from a shard ---


def _spec_of(original: torch.Tensor, mesh: DeviceMesh, dim: int = 0) -> Any:
    param: Any = ShardedParam.__new__(ShardedParam)
    param.dim = dim
    param._tensor_parallel = None
    spec: Any = param._make_spec(original, mesh)
    expect(
        {
            "no-spec": isinstance(spec, dtensor_spec.DTensorSpec),
            "no-meta": getattr(spec, "tensor_meta", None) is not None,
        },
        got=type(spec).__name__,
    )
    return spec


def spec_of_mesh() -> None:
    """The placements on a mesh with one axis, and on a mesh (replicate, shard)."""
    original = torch.arange(6.0).view(3, 2)
    flat = init_device_mesh("cpu", (2,))
    for mesh, dim, right in (
        (flat, 0, (Shard(0),)),
        (flat, 1, (Shard(1),)),
        (init_device_mesh("cpu", (1, 2)), 0, (Replicate(), Shard(0))),
    ):
        got = tuple(_spec_of(original, mesh, dim).placements)
        expect(
            {"axes": len(got) == mesh.ndim, "placements": got == right},
            got=got,
            right=right,
            axes=mesh.ndim,
            dim=dim,
        )


def spec_of_unsharded_tensor() -> None:
    """The spec describes the unsharded tensor: its shape, stride and dtype."""
    original = torch.arange(6.0).view(3, 2).bfloat16()
    mesh = init_device_mesh("cpu", (2,))
    meta = _spec_of(original, mesh).tensor_meta
    transposed = tuple(_spec_of(original.view(2, 3).T, mesh).tensor_meta.stride)
    expect(
        {
            "local-shape": meta.shape == (3, 2),
            "stride": tuple(meta.stride) == (2, 1),
            "transposed": transposed == (1, 3),
            "spec-dtype": meta.dtype is torch.bfloat16,
        },
        shape=tuple(meta.shape),
        stride=meta.stride,
        transposed=transposed,
        dtype=meta.dtype,
    )


def around_shard() -> None:
    """The DTensor uses the memory of the shard, and has the unsharded shape, also if the shard has fewer rows."""
    rank = dist.get_rank()
    original = torch.arange(6.0).view(3, 2)
    spec = _spec_of(original, init_device_mesh("cpu", (2,)))
    shard = original.chunk(2)[rank]
    with CommDebugMode() as comm:
        tensor = sharded_param.around(shard, spec)
    expect(
        {
            "no-dtensor": isinstance(tensor, DTensor),
            "communicates": comm.get_total_counts() == 0,
        },
        type=type(tensor).__name__,
        number=comm.get_total_counts(),
    )
    expect(
        {
            "copied": tensor._local_tensor.data_ptr() == shard.data_ptr(),
            "uneven-shape": tensor.shape == (3, 2),
            "requires-grad": not tensor.requires_grad,
        },
        got=tuple(tensor.shape),
        rank=rank,
    )
    half = sharded_param.around(shard.bfloat16(), spec)
    described = half._spec.tensor_meta and half._spec.tensor_meta.dtype
    same = (half.shape, half.stride(), half._spec.placements)
    expect(
        {
            "cast": half._local_tensor.dtype is torch.bfloat16,
            "dtype-of-shard": half.dtype is described is torch.bfloat16,
            "only-dtype": same == ((3, 2), (2, 1), spec.placements),
        },
        got=half.dtype,
        described=described,
        shape=tuple(half.shape),
        stride=half.stride(),
        placements=half._spec.placements,
    )
    columns = original[:, rank : rank + 1]
    tensor = sharded_param.around(columns, _spec_of(original, spec.mesh, 1))
    expect(
        {
            "copied": tensor._local_tensor.data_ptr() == columns.data_ptr(),
            "changed-spec": spec.tensor_meta.dtype is torch.float32,
        }
    )


def hybrid_trains() -> None:
    """A model on a mesh (replicate, shard) trains as in one process."""
    train(lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2, 1))))
