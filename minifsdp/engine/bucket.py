"""The bucket of the per-parameter layout: contiguous memory for the parameters of one dtype of a unit.

A collective uses one tensor, but the optimizer and autograd need one tensor for each parameter. So the parameters are
views of one tensor, both sharded and unsharded. Two ranks; capital letters are values from rank 1::

    local        [a a | b]           the local shards, updated by the optimizer
                     | all-gather
    buffer       [a a | b   A A | B]         shards of rank 0, then shards of rank 1
                     | copy-out
    unsharded    [a a A A | b B]             parameter after parameter, used by the modules

1. *No copy-in.* The shards are stored in the order in which they are sent, so the all-gather reads them directly. Only
   a cast to another dtype, or a copy from the CPU, needs extra memory: this rank's part of the buffer. Each shard has
   its own storage, which is a range of the bucket's memory. ``torch.save`` and ``deepcopy`` serialize the whole storage
   of a view, and cannot save a DTensor whose local tensor has a non-zero storage offset.
2. *One copy-out.* The all-gathered data is sorted by rank and must be sorted by parameter. One operator does that if
   all parameters are sharded along the first dim. A bucket of one such parameter is already sorted: on the CPU its
   buffer is ``unsharded``. A transport between CPUs can send large parameters one by one, directly into their final
   memory, without a buffer or a copy.
3. The leaves, which autograd owns, are created once. Each is a view of ``unsharded`` with its own version counter.
   ``unsharded`` has memory only from all-gather to reshard: one resize allocates the memory of all leaves.
4. A bucket that is neither sharded nor cast nor offloaded needs no second memory: its leaves are views of the shards.
5. On an accelerator the leaves begin at multiples of 16 bytes, the width of a vectorized load. Some kernels are slower
   with other addresses, and some raise an error. The data that is sent has no gaps.

Between forward and backward, a case can reshard a unit to larger shards over fewer ranks, for example the ranks of one
node. The all-gather for backward then uses only these ranks. The diagram stays the same, with another `Source`.

A bucket has one dtype and one mesh. Most units have one bucket. Others have several, for example with a norm in float32
next to weights in bfloat16, or with experts that are sharded over fewer ranks. After a user has replaced parameters, a
case assigns the parameters to buckets again. A bucket whose parameters and kind stay the same is kept, with its
memory and its leaves.

6. *Extension point.* A case can store a parameter in a bucket of its own class, with the methods and attributes of
   `Bucket`. `Options.cases` contains objects with three methods. ``takes(param, local_shard)`` returns whether the case
   stores this parameter. Parameters for which ``place(param)`` returns equal objects are in one bucket, which
   ``create(params, local_shards, options)`` returns. If ``copy_out`` creates a leaf, it calls `ShardedParam.use_leaf`.
   See ``minifsdp/cases/tensor_extensions.py`` and ``minifsdp/cases/parameter_dtypes.py``.

*In torch:* each parameter has its own memory on both sides, with a copy-in and a copy-out for each all-gather.

Spec: FS2-04 to FS2-08, FS2-26, FS2-28, FS2-29, NEW-05, NEW-23, STREAM-04, STREAM-12.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from minifsdp.engine import collectives
from minifsdp.engine.comm_streams import CommStream, current_stream
from minifsdp.engine.mesh import Group
from minifsdp.engine.sharded_param import VERSION, Options, ShardedParam
from minifsdp.engine.shards import shard_shape, with_own_storage


class Source:
    """This rank's shards of the parameters of a bucket, contiguous, in the order in which an all-gather sends them.

    Args:
        params: the parameters.
        group: the ranks of the all-gather; ``None`` if there are no other ranks.
        sizes: number of elements in each shard, including padding.
        local: 1-D, zeros; the memory of all shards.
        spaces: the memory of each leaf. It must be allocated.

    Attributes:
        shapes: the shapes of the shards.
        local_shards: the shard of each parameter, in the memory of `local`.
        num_shards, rank: size of the group, and this rank's position in it.
        is_split_only: whether every parameter is sharded along its first dim.
        targets: the memory into which each parameter is all-gathered, with one row for each rank.
        sends_each: whether a transport sends each parameter separately, directly into its target.
    """

    def __init__(
        self,
        params: Sequence[ShardedParam],
        group: Group | None,
        sizes: list[int],
        local: torch.Tensor,
        spaces: list[torch.Tensor],
    ) -> None:
        self.group = group
        self.sizes = sizes
        self.local = local
        num, rank = self.num_shards, self.rank = (
            (1, 0) if group is None else (group.size, group.rank)
        )
        self.shapes = [
            shard_shape(param.shape, param.dim, num, rank) for param in params
        ]
        parts = zip(local.split(sizes), self.shapes, strict=True)
        self.local_shards = [
            with_own_storage(part[: shape.numel()].view(shape)) for part, shape in parts
        ]
        self.targets = [
            space[: num * size].view(num, size)
            for space, size in zip(spaces, sizes, strict=True)
        ]
        self.is_split_only = group is None or not any(param.dim for param in params)
        transport = (
            None if group is None or not self.targets[0].is_cpu else group.transport
        )
        self.sends_each = (
            transport is not None
            and self.is_split_only
            and transport.sends_each(self.targets)
        )

    def copy_in(self, values: Sequence[torch.Tensor]) -> None:
        """Copies the values of each shard, unless they are already in its memory."""
        for local_shard, value in zip(self.local_shards, values, strict=True):
            if local_shard.data_ptr() != value.data_ptr():
                local_shard.copy_(value)


class Bucket:
    """A bucket: parameters of one dtype, sharded and stored contiguously.

    Args:
        params: the parameters; also an attribute.
        local_shards: the local shard of each.
        options: where to compute, and in which dtype.

    Attributes:
        kind: which parameters and shards it can store, see `assign_to_buckets`.
        group: the ranks of the next all-gather; ``None`` if there are no other ranks.
        device: the compute device.
        dtype: the dtype of the leaves.
        local: 1-D, the local shards, including padding.
        local_shards: the local shard of each parameter, in the memory of `local`.
        leaves: the unsharded parameters; they have memory only while all-gathered.
        is_borrowed: whether the leaves have no memory of their own (note 4).
        num_bytes: the size of the unsharded parameters, without the gaps.
        spaces: the memory of each leaf, with the gap behind it.
    """

    kind: object = None

    def __init__(
        self,
        params: Sequence[ShardedParam],
        local_shards: Sequence[torch.Tensor],
        options: Options,
    ) -> None:
        group = params[0].mesh_groups.shard
        num = params[0].num_shards
        sizes = [param.chunk_numel for param in params]
        stored = local_shards[0].dtype
        place = options.storage_device(local_shards[0])
        # Where the parameters are computed with, and in which dtype.
        self.params = params
        self.device = options.device
        self.dtype = options.precision.computes_in(stored)
        self.num_bytes = num * sum(sizes) * self.dtype.itemsize
        if group is None:
            # 5. The data that is sent has no gaps. Without other ranks, nothing is sent.
            sizes = [self._aligned(size) for size in sizes]
        self.local = torch.zeros(sum(sizes), dtype=stored, device=place)
        if options.pin and place.type == "cpu" and self.device.type != "cpu":
            self.local = self.local.pin_memory()
        # 4. The compute memory is the memory of the shards.
        self.is_borrowed = (
            group is None and self.dtype is stored and self.local.device == self.device
        )
        numels = [self._aligned(num * size) for size in sizes]
        unsharded = (
            self.local
            if self.is_borrowed
            else torch.empty(sum(numels), dtype=self.dtype, device=self.device)
        )
        self._storage = unsharded.untyped_storage()
        self._unsharded = unsharded.data
        self.spaces = list(self._unsharded.split(numels))
        # 3. `.data` gives each leaf its own version counter: an all-gather must not look like an in-place change.
        shapes = [param.shape for param in params]
        views = [
            space.data[: shape.numel()].view(shape)
            for space, shape in zip(self.spaces, shapes, strict=True)
        ]
        self.leaves = [nn.Parameter(view, requires_grad=False) for view in views]
        # Without other ranks, or with one parameter, the data is already sorted. But on an accelerator, the leaves'
        # memory would then belong to the communication stream. Only the copy-out makes its reuse safe.
        is_sorted = group is None or (len(params) == 1 and params[0].dim == 0)
        self._copies = not is_sorted or self.device.type != "cpu"
        self._own = self._source = Source(params, group, sizes, self.local, self.spaces)
        self.group = group
        self.local_shards = self._own.local_shards
        self.copy_in(local_shards)
        # The buffer and the source of the all-gather in flight, and its stream.
        self._in_flight: tuple[torch.Tensor, Source, CommStream] | None = None
        # See `gather_from`.
        self._written_at: Any = None
        # The stream that allocated the leaves.
        self._stream: Any = None
        self.free()

    def _aligned(self, numel: int) -> int:
        # 5. 16 elements are a multiple of 16 bytes in every dtype, so a cast keeps the positions of the gaps.
        return numel if self.device.type == "cpu" else -(-numel // 16) * 16

    def copy_in(self, local_shards: Sequence[torch.Tensor]) -> None:
        """Copies new values into the shards, of the same dtype and device."""
        self._own.copy_in(local_shards)

    def stamp(self) -> object:
        """Differs from an earlier stamp if values were changed in place, or memory was replaced, in between."""
        return self.local.data_ptr(), list(map(VERSION, self.local_shards))

    # --- all-gather ---

    def prepare_all_gather(self, comm_stream: CommStream) -> list[tuple[Any, Any, Any]]:
        """Allocates memory for an all-gather on ``comm_stream``. Call `copy_out` when it is complete.

        Returns:
            For each all-gather, the function of ``collectives.py`` that issues it, its output and its input. Without a
            group, the caller issues none.
        """
        if self.is_borrowed:
            return []
        source = self._source
        if source is not self._own:
            # The compute stream wrote this source after the communication stream last waited for the compute stream.
            comm_stream.wait_compute(self._written_at)
        if source.sends_each or not self._copies:
            # 2. Nothing to sort.
            self._storage.resize_(self._unsharded.nbytes)
        if source.sends_each:
            return [
                (
                    collectives.all_gather_each,
                    source.targets,
                    source.local.split(source.sizes),
                )
            ]
        local_shard = source.local
        num = source.num_shards
        numel = source.local.numel()
        if self._copies:
            buffer = torch.empty(num * numel, dtype=self.dtype, device=self.device)
        else:
            buffer = self._unsharded[: num * numel]
        self._in_flight = buffer, source, comm_stream
        if (
            local_shard.dtype is not self.dtype
            or local_shard.device != self.device
            or source.group is None
        ):
            # 1. Memory for the cast.
            local_shard = buffer[source.rank * numel : (source.rank + 1) * numel]
            local_shard.copy_(source.local, non_blocking=True)
        return [(collectives.all_gather, buffer, local_shard)]

    def copy_out(self) -> None:
        """2. Sorts the all-gathered data by parameter."""
        in_flight = self._in_flight
        self._in_flight = None
        if in_flight is not None and self._copies:
            self._storage.resize_(self._unsharded.nbytes)
            self._stream = (
                None if self.device.type == "cpu" else current_stream(self.device)
            )
            buffer, source, comm_stream = in_flight
            sorted_by_rank = buffer.view(source.num_shards, -1)
            if source.is_split_only:
                torch.split_with_sizes_copy(
                    sorted_by_rank, source.sizes, dim=1, out=source.targets
                )
            else:
                self._concatenate(sorted_by_rank, source)
            # The buffer's memory returns to its stream, which must not reuse it before the copy is done.
            comm_stream.wait_compute()

    def _concatenate(self, sorted_by_rank: torch.Tensor, source: Source) -> None:
        """The copy-out for parameters that are sharded along a dim other than the first."""
        parts = sorted_by_rank.split(source.sizes, dim=1)
        each = zip(
            self.params, source.shapes, parts, source.targets, self.leaves, strict=True
        )
        for param, shape, part, target, leaf in each:
            if param.dim == 0:
                target.copy_(part)
            else:
                # Every shard has this shape, because the dim is divisible.
                torch.cat(
                    [local_shard.view(shape) for local_shard in part],
                    dim=param.dim,
                    out=leaf.data,
                )

    def free(self) -> None:
        """Frees the memory of `leaves`. Nearly always it was allocated and read on one stream, so no wait is needed."""
        self._in_flight = None
        if not self.is_borrowed:
            if self._stream is not None and self._stream != (
                stream := current_stream(self.device)
            ):
                # Units that stay unsharded can be used on several streams of the user.
                self._unsharded.record_stream(stream)
            self._storage.resize_(0)

    def gather_from(self, source: Source | None, written_at: Any = None) -> None:
        """Makes the next all-gather read other shards, for example larger ones over fewer ranks.

        Args:
            source: the shards; ``None`` for those that the optimizer updates. Their values may have changed.
            written_at: the event after which ``source`` has its values.
        """
        self._source = source or self._own
        self._written_at = written_at
        self.group = self._source.group


def assign_to_buckets(
    params: Sequence[ShardedParam],
    local_shards: Sequence[torch.Tensor],
    options: Options,
    before: Sequence[Bucket],
) -> list[Bucket]:
    """Assigns each parameter to a bucket of one dtype and mesh, and copies its new local shard into the bucket.

    Args:
        params, local_shards: the parameters of a unit, and the values of each.
        options: where to compute, and in which dtype.
        before: the current buckets of the unit. A bucket whose parameters and kind stay the same is kept.
    """
    # One group for each dtype, device and mesh. Some parameters of a unit are on the meta device until they get values.
    groups: dict[Any, dict[ShardedParam, torch.Tensor]] = {}
    for param, local_shard in zip(params, local_shards, strict=True):
        # 6. A case creates the buckets of the parameters that it takes.
        create, place = next(
            (
                (case.create, case.place(param))
                for case in options.cases
                if case.takes(param, local_shard)
            ),
            (Bucket, None),
        )
        kind = (
            create,
            place,
            local_shard.dtype,
            options.storage_device(local_shard),
            param.mesh_groups,
        )
        groups.setdefault(kind, {})[param] = local_shard
    buckets: list[Bucket] = []
    for kind, shards_by_param in groups.items():
        create = kind[0]
        inside = list(shards_by_param)
        shards = list(shards_by_param.values())
        # The bucket from before, or a new one.
        bucket = next(
            (
                bucket
                for bucket in before
                if bucket.kind == kind and bucket.params == inside
            ),
            None,
        )
        if bucket is None:
            bucket = create(inside, shards, options)
            bucket.kind = kind
        else:
            bucket.copy_in(shards)
        buckets.append(bucket)
        # From now on the local shards are in the memory of the bucket.
        for param, local_shard in zip(inside, bucket.local_shards, strict=True):
            param.local_shard = local_shard
    return buckets
