"""Checks of the exercises about shards: the flat parameter, an uneven last shard, and a DTensor.

Each function checks one behaviour, and raises `NotMetError` with the entry that explains the mistake. Worked example,
`shards_of_example`: parameters with 3 and 4 elements on two ranks must become ``[1 2 3 4]`` and ``[5 6 7 0]``.

*In torch:* no such tool.

Spec: LEARN-03.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from minifsdp import FullyShardedDataParallel
from minifsdp.engine import flat_tensor
from minifsdp.learn.checking import expect, train

# --- 1: flatten and shard ---


def ranges_of_ranks() -> None:
    """The ranges of all ranks cover the padded flat tensor, in order."""
    for numels, num_shards in (((3, 4), 2), ((5,), 3), ((1, 1), 4)):
        sharding = flat_tensor.FlatSharding(numels, num_shards)
        for index in range(num_shards):
            found, size = sharding.shard_range(index), sharding.shard_numel
            expect(isinstance(found, slice), "no-slice", got=type(found).__name__)
            right = slice(index * size, (index + 1) * size)
            here = {"numels": numels, "num_shards": num_shards, "rank": index}
            expect((found.start, found.stop) == (right.start, right.stop), "range", got=found, right=right, **here)


def shards_of_example() -> None:
    """The worked example: 3 and 4 elements on two ranks; also more ranks than elements."""
    for numels, num_shards in (((3, 4), 2), ((5,), 3), ((1, 1), 4)):
        sharding = flat_tensor.FlatSharding(numels, num_shards)
        values = [*torch.arange(1.0, sharding.numel + 1).split(numels)]
        padded = torch.zeros(sharding.padded_numel)
        padded[: sharding.numel] = torch.cat(values)
        for index, right in enumerate(padded.chunk(num_shards)):
            shard = sharding.make_shard(values, index)
            here = {"numels": numels, "num_shards": num_shards, "rank": index, "right": right.tolist()}
            size = sharding.shard_numel
            expect(isinstance(shard, torch.Tensor), "no-tensor", got=type(shard).__name__)
            expect(shard.shape == (size,), "size", got=tuple(shard.shape), size=size, **here)
            num_values = max(0, min(size, sharding.numel - index * size))
            is_equal = torch.equal(shard[:num_values], right[:num_values])
            expect(is_equal, "values", got=shard.tolist(), **here)
            expect(torch.equal(shard, right), "padding", got=shard.tolist(), **here)


def shards_have_own_memory() -> None:
    """A shard does not keep the unsharded tensor alive, and does not change with the original values."""
    for numels, num_shards in (((4, 4), 2), ((8,), 2), ((8,), 1)):
        values = [torch.ones(numel) for numel in numels]
        shard = flat_tensor.FlatSharding(numels, num_shards).make_shard(values, 0)
        num_bytes, size = shard.untyped_storage().nbytes(), shard.nbytes
        expect(num_bytes == size, "memory", got=num_bytes, size=size, num_shards=num_shards)
        for value in values:
            value.fill_(7)
        expect(shard.eq(1).all(), "shared", num_shards=num_shards)


def shards_of_any_tensor() -> None:
    """Matrices, tensors that are not contiguous, and other dtypes."""
    matrix = torch.arange(6.0).view(2, 3)
    for value in (matrix, matrix.T, matrix.bfloat16()):
        shard = flat_tensor.FlatSharding((6,), 2).make_shard([value], 1)
        right = value.reshape(-1)[3:]
        expect(shard.dtype is value.dtype, "dtype", got=shard.dtype, right=value.dtype)
        expect(torch.equal(shard, right), "matrix", got=shard.tolist(), right=right.tolist())


def wrapper_trains() -> None:
    """A model in the wrapper of FSDP1 trains like in one process."""
    train(_wrapped, _full_values)


def _wrapped(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def _full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    with FullyShardedDataParallel.summon_full_params(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
