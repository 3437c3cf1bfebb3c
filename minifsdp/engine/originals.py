"""What the optimizer owns when the original parameters stay visible.

The flat layout of memory is the same, but the flat tensor is not shown. The very ``nn.Parameter`` objects that the
user made stay registered under their names, and between computations each of them is a 1-D slice: the part of it that
fell into this rank's piece, which may be all of it, some of it, or nothing. So an optimizer can treat biases otherwise
than weights, and ``named_parameters()`` has the names that one expects.

Worked example, ``weight`` of shape (2, 3) and ``bias`` of shape (3), two ranks::

    rank 0    weight: 5 elements     bias: 0 elements
    rank 1    weight: 1 element      bias: 3 elements, and behind them one of padding that is not shown

The slices are views of the shard, so a step of the optimizer writes into the shard and there is nothing to copy back.
But here the user can also give a parameter other memory, ``p.data = ...``, as ``model.to_empty()`` does; that is
noticed before the shard is read, gathered or written the next time, by its address, and copied into the shard.

Frozen and trained parameters may share a unit. All of them take part in the gather and in the reduction, frozen ones
for nothing; the slice of the gradient that belongs to a frozen one is dropped.

*In torch:* ``_use_sharded_views``, ``_use_sharded_grad_views`` and ``_writeback_orig_params`` of ``FlatParamHandle``.

Spec: ORIG-02 to ORIG-05, ORIG-08 to ORIG-10, ORIG-13, ORIG-17, NOSYNC-05, STREAM-05.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp.engine import misuse, optimizer_watch
from minifsdp.engine.layout import OwnedParameter, Slot
from minifsdp.engine.messages import message, warn
from minifsdp.engine.ownership import Ownership, assign_gradient, call_hooks
from minifsdp.engine.partition import Partition, local_part


class OriginalOwnership(Ownership):
    """The shard as slices of the original parameters.

    Args:
        parameters: the originals; they stay where they are registered. A ``DTensor`` cannot show a slice; an ordinary
            parameter takes its place.
        shard: 1-D, this rank's piece.
        partition: where the parameters are cut.
        index: which piece this rank has.
        keep_reduce_dtype: whether a reduced gradient may stay in another dtype than the shard's.
    """

    hides_originals = False

    def __init__(
        self,
        parameters: Mapping[nn.Parameter, OwnedParameter],
        shard: torch.Tensor,
        partition: Partition,
        index: int,
        keep_reduce_dtype: bool,
    ) -> None:
        self.shard, self.partition, self.keep_reduce_dtype = shard, partition, keep_reduce_dtype
        self.shapes = [local_part(original).shape for original in parameters]
        self._is_distributed = [isinstance(original, DTensor) for original in parameters]
        self.originals = [
            _in_place_of(original, owned.slots) if isinstance(original, DTensor) else original
            for original, owned in parameters.items()
        ]
        self._paths = [owned.path for owned in parameters.values()]
        # Where each slice lies in this rank's piece.
        self._slices = partition.slices_of_piece(index)
        self._unreduced: torch.Tensor | None = None
        self._version = 0
        self._reduced_before: list[torch.Tensor | None] = []
        self._gradients_aside: list[torch.Tensor | None] = []
        self.stand_ins = self.originals
        for original, path, is_replaced in zip(parameters, self._paths, self._is_distributed, strict=True):
            misuse.note_taken(original, path, is_replaced=is_replaced)
        for slot in (slot for owned in parameters.values() for slot in owned.slots):
            misuse.note_flattened(slot.module, slot.name)
        self._warn_if_mixed()
        self.hide_full()

    def _warn_if_mixed(self) -> None:
        frozen = [path for path, p in zip(self._paths, self.originals, strict=True) if not p.requires_grad]
        if frozen and len(frozen) < len(self.originals):
            warn(message("frozen-among-trained", frozen=frozen))

    # --- what is visible ---

    def dictionary(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Where to write what a module shall show: where its parameters are registered."""
        return module._parameters  # type: ignore[return-value]

    def show_full(self, views: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        """The originals themselves, showing ``views``, where they can; their gradients are put aside."""
        self._gradients_aside = [p.grad for p in self.originals]
        shown = []
        for original, view, is_distributed in zip(self.originals, views, self._is_distributed, strict=True):
            original.grad = None
            if is_distributed:
                shown.append(nn.Parameter(view, requires_grad=original.requires_grad))
            else:
                original.data = view
                shown.append(original)
        return shown

    def hide_full(self) -> None:
        """The originals show their slices of the shard, and the gradients that `show_full` has put aside."""
        for original, view in zip(self.originals, self._own_views(self.shard), strict=True):
            original.data = view
        for original, gradient in zip(self.originals, self._gradients_aside, strict=False):
            original.grad = None
            if gradient is not None:
                assign_gradient(original, gradient)
        self._gradients_aside = []

    def _own_views(self, piece: torch.Tensor) -> list[torch.Tensor]:
        if self.partition.num_shards == 1:
            # No rank has another part: there is no reason to show less than the parameter.
            return [piece[part].view(shape) for part, shape in zip(self._slices, self.shapes, strict=True)]
        return [piece[part] for part in self._slices]

    def local_parameters(self) -> list[nn.Parameter]:
        """What the optimizer owns: the originals."""
        return self.originals

    @property
    def requires_grad(self) -> bool:
        """Whether any of them is to be trained."""
        return any(original.requires_grad for original in self.originals)

    def stamp(self) -> object:
        """Changes whenever the values of a slice are changed in place, or its memory is replaced, on any rank.

        A rank on which nothing lies of what is trained sees no version change in a step, and must gather all the same.
        """
        return optimizer_watch.num_steps(), [(original._version, original.data_ptr()) for original in self.originals]

    def collect(self) -> bool:
        """Copies into the shard what the user has given other memory, and makes it a slice again; whether any was.

        Raises:
            RuntimeError: the new tensor has another number of elements.
        """
        has_copied = False
        for index, original in enumerate(self.originals):
            part = self._slices[index]
            if part.start == part.stop and original.numel() == 0:
                continue
            mine = self.shard[part]
            if original.data_ptr() == mine.data_ptr():
                continue
            if original.numel() != mine.numel():
                raise RuntimeError(
                    message("wrong-size", parameter=self._paths[index], found=original.numel(), expected=mine.numel())
                )
            mine.copy_(original.data.reshape(-1))
            original.data = self._own_views(self.shard)[index]
            # The address is the old one again; without this a unit that is kept would not be stale.
            torch.autograd.graph.increment_version(original)
            has_copied = True
        return has_copied

    def settle(self) -> None:
        """A new shard of the dtype and device that the originals have now; their values are collected into it."""
        first = self.originals[0]
        if first.dtype is not self.shard.dtype or first.device != self.shard.device:
            self.shard = torch.zeros_like(self.shard, device=first.device, dtype=first.dtype)
            self.collect()

    def overwrite(self, piece: torch.Tensor) -> None:
        """New values for the shard. The change is one that `stamp` shows."""
        self.shard.copy_(piece)
        for original in self.originals:
            torch.autograd.graph.increment_version(original)

    # --- gradients ---

    @property
    def has_unreduced(self) -> bool:
        """Whether some ``.grad`` is there and has never been reduced."""
        return self._unreduced is not None and any(original.grad is not None for original in self.originals)

    def add_reduced(self, piece: torch.Tensor) -> None:
        """Adds each trained parameter's part of a reduced piece to its gradient."""
        if piece.dtype is not self.shard.dtype and not self.keep_reduce_dtype:
            piece = piece.to(self.shard.dtype)
        for original, part in zip(self.originals, self._own_views(piece), strict=True):
            if not original.requires_grad or part.numel() == 0:
                continue
            if original.grad is None:
                assign_gradient(original, part)
            else:
                original.grad.add_(part)
            if original._post_accumulate_grad_hooks:
                call_hooks(original)

    def reduced_gradient(self) -> tuple[torch.Tensor, list[bool]]:
        """Each parameter's part of the reduced gradient, in its place in the piece."""
        dtype = next((p.grad.dtype for p in self.originals if p.grad is not None), self.shard.dtype)
        piece = torch.zeros_like(self.shard, dtype=dtype)
        for original, part in zip(self.originals, self._own_views(piece), strict=True):
            if original.grad is not None:
                part.copy_(original.grad)
        return piece, [original.grad is not None for original in self.originals]

    def overwrite_gradient(self, piece: torch.Tensor, present: list[bool]) -> None:
        """Each parameter's part of ``piece``, copied out of the row it is a slice of."""
        for original, part, is_there in zip(self.originals, self._own_views(piece.clone()), present, strict=True):
            original.grad = None
            if is_there and part.numel():
                assign_gradient(original, part)

    def keep_unreduced(self, gradient: torch.Tensor) -> None:
        """Adds an unsharded gradient to the unreduced ones; reduced ones that are there already are put aside."""
        before = self.take_unreduced()
        if before is not None:
            gradient = before.add_(gradient)
        self._reduced_before = [original.grad for original in self.originals]
        self._unreduced, self._version = gradient, gradient._version
        for original, part in zip(self.originals, self.partition.views(gradient, self.shapes), strict=True):
            original.grad = None
            if original.requires_grad:
                assign_gradient(original, part)
        optimizer_watch.note_unreduced(self)

    def take_unreduced(self) -> torch.Tensor | None:
        """Removes the unreduced gradients and puts the reduced ones, if any, back in their places."""
        unreduced, self._unreduced = self._unreduced, None
        if unreduced is None:
            return None
        any_left, is_edited = False, unreduced._version != self._version
        for original, before, part in zip(
            self.originals, self._reduced_before, self.partition.views(unreduced, self.shapes), strict=True
        ):
            if original.grad is None:
                # zero_grad(), of all or of this one: it was meant for the whole gradient.
                part.zero_()
                continue
            any_left = True
            original.grad = None
            if before is not None:
                if is_edited and not part.any():
                    # zero_grad(set_to_none=False): it found only what was in sight.
                    before.zero_()
                assign_gradient(original, before)
        self._reduced_before = []
        return unreduced if any_left else None


def _in_place_of(original: nn.Parameter, slots: Sequence[Slot]) -> nn.Parameter:
    """An ordinary parameter, registered where ``original`` was; it gets its slice later."""
    place = nn.Parameter(local_part(original.detach()), requires_grad=original.requires_grad)
    for slot in slots:
        slot.module._parameters[slot.name] = place
        slot.update_second_list(place)
    return place
