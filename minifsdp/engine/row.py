"""The bucket of the per-parameter layout: contiguous memory for the parameters of one dtype of a unit.

A collective uses one tensor, but the optimizer and autograd need one tensor for each parameter. So the parameters are
views of one tensor, both sharded and unsharded. Two ranks; capital letters are values from rank 1::

    local        [a a | b]           the local shards, updated by the optimizer
                     | all-gather
    buffer       [a a | b   A A | B]         shards of rank 0, then shards of rank 1
                     | copy-out
    whole        [a a A A | b B]             parameter after parameter, used by the modules

1. *No copy-in.* The shards are stored in the order in which they are sent, so the all-gather reads them directly. Only
   a cast to another dtype, or a copy from the CPU, needs extra memory. It uses this rank's part of the buffer.
   Each shard has its own storage, which is a range of the bucket's memory. ``torch.save`` and ``deepcopy`` serialize
   the whole storage of a view, and cannot save a DTensor whose local tensor has a non-zero storage offset.
2. *One copy-out.* The all-gathered data is sorted by rank and must be sorted by parameter. One operator does that for
   all parameters. A bucket of one parameter is already sorted: on the CPU its buffer is ``whole``. On the CPU, large
   parameters are also sent one by one, directly into their final memory, without buffer and copy.
3. The leaves, which autograd owns, are created once. Each is a view of ``whole`` with its own version counter.
   ``whole`` has memory only from all-gather to reshard: one resize allocates the memory of all leaves.
4. A bucket that is neither sharded nor cast needs no second memory: its leaves are views of the shards.
5. On an accelerator the leaves begin at multiples of 16 bytes, the width of a vectorized load. Some kernels are slower
   with other addresses, and some raise an error. The data that is sent has no gaps.

Between forward and backward a unit can be resharded to larger shards over fewer ranks, for example the ranks of one
node. The all-gather for backward then uses only these ranks. The diagram stays the same, with other local shards.

*In torch:* each parameter has its own memory on both sides, with a copy-in and a copy-out for each all-gather.

Spec: FS2-04 to FS2-08, FS2-26, NEW-05, STREAM-04, STREAM-12.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from minifsdp.engine import collectives
from minifsdp.engine.comm_streams import COMPLETED, CommStream, Handle, compute_event
from minifsdp.engine.cut import Cut
from minifsdp.engine.mesh import Group
from minifsdp.engine.precision import Precision

# The number of in-place changes of a tensor.
VERSION = operator.attrgetter("_version")


@dataclass(frozen=True)
class Options:
    """The options for the parameters of a unit.

    Attributes:
        device: the compute device.
        precision: the compute dtype, and the dtype of gradients that wait for their reduction.
        offload: whether the shards are on the CPU.
        pin: whether they are in pinned memory there, for asynchronous copies.
        policy: the user's mixed-precision policy, passed to custom all-gather extensions.
    """

    device: torch.device
    precision: Precision = field(default_factory=Precision)
    offload: bool = False
    pin: bool = False
    policy: Any = None

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The compute dtype for values that are stored in the dtype ``stored``."""
        return (self.precision.compute or stored) if stored.is_floating_point else stored

    def home_of(self, local_shard: torch.Tensor) -> torch.device:
        """The device on which the memory for ``local_shard`` is allocated."""
        return torch.device("cpu") if self.offload and not local_shard.is_meta else local_shard.device


class _Source:
    """This rank's shards of some parameters, contiguous, in the order in which an all-gather sends them.

    Args:
        cuts: how each parameter is sharded.
        group: the shard group; ``None`` if there are no other ranks.
        sizes: elements of each shard, including padding.
        local: 1-D, zeros; the memory of all shards.

    Attributes:
        local_shards: the shard of each parameter, in the memory of `local`.
        num_local_shards, rank: size of the group, and this rank's position in it.
        is_split_only: whether every parameter is sharded along its first dim.
        targets: the memory into which each parameter is all-gathered.
        goes_straight: whether each parameter is sent separately, directly into its target.
    """

    def __init__(self, cuts: Sequence[Cut], group: Group | None, sizes: list[int], local: torch.Tensor) -> None:
        self.cuts, self.group, self.sizes, self.local = cuts, group, sizes, local
        self.num_local_shards, self.rank = (1, 0) if group is None else (group.size, group.rank)
        self.is_split_only = group is None or not any(cut.dim for cut in cuts)
        each = zip(local.split(sizes), (cut.local_shape(self.rank) for cut in cuts), strict=True)
        self.local_shards = [_cut_out(chunk[: shape.numel()].view(shape)) for chunk, shape in each]

    def take(self, values: Sequence[torch.Tensor]) -> None:
        """Copies the values of each shard, unless they are already in its memory."""
        for local_shard, value in zip(self.local_shards, values, strict=True):
            if local_shard.data_ptr() != value.data_ptr():
                local_shard.copy_(value)

    def set_targets(self, rooms: Sequence[torch.Tensor]) -> None:
        """Sets the memory for each parameter, shaped with one row for each rank. The tensors must have memory."""
        num = self.num_local_shards
        self.targets = [room[: num * size].view(num, size) for room, size in zip(rooms, self.sizes, strict=True)]
        self.goes_straight = self.is_split_only and collectives.all_gathers_each(self.group, self.targets)


class Row:
    """A bucket: parameters of one dtype, sharded and stored contiguously.

    Args:
        cuts: how each parameter is sharded.
        local_shards: the local shard of each.
        group: the shard group; ``None`` if there are no other ranks.
        options: where to compute, and in which dtype.

    Attributes:
        local: 1-D, the local shards, including padding.
        local_shards: the local shard of each parameter, in the memory of `local`.
        leaves: the unsharded parameters; they have memory only while all-gathered.
        dtype: of the leaves.
        is_borrowed: whether the leaves have no memory of their own (note 4).
        num_bytes: of the unsharded parameters, without the gaps.
    """

    def __init__(
        self, cuts: Sequence[Cut], local_shards: Sequence[torch.Tensor], group: Group | None, options: Options
    ) -> None:
        stored, home = local_shards[0].dtype, options.home_of(local_shards[0])
        self.device, self.dtype = options.device, options.compute_dtype(stored)
        # 5. The data that is sent has no gaps. Without other ranks, nothing is sent.
        sizes = [cut.chunk_numel if group is not None else self._aligned(cut.chunk_numel) for cut in cuts]
        self.local = torch.zeros(sum(sizes), dtype=stored, device=home)
        if options.pin and home.type == "cpu" and self.device.type != "cpu":
            self.local = self.local.pin_memory()
        self._own = _Source(cuts, group, sizes, self.local)
        self.local_shards = self._own.local_shards
        self.take(local_shards)
        self._make_leaves(cuts, group)

    def take(self, local_shards: Sequence[torch.Tensor]) -> None:
        """Copies new values into the shards, of the same dtype and device."""
        self._own.take(local_shards)

    def _aligned(self, numel: int) -> int:
        # 5. 16 elements are a multiple of 16 bytes in every dtype, so a cast keeps the positions of the gaps.
        return numel if self.device.type == "cpu" else -(-numel // 16) * 16

    def _make_leaves(self, cuts: Sequence[Cut], group: Group | None) -> None:
        own = self._own
        # 4. The compute memory is the memory of the shards.
        self.is_borrowed = group is None and self.dtype is own.local.dtype and own.local.device == self.device
        rooms = [self._aligned(own.num_local_shards * size) for size in own.sizes]
        whole = own.local if self.is_borrowed else torch.empty(sum(rooms), dtype=self.dtype, device=self.device)
        self.num_bytes = sum(cut.padded_numel for cut in cuts) * self.dtype.itemsize
        self._storage, self._whole = whole.untyped_storage(), whole.data
        self._rooms = self._whole.split(rooms)
        # 3. `.data` gives each leaf its own version counter: an all-gather must not look like an in-place change.
        self.leaves = [
            nn.Parameter(room.data[: cut.shape.numel()].view(cut.shape), requires_grad=False)
            for room, cut in zip(self._rooms, cuts, strict=True)
        ]
        # Without other ranks, or with one parameter, the data is sorted. But on an accelerator the leaves' memory would
        # then come from the communication stream, and only the copy-out makes it safe to reuse that memory.
        is_sorted = group is None or (len(cuts) == 1 and cuts[0].dim == 0)
        self._copies = not is_sorted or self.device.type != "cpu"
        # The buffer and the source of the all-gather in flight.
        self._in_flight: tuple[torch.Tensor, _Source] | None = None
        own.set_targets(self._rooms)
        self._source = own
        if not self.is_borrowed:
            self._storage.resize_(0)

    @property
    def group(self) -> Group | None:
        """The ranks of the next all-gather."""
        return self._source.group

    def stamp(self) -> object:
        """Differs from an earlier stamp if values were changed in place, or memory replaced, in between."""
        return self.local.data_ptr(), list(map(VERSION, self.local_shards))

    # --- all-gather ---

    def all_gather(self, comm_stream: CommStream, name: str | None = None) -> list[Handle]:
        """Issues the all-gather of the unit ``name`` on the stream ``comm_stream``. Call `arrive` after the wait."""
        if self.is_borrowed:
            return []
        self._comm_stream, source = comm_stream, self._source
        if source is not self._own:
            # The compute stream wrote this source after the communication stream last waited for it.
            comm_stream.wait_compute(self._rested_at)
        local_shard, num = source.local, source.num_local_shards
        if source.goes_straight:
            # 2. Nothing to sort.
            assert source.group is not None
            self._storage.resize_(self._whole.nbytes)
            return [collectives.all_gather_each(source.group, source.targets, local_shard.split(source.sizes), name)]
        if not self._copies:
            # 2. Nothing to sort.
            self._storage.resize_(self._whole.nbytes)
            buffer = self._whole[: num * local_shard.numel()]
        else:
            buffer = torch.empty(num * local_shard.numel(), dtype=self.dtype, device=self.device)
        self._in_flight = buffer, source
        if local_shard.dtype is not self.dtype or local_shard.device != self.device or source.group is None:
            # 1. Memory for the cast.
            mine = buffer[source.rank * local_shard.numel() : (source.rank + 1) * local_shard.numel()]
            mine.copy_(local_shard, non_blocking=True)
            local_shard = mine
        group = source.group
        work = COMPLETED if group is None else collectives.all_gather(group, buffer, local_shard, name)
        return [comm_stream.handle(work)]

    def arrive(self) -> None:
        """2. The copy-out of the all-gathered data."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None or not self._copies:
            return
        self._storage.resize_(self._whole.nbytes)
        buffer, source = in_flight
        sorted_by_rank = buffer.view(source.num_local_shards, -1)
        if source.is_split_only:
            torch.split_with_sizes_copy(sorted_by_rank, source.sizes, dim=1, out=source.targets)
        else:
            self._concatenate(sorted_by_rank, source)
        # The buffer's memory returns to its stream, which must not reuse it before the copy is done.
        self._comm_stream.wait_compute()

    def _concatenate(self, sorted_by_rank: torch.Tensor, source: _Source) -> None:
        """The copy-out for parameters that are sharded along another dim than the first."""
        parts = sorted_by_rank.split(source.sizes, dim=1)
        for cut, part, target, leaf in zip(source.cuts, parts, source.targets, self.leaves, strict=True):
            if cut.dim == 0:
                target.copy_(part)
            else:
                local_shards = [local_shard.view(cut.local_shape(0)) for local_shard in part]
                torch.cat(local_shards, dim=cut.dim, out=leaf.data)

    def free(self) -> None:
        """Frees the memory of `leaves`. It was allocated and read on the compute stream, so no wait is needed."""
        self._in_flight = None
        if not self.is_borrowed:
            self._storage.resize_(0)

    # --- resharding to a smaller mesh ---

    def rest(self, group: Group) -> list[torch.Tensor]:
        """Keeps 1/``group.size`` of the unsharded parameters, to all-gather over ``group`` only. Call it before `free`.

        Returns:
            This rank's shard of each parameter over the ranks of ``group``.
        """
        cuts = [replace(cut, num_shards=group.size) for cut in self._own.cuts]
        sizes = [cut.chunk_numel for cut in cuts]
        source = _Source(cuts, group, sizes, torch.zeros(sum(sizes), dtype=self.dtype, device=self.device))
        source.take([cut.local_part(leaf.data, group.rank) for cut, leaf in zip(cuts, self.leaves, strict=True)])
        self._rested_at = compute_event(self.device)
        source.set_targets(self._rooms)
        self._source = source
        return source.local_shards

    def wake(self) -> None:
        """The next all-gather reads the optimizer's shards again, whose values may have changed."""
        self._source = self._own


def _cut_out(view: torch.Tensor) -> torch.Tensor:
    """``view`` as a tensor whose storage is only this range of the memory, which lives as long as either is used."""
    storage = view.untyped_storage()
    if storage.device.type == "meta":
        return view
    start = view.storage_offset() * view.itemsize
    own = storage[start : start + view.numel() * view.itemsize]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(own, 0, view.shape, view.stride())
