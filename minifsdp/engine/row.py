"""The parameters of one dtype of a unit, side by side: the memory of the per-parameter layout.

A collective wants one tensor; the optimizer and autograd want many. So the many are views of one, on either side::

    local        [a a | b]           this rank's pieces, what the optimizer steps on
                     | gather
    buffer       [a a | b   A A | B]         pieces of rank 0, then those of rank 1
                     | copy out
    whole        [a a A A | b B]             parameter after parameter, what modules compute with

1. *No copy in.* The pieces lie in the order in which they are sent, so the gather reads them where they are. Only a
   cast to another dtype, or a copy from the CPU, needs a place, and that is this rank's part of the buffer.
   Each piece is a tensor with a storage of its own that begins inside of the row's memory: what saves or copies a
   tensor takes its whole storage along, and a DTensor around a view that begins elsewhere cannot be saved at all.
2. *One copy out.* What arrives is sorted by rank and has to be sorted by parameter. One operator does that for all of
   them. A row of one parameter is sorted already: on the CPU its buffer is the whole.
3. The leaves, what autograd owns, are made once. Each is a view of ``whole`` with a version counter of its own, and
   ``whole`` has memory only from gather to free: one resize gives it to all of them.
4. A row that is neither shared nor cast needs no second memory: its leaves look at the pieces themselves.
5. On an accelerator the leaves begin at multiples of 16 bytes, as many as one load of a kernel takes: others are slower
   there, and some refuse. What travels has no gaps.

Instead of going back to its own piece of the whole world's row, a unit may rest on a larger piece that only a few
ranks, say those of one node, put together again (`rest`). The gather for backward then stays inside of these few.

*In torch:* each parameter has memory of its own on both sides, with a copy in and a copy out for each gather.

Spec: FS2-04 to FS2-08, FS2-26, NEW-05, STREAM-04, STREAM-12.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from minifsdp.engine import collectives
from minifsdp.engine.cut import Cut
from minifsdp.engine.lanes import NOTHING, Lane, Promise, passed
from minifsdp.engine.mesh import Group

# How often a tensor was changed in place.
VERSION = operator.attrgetter("_version")


@dataclass(frozen=True, slots=True)
class _Source:
    """From where a gather puts the row together.

    Attributes:
        group: who sends; ``None`` for this rank alone.
        piece: what this rank sends.
        sizes: elements of each parameter in it.
    """

    group: Group | None
    piece: torch.Tensor
    sizes: list[int]

    @property
    def num_pieces(self) -> int:
        return 1 if self.group is None else self.group.size


class Row:
    """Some parameters of one dtype, cut and laid side by side.

    Args:
        cuts: how each is cut.
        values: the whole of each, on any device.
        index: which of the pieces are this rank's.
        group: the ranks that have the others; ``None`` if there are none.
        device: the compute device.
        dtype: in which to compute; ``None`` for that of the values.
        offload: whether the pieces live on the CPU.
        pin: whether they are pinned there, for asynchronous copies.

    Attributes:
        local: 1-D, this rank's pieces, with padding.
        pieces: this rank's piece of each parameter, in the memory of `local`.
        leaves: each parameter whole; without memory unless gathered.
        dtype: of the leaves.
        num_bytes: of the whole, without the gaps.
    """

    def __init__(
        self,
        cuts: Sequence[Cut],
        values: Sequence[torch.Tensor],
        index: int,
        group: Group | None,
        device: torch.device,
        *,
        dtype: torch.dtype | None,
        offload: bool,
        pin: bool,
    ) -> None:
        self.cuts, self.index, self.device = cuts, index, device
        home = torch.device("cpu") if offload and device.type != "meta" else device
        # Where nothing is shared, nothing travels.
        self._sizes = [cut.chunk_numel if group is not None else self._aligned(cut.chunk_numel) for cut in cuts]
        self.local = torch.zeros(sum(self._sizes), dtype=values[0].dtype, device=home)
        if pin and home.type == "cpu" and device.type != "cpu":
            self.local = self.local.pin_memory()
        self.pieces = self._pieces_of(self.local)
        for cut, piece, value in zip(cuts, self.pieces, values, strict=True):
            piece.copy_(cut.local_part(value, index))
        self._group = group
        self._make_leaves(dtype or self.local.dtype)

    def _aligned(self, numel: int) -> int:
        # 5. 16 elements are a multiple of 16 bytes in every dtype, so that a cast finds the gaps where they were.
        return numel if self.device.type == "cpu" else -(-numel // 16) * 16

    def _pieces_of(self, local: torch.Tensor) -> list[torch.Tensor]:
        chunks = local.split(self._sizes)
        shapes = [cut.local_shape(self.index) for cut in self.cuts]
        return [_cut_out(chunk[: shape.numel()].view(shape)) for chunk, shape in zip(chunks, shapes, strict=True)]

    def _make_leaves(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        group, local = self._group, self.local
        # 4. Computed on where it is stored.
        self.is_borrowed = group is None and dtype is local.dtype and local.device == self.device
        num = 1 if group is None else group.size
        rooms = [self._aligned(num * size) for size in self._sizes]
        whole = local if self.is_borrowed else torch.empty(sum(rooms), dtype=dtype, device=self.device)
        self.num_bytes = sum(cut.padded_numel for cut in self.cuts) * dtype.itemsize
        self._storage, self._whole = whole.untyped_storage(), whole.data
        self._regions = [room[: num * size] for room, size in zip(self._whole.split(rooms), self._sizes, strict=True)]
        # 3. `.data` is what gives each leaf a version counter of its own: a gather must not look like an edit.
        self.leaves = [
            nn.Parameter(region.data[: cut.shape.numel()].view(cut.shape), requires_grad=False)
            for region, cut in zip(self._regions, self.cuts, strict=True)
        ]
        self._own = _Source(group, local, self._sizes)
        self._source = self._own
        # What comes from no other rank arrives sorted; so does a single parameter. But on an accelerator its memory
        # would have to come from the gather lane then, and who may reuse that is told by the copy out.
        is_sorted = group is None or (len(self.cuts) == 1 and self.cuts[0].dim == 0)
        self._copies = not is_sorted or self.device.type != "cpu"
        self._is_split_only = group is None or not any(cut.dim for cut in self.cuts)
        self._targets = self._targets_for(self._own)
        self._buffer: torch.Tensor | None = None
        self._rested_at: Any = None
        if not self.is_borrowed:
            self._storage.resize_(0)

    def _targets_for(self, source: _Source) -> list[torch.Tensor]:
        return [region.view(source.num_pieces, -1) for region in self._regions]

    @property
    def group(self) -> Group | None:
        """Who takes part in the next gather."""
        return self._source.group

    def stamp(self) -> object:
        """Differs from an earlier stamp if values were changed in place, or memory replaced, in between."""
        return self.local.data_ptr(), list(map(VERSION, self.pieces))

    # --- gather ---

    def gather(self, lane: Lane) -> list[Promise]:
        """Issues the gather on ``lane``; `arrive` must be called once the promises were waited for."""
        if self.is_borrowed:
            return []
        source = self._source
        if source is not self._own:
            # Cut out on the compute stream, after this lane has last followed it.
            lane.follow(self._rested_at)
        piece, num = source.piece, source.num_pieces
        if not self._copies:
            # 2. Nothing to sort.
            self._storage.resize_(self._whole.nbytes)
            buffer = self._whole
        else:
            buffer = torch.empty(num * piece.numel(), dtype=self.dtype, device=self.device)
        self._buffer = buffer
        if piece.dtype is not self.dtype or piece.device != self.device or source.group is None:
            # 1. A place for the cast.
            position = 0 if source.group is None else source.group.rank
            mine = buffer[position * piece.numel() : (position + 1) * piece.numel()]
            mine.copy_(piece, non_blocking=True)
            piece = mine
        return [lane.promise(NOTHING if source.group is None else collectives.gather(source.group, buffer, piece))]

    def arrive(self) -> torch.Tensor | None:
        """Copies out what has arrived. Returns the buffer if it came from the lane, to be kept until that is done."""
        buffer, self._buffer = self._buffer, None
        if buffer is None or not self._copies:
            return None
        self._storage.resize_(self._whole.nbytes)
        source = self._source
        sorted_by_rank = buffer.view(source.num_pieces, -1)
        if source is not self._own or self._is_split_only:
            torch.split_with_sizes_copy(sorted_by_rank, source.sizes, dim=1, out=self._targets)
        else:
            self._concatenate(sorted_by_rank)
        return buffer

    def _concatenate(self, sorted_by_rank: torch.Tensor) -> None:
        """The copy out where a parameter is cut along another dim than the first."""
        parts = sorted_by_rank.split(self._own.sizes, dim=1)
        for cut, part, target, region in zip(self.cuts, parts, self._targets, self._regions, strict=True):
            if cut.dim == 0:
                target.copy_(part)
            else:
                pieces = [piece.view(cut.local_shape(0)) for piece in part]
                torch.cat(pieces, dim=cut.dim, out=region.view(cut.shape))

    def free(self) -> None:
        """Gives back the memory of the whole. It came from the compute stream and was read there: no wait."""
        self._buffer = None
        if not self.is_borrowed:
            self._storage.resize_(0)

    # --- resting on a larger piece ---

    def rest(self, group: Group) -> None:
        """Keeps 1/``group.size`` of the whole, from which ``group`` alone can gather; to be called before `free`."""
        if self.is_borrowed:
            return
        sizes = [region.numel() // group.size for region in self._regions]
        pieces = [r[group.rank * size : (group.rank + 1) * size] for r, size in zip(self._regions, sizes, strict=True)]
        self._source = _Source(group, torch.cat(pieces), sizes)
        self._rested_at = passed(self.device)
        self._targets = self._targets_for(self._source)

    def resting_pieces(self, group: Group) -> list[torch.Tensor]:
        """This rank's piece of each parameter among the ranks of ``group``; to be called after `rest`."""
        found = []
        chunks = self._source.piece.split(self._source.sizes)
        for cut, chunk, leaf in zip(self.cuts, chunks, self.leaves, strict=True):
            small = replace(cut, num_shards=group.size)
            shape = small.local_shape(group.rank)
            if small.dim == 0 and small.chunk_numel == chunk.numel():
                found.append(_cut_out(chunk[: shape.numel()].view(shape)))
            else:
                # Cut among all ranks, it has more padding than among a few.
                found.append(small.local_part(leaf.data, group.rank).clone())
        return found

    def wake(self) -> None:
        """The next gather comes from the shards again, which the optimizer may have changed."""
        if self._source is not self._own:
            self._source = self._own
            self._targets = self._targets_for(self._own)

    # --- after edits ---

    def replace(self, pieces: Sequence[torch.Tensor], dtype: torch.dtype | None) -> None:
        """New pieces, perhaps of another dtype or on another device; all leaves are made anew if they are."""
        first = pieces[0]
        if first.dtype is not self.local.dtype or first.device != self.local.device:
            self._lay_anew(first, dtype)
        for mine, new in zip(self.pieces, pieces, strict=True):
            if mine.data_ptr() != new.data_ptr() or mine.device.type == "meta":
                mine.copy_(new)

    def part(self, numbers: Sequence[int], pieces: Sequence[torch.Tensor], dtype: torch.dtype | None) -> Row:
        """A row for some of the parameters, whose new pieces are of another dtype than those of the others."""
        part = copy(self)
        part.cuts = [self.cuts[number] for number in numbers]
        part._sizes = [self._sizes[number] for number in numbers]
        part._lay_anew(pieces[0], dtype)
        part.replace(pieces, dtype)
        return part

    def _lay_anew(self, like: torch.Tensor, dtype: torch.dtype | None) -> None:
        self.local = torch.zeros(sum(self._sizes), dtype=like.dtype, device=like.device)
        if self.device.type in ("meta", like.device.type):
            self.device = like.device
        self.pieces = self._pieces_of(self.local)
        self._make_leaves(dtype or like.dtype)


def _cut_out(view: torch.Tensor) -> torch.Tensor:
    """``view`` as a tensor whose storage is just this part of the memory, which lives as long as either is held."""
    storage = view.untyped_storage()
    if storage.device.type == "meta":
        return view
    start = view.storage_offset() * view.itemsize
    own = storage[start : start + view.numel() * view.itemsize]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(own, 0, view.shape, view.stride())
