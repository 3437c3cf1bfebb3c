"""The parameters of one dtype of a unit, side by side: the memory of the per-parameter layout.

A collective wants one tensor; the optimizer and autograd want many. So the many are views of one, on either side. Two
ranks, with capitals for what comes from rank 1::

    local        [a a | b]           this rank's pieces, what the optimizer steps on
                     | gather
    buffer       [a a | b   A A | B]         pieces of rank 0, then those of rank 1
                     | copy out
    whole        [a a A A | b B]             parameter after parameter, what modules compute with

1. *No copy in.* The pieces lie in the order in which they are sent, so the gather reads them where they are. Only a
   cast to another dtype, or a copy from the CPU, needs a place, and that is this rank's part of the buffer.
   Each piece has a storage of its own, a stretch of the row's memory: what saves or copies a tensor takes its whole
   storage along, and a DTensor around a view that begins inside of a storage cannot be saved at all.
2. *One copy out.* What arrives is sorted by rank and has to be sorted by parameter. One operator does that for all of
   them. A row of one parameter is sorted already: on the CPU its buffer is the whole. There, large parameters are also
   sent one by one, each straight into its place: no buffer, no copy.
3. The leaves, what autograd owns, are made once. Each is a view of ``whole`` with a version counter of its own, and
   ``whole`` has memory only from gather to free: one resize gives it to all of them.
4. A row that is neither shared nor cast needs no second memory: its leaves look at the pieces themselves.
5. On an accelerator the leaves begin at multiples of 16 bytes, as many as one load of a kernel takes: others are slower
   there, and some refuse. What travels has no gaps.

Between forward and backward a unit may *rest* on larger pieces, cut among a few ranks only, say those of one node. The
gather for backward then stays inside of these few. It is the picture above with another row of local pieces.

*In torch:* each parameter has memory of its own on both sides, with a copy in and a copy out for each gather.

Spec: FS2-04 to FS2-08, FS2-26, NEW-05, STREAM-04, STREAM-12.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from minifsdp.engine import collectives
from minifsdp.engine.cut import Cut
from minifsdp.engine.lanes import NOTHING, Lane, Promise, compute_event
from minifsdp.engine.mesh import Group
from minifsdp.engine.precision import Precision

# How often a tensor was changed in place.
VERSION = operator.attrgetter("_version")


@dataclass(frozen=True)
class Options:
    """What was chosen for the parameters of a unit.

    Attributes:
        device: the compute device.
        precision: in which dtype to compute, and in which gradients wait for their reduction.
        offload: whether the pieces live on the CPU.
        pin: whether they are pinned there, for asynchronous copies.
        policy: the user's words for the precision, for parameters that decide for themselves what is sent.
    """

    device: torch.device
    precision: Precision = field(default_factory=Precision)
    offload: bool = False
    pin: bool = False
    policy: Any = None

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """In which to compute with values that are stored in ``stored``."""
        return (self.precision.compute or stored) if stored.is_floating_point else stored

    def home_of(self, piece: torch.Tensor) -> torch.device:
        """Where the memory for ``piece`` shall be."""
        return torch.device("cpu") if self.offload and not piece.is_meta else piece.device


class _Source:
    """This rank's pieces of some parameters, side by side, as a gather sends them.

    Args:
        cuts: how each is cut.
        group: the ranks that have the other pieces; ``None`` if there are none.
        sizes: elements of each piece, with the padding behind it.
        local: 1-D, zeros; the memory of all of them.

    Attributes:
        pieces: the piece of each parameter, in the memory of `local`.
        num_pieces, rank: of the group.
        is_split_only: no parameter is cut along another dim than the first.
        targets: where each parameter is to arrive.
        goes_straight: each is sent by itself, into its target.
    """

    def __init__(self, cuts: Sequence[Cut], group: Group | None, sizes: list[int], local: torch.Tensor) -> None:
        self.cuts, self.group, self.sizes, self.local = cuts, group, sizes, local
        self.num_pieces, self.rank = (1, 0) if group is None else (group.size, group.rank)
        self.is_split_only = group is None or not any(cut.dim for cut in cuts)
        each = zip(local.split(sizes), (cut.local_shape(self.rank) for cut in cuts), strict=True)
        self.pieces = [_cut_out(chunk[: shape.numel()].view(shape)) for chunk, shape in each]

    def take(self, values: Sequence[torch.Tensor]) -> None:
        """Copies the values of each piece, where they are in other memory."""
        for piece, value in zip(self.pieces, values, strict=True):
            if piece.data_ptr() != value.data_ptr():
                piece.copy_(value)

    def set_targets(self, rooms: Sequence[torch.Tensor]) -> None:
        """Each parameter shall arrive in its room, a line for each rank. The rooms must have memory."""
        num = self.num_pieces
        self.targets = [room[: num * size].view(num, size) for room, size in zip(rooms, self.sizes, strict=True)]
        self.goes_straight = self.is_split_only and collectives.gathers_each(self.group, self.targets)


class Row:
    """Some parameters of one dtype, cut and laid side by side.

    Args:
        cuts: how each is cut.
        pieces: this rank's piece of each.
        group: the ranks that have the others; ``None`` if there are none.
        options: where to compute, and in which dtype.

    Attributes:
        local: 1-D, this rank's pieces, with padding.
        pieces: this rank's piece of each parameter, in the memory of `local`.
        leaves: each parameter whole; without memory unless gathered.
        dtype: of the leaves.
        is_borrowed: whether the leaves have no memory of their own (4).
        num_bytes: of the whole, without the gaps.
    """

    def __init__(
        self, cuts: Sequence[Cut], pieces: Sequence[torch.Tensor], group: Group | None, options: Options
    ) -> None:
        stored, home = pieces[0].dtype, options.home_of(pieces[0])
        self.device, self.dtype = options.device, options.compute_dtype(stored)
        # 5. No gaps in what travels; where nothing is shared, nothing does.
        sizes = [cut.chunk_numel if group is not None else self._aligned(cut.chunk_numel) for cut in cuts]
        self.local = torch.zeros(sum(sizes), dtype=stored, device=home)
        if options.pin and home.type == "cpu" and self.device.type != "cpu":
            self.local = self.local.pin_memory()
        self._own = _Source(cuts, group, sizes, self.local)
        self.pieces = self._own.pieces
        self.take(pieces)
        self._make_leaves(cuts, group)

    def take(self, pieces: Sequence[torch.Tensor]) -> None:
        """Takes over new values of its pieces, of the same dtype and device."""
        self._own.take(pieces)

    def _aligned(self, numel: int) -> int:
        # 5. 16 elements are a multiple of 16 bytes in every dtype, so that a cast finds the gaps where they were.
        return numel if self.device.type == "cpu" else -(-numel // 16) * 16

    def _make_leaves(self, cuts: Sequence[Cut], group: Group | None) -> None:
        own = self._own
        # 4. Computed on where it is stored.
        self.is_borrowed = group is None and self.dtype is own.local.dtype and own.local.device == self.device
        rooms = [self._aligned(own.num_pieces * size) for size in own.sizes]
        whole = own.local if self.is_borrowed else torch.empty(sum(rooms), dtype=self.dtype, device=self.device)
        self.num_bytes = sum(cut.padded_numel for cut in cuts) * self.dtype.itemsize
        self._storage, self._whole = whole.untyped_storage(), whole.data
        self._rooms = self._whole.split(rooms)
        # 3. `.data` is what gives each leaf a version counter of its own: a gather must not look like an edit.
        self.leaves = [
            nn.Parameter(room.data[: cut.shape.numel()].view(cut.shape), requires_grad=False)
            for room, cut in zip(self._rooms, cuts, strict=True)
        ]
        # What comes from no other rank arrives sorted; so does a single parameter. But on an accelerator its memory
        # would have to come from the gather lane then, and who may reuse that is told by the copy out.
        is_sorted = group is None or (len(cuts) == 1 and cuts[0].dim == 0)
        self._copies = not is_sorted or self.device.type != "cpu"
        # What is being gathered, and from what.
        self._in_flight: tuple[torch.Tensor, _Source] | None = None
        own.set_targets(self._rooms)
        self._source = own
        if not self.is_borrowed:
            self._storage.resize_(0)

    @property
    def group(self) -> Group | None:
        """Who takes part in the next gather."""
        return self._source.group

    def stamp(self) -> object:
        """Differs from an earlier stamp if values were changed in place, or memory replaced, in between."""
        return self.local.data_ptr(), list(map(VERSION, self.pieces))

    # --- gather ---

    def gather(self, lane: Lane, name: str | None = None) -> list[Promise]:
        """Issues the gather of the unit ``name`` on ``lane``; `arrive` is to be called when it was waited for."""
        if self.is_borrowed:
            return []
        self._lane, source = lane, self._source
        if source is not self._own:
            # The compute stream has written it since the lane has last followed.
            lane.follow(self._rested_at)
        piece, num = source.local, source.num_pieces
        if source.goes_straight:
            # 2. Nothing to sort.
            assert source.group is not None
            self._storage.resize_(self._whole.nbytes)
            return [collectives.gather_each(source.group, source.targets, piece.split(source.sizes), name)]
        if not self._copies:
            # 2. Nothing to sort.
            self._storage.resize_(self._whole.nbytes)
            buffer = self._whole[: num * piece.numel()]
        else:
            buffer = torch.empty(num * piece.numel(), dtype=self.dtype, device=self.device)
        self._in_flight = buffer, source
        if piece.dtype is not self.dtype or piece.device != self.device or source.group is None:
            # 1. A place for the cast.
            mine = buffer[source.rank * piece.numel() : (source.rank + 1) * piece.numel()]
            mine.copy_(piece, non_blocking=True)
            piece = mine
        group = source.group
        return [lane.promise(NOTHING if group is None else collectives.gather(group, buffer, piece, name))]

    def arrive(self) -> None:
        """2. Copies out what has arrived."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None or not self._copies:
            return
        self._storage.resize_(self._whole.nbytes)
        buffer, source = in_flight
        sorted_by_rank = buffer.view(source.num_pieces, -1)
        if source.is_split_only:
            torch.split_with_sizes_copy(sorted_by_rank, source.sizes, dim=1, out=source.targets)
        else:
            self._concatenate(sorted_by_rank, source)
        # The buffer goes back to the lane, which must not reuse it before the copy is done.
        self._lane.follow()

    def _concatenate(self, sorted_by_rank: torch.Tensor, source: _Source) -> None:
        """The copy out where a parameter is cut along another dim than the first."""
        parts = sorted_by_rank.split(source.sizes, dim=1)
        for cut, part, target, leaf in zip(source.cuts, parts, source.targets, self.leaves, strict=True):
            if cut.dim == 0:
                target.copy_(part)
            else:
                pieces = [piece.view(cut.local_shape(0)) for piece in part]
                torch.cat(pieces, dim=cut.dim, out=leaf.data)

    def free(self) -> None:
        """Gives back the memory of the whole. It came from the compute stream and was read there: no wait."""
        self._in_flight = None
        if not self.is_borrowed:
            self._storage.resize_(0)

    # --- resting on larger pieces ---

    def rest(self, group: Group) -> list[torch.Tensor]:
        """Keeps 1/``group.size`` of the whole, from which ``group`` alone can gather; to be called before `free`.

        Returns:
            This rank's piece of each parameter among the ranks of ``group``.
        """
        cuts = [replace(cut, num_shards=group.size) for cut in self._own.cuts]
        sizes = [cut.chunk_numel for cut in cuts]
        source = _Source(cuts, group, sizes, torch.zeros(sum(sizes), dtype=self.dtype, device=self.device))
        source.take([cut.local_part(leaf.data, group.rank) for cut, leaf in zip(cuts, self.leaves, strict=True)])
        self._rested_at = compute_event(self.device)
        source.set_targets(self._rooms)
        self._source = source
        return source.pieces

    def wake(self) -> None:
        """The next gather comes from the shards again, which the optimizer may have changed."""
        self._source = self._own


def _cut_out(view: torch.Tensor) -> torch.Tensor:
    """``view`` as a tensor whose storage is just this part of the memory, which lives as long as either is held."""
    storage = view.untyped_storage()
    if storage.device.type == "meta":
        return view
    start = view.storage_offset() * view.itemsize
    own = storage[start : start + view.numel() * view.itemsize]
    return torch.empty(0, dtype=view.dtype, device=view.device).set_(own, 0, view.shape, view.stride())
