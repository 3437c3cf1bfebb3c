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

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp.engine import misuse
from minifsdp.engine.layout import OwnedParameter
from minifsdp.engine.messages import message, warn
from minifsdp.engine.ownership import Ownership, frozen_among_trained
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
        self._paths = [owned.path for owned in parameters.values()]
        # Where each slice lies in this rank's piece.
        self._slices = partition.slices_of_piece(index)
        self._mine = self.parts(shard)
        self.parameters = []
        for original, owned in parameters.items():
            is_replaced = isinstance(original, DTensor)
            self.parameters.append(_in_place_of(original) if is_replaced else original)
            misuse.note_taken(original, owned.path, is_replaced=is_replaced)
            for slot in owned.slots:
                misuse.note_place(slot.module, slot.name, None)
        self.stand_ins = self.parameters
        frozen = frozen_among_trained(parameters)
        if frozen:
            warn(message("frozen-among-trained", frozen=frozen))
        self._gradients_before = [parameter.grad for parameter in self.parameters]
        self.hide_full()

    # --- what is visible ---

    def show_full(self, views: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        """The originals themselves, showing ``views``, where they can; their gradients are put aside."""
        self._gradients_before = [p.grad for p in self.parameters]
        shown = []
        for original, view in zip(self.parameters, views, strict=True):
            original.grad = None
            if isinstance(view, DTensor):
                shown.append(nn.Parameter(view, requires_grad=original.requires_grad))
            else:
                original.data = view
                shown.append(original)
        return shown

    def hide_full(self) -> None:
        """The originals show their slices of the shard, and the gradients that `show_full` has put aside."""
        for original, mine in zip(self.parameters, self._mine, strict=True):
            original.data = mine
        gradients, self._gradients_before = self._gradients_before, []
        self.assign(gradients)

    def parts(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's slice, in its own shape where no rank has another part of it."""
        if self.partition.num_shards == 1:
            return [piece[part].view(shape) for part, shape in zip(self._slices, self.shapes, strict=True)]
        return [piece[part] for part in self._slices]

    def whole_parts(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter in the row, in its own shape."""
        return self.partition.views(row, self.shapes)

    # --- values ---

    def collect(self) -> bool:
        """Copies into the shard what the user has given other memory, and makes it a slice again; whether any was.

        Raises:
            RuntimeError: the new tensor has another number of elements.
        """
        has_copied = False
        for path, original, mine in zip(self._paths, self.parameters, self._mine, strict=True):
            # Of empty tensors both are 0.
            if original.data_ptr() == mine.data_ptr():
                continue
            found, expected = original.numel(), mine.numel()
            if found != expected:
                raise RuntimeError(message("wrong-size", parameter=path, found=found, expected=expected))
            mine.copy_(original.data.reshape(mine.shape))
            original.data = mine
            # The address is the old one again; without this a unit that is kept would not be stale.
            torch.autograd.graph.increment_version(original)
            has_copied = True
        return has_copied

    def settle(self) -> None:
        """A new shard of the dtype and device that the originals have now; their values are collected into it."""
        first = self.parameters[0]
        if first.dtype is not self.shard.dtype or first.device != self.shard.device:
            self.shard = torch.zeros_like(self.shard, device=first.device, dtype=first.dtype)
            self._mine = self.parts(self.shard)
            self.collect()


def _in_place_of(original: nn.Parameter) -> nn.Parameter:
    """An ordinary parameter; it gets its slice later."""
    return nn.Parameter(local_part(original.detach()), requires_grad=original.requires_grad)
