"""The original parameters of a flat unit as views of its shard (``use_orig_params=True``).

The memory layout is the flat one, but the flat tensor is not registered as a parameter. The ``nn.Parameter`` objects
that the user created stay registered under their names. Between computations each of them is a 1-D view of its elements
in this rank's shard: all, some or none of them. So an optimizer can treat biases and weights differently, and
``named_parameters()`` yields the original names.

Worked example, ``weight`` of shape (2, 3) and ``bias`` of shape (3), two ranks::

    rank 0    weight: 5 elements     bias: 0 elements
    rank 1    weight: 1 element      bias: 3 elements, and one element of padding after them

The parameters are views of the shard, so an optimizer step writes to the shard without a copy. But the user can also
give a parameter other memory: ``p.data = ...``, or ``model.to_empty()``. Then its address differs. The values are
copied into the shard before the shard is next read, all-gathered or written.

Frozen and trained parameters may share a unit. All of them take part in the all-gather and in the reduce-scatter. The
gradient of a frozen parameter is reduced, but then discarded.

*In torch:* ``_use_sharded_views``, ``_use_sharded_grad_views`` and ``_writeback_orig_params`` of ``FlatParamHandle``.

Spec: ORIG-02 to ORIG-05, ORIG-08 to ORIG-10, ORIG-13, ORIG-17, NOSYNC-05, STREAM-05.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from minifsdp.engine import validation
from minifsdp.engine.layout import ParamInfo
from minifsdp.engine.messages import message, warn
from minifsdp.engine.ownership import Ownership, frozen_among_trained
from minifsdp.engine.partition import Partition, local_part


class OriginalOwnership(Ownership):
    """The original parameters as views of the shard.

    Args:
        parameters: the original parameters; they stay registered. A ``DTensor`` cannot be a 1-D view of the shard, so
            an ordinary parameter replaces it.
        shard: 1-D, this rank's shard.
        partition: how the flat tensor is sharded.
        index: the index of this rank's shard.
        keep_reduce_dtype: whether a reduced gradient may have another dtype than the shard.
    """

    hides_originals = False

    def __init__(
        self,
        parameters: Mapping[nn.Parameter, ParamInfo],
        shard: torch.Tensor,
        partition: Partition,
        index: int,
        keep_reduce_dtype: bool,
    ) -> None:
        self.shard, self.partition, self.keep_reduce_dtype = shard, partition, keep_reduce_dtype
        self.shapes = [local_part(original).shape for original in parameters]
        self._paths = [owned.path for owned in parameters.values()]
        # Where each parameter lies in this rank's shard.
        self._slices = partition.slices_of_local_shard(index)
        self._mine = self.parts(shard)
        self.parameters = []
        for original, owned in parameters.items():
            is_replaced = isinstance(original, DTensor)
            self.parameters.append(_in_place_of(original) if is_replaced else original)
            validation.note_taken(original, owned.path, is_replaced=is_replaced)
            for slot in owned.attributes:
                validation.note_place(slot.module, slot.name, None)
        self.placeholders = self.parameters
        frozen = frozen_among_trained(parameters)
        if frozen:
            warn(message("frozen-among-trained", frozen=frozen))
        self._gradients_before = [parameter.grad for parameter in self.parameters]
        self.hide_full()

    # --- registered parameters ---

    def use_full_params(self, views: Sequence[torch.Tensor]) -> list[nn.Parameter]:
        """The original parameters with ``views`` as their data; new ones for a ``DTensor``. Removes their gradients."""
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
        """Makes the originals views of the shard again, and restores the gradients that `use_full_params` removed."""
        for original, mine in zip(self.parameters, self._mine, strict=True):
            original.data = mine
        gradients, self._gradients_before = self._gradients_before, []
        self.assign(gradients)

    def parts(self, local_shard: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of ``local_shard``: 1-D, or in the original shape if the unit is not sharded."""
        if self.partition.num_shards == 1:
            return [local_shard[part].view(shape) for part, shape in zip(self._slices, self.shapes, strict=True)]
        return [local_shard[part] for part in self._slices]

    def whole_parts(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter in the unsharded tensor ``row``, in its original shape."""
        return self.partition.views(row, self.shapes)

    # --- values ---

    def collect(self) -> bool:
        """Copies parameters that have other memory now into the shard, and makes them views again. Returns if any had.

        Raises:
            RuntimeError: the new tensor has another number of elements.
        """
        has_copied = False
        for path, original, mine in zip(self._paths, self.parameters, self._mine, strict=True):
            # Both are 0 for empty tensors.
            if original.data_ptr() == mine.data_ptr():
                continue
            found, expected = original.numel(), mine.numel()
            if found != expected:
                raise RuntimeError(message("wrong-size", parameter=path, found=found, expected=expected))
            mine.copy_(original.data.reshape(mine.shape))
            original.data = mine
            # The address is the old one again. Only the new version marks an unsharded copy as stale.
            torch.autograd.graph.increment_version(original)
            has_copied = True
        return has_copied

    def refresh_from_module(self) -> None:
        """Creates a new shard if the originals have another dtype or device now, and copies their values into it."""
        first = self.parameters[0]
        if first.dtype is not self.shard.dtype or first.device != self.shard.device:
            self.shard = torch.zeros_like(self.shard, device=first.device, dtype=first.dtype)
            self._mine = self.parts(self.shard)
            self.collect()


def _in_place_of(original: nn.Parameter) -> nn.Parameter:
    """An ordinary parameter that replaces a ``DTensor``. It becomes a view of the shard later."""
    return nn.Parameter(local_part(original.detach()), requires_grad=original.requires_grad)
