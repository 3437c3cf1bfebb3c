"""The unsharded parameters inside ``summon_full_params``.

They are all-gathered into a *flat tensor* of their own, in the stored dtype. While a unit is summoned, its modules have
ordinary parameters, which are views of this tensor. So an in-place change is a change of the flat tensor, and at the
end each rank copies its shard out of it. But users may also *replace* values: ``p.data = ...`` gives a parameter memory
of its own. Then its address differs, and its values are copied into the flat tensor first.

Worked example, a flat tensor ``w w w w b b``::

    weight.mul_(2)          changes the flat tensor
    bias.data = zeros(2)    bias has other memory now; `_collect` copies the zeros to the end of the flat tensor

*In torch:* ``_unshard_params`` and ``_writeback_orig_params``.

Spec: SUMMON-05 to SUMMON-09.
"""

from collections.abc import Sequence

import torch

from minifsdp.engine import collectives
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.layout import replaced_parameter_error
from minifsdp.engine.partition import local_part

# The unsharded gradients in one flat tensor, and for each parameter whether it has a gradient.
Gradients = tuple[torch.Tensor, list[bool]]


def full_row(layout: FlatLayout, local_shard: torch.Tensor | None = None) -> torch.Tensor:
    """The unsharded flat tensor in the stored dtype; the shard itself if nothing is sharded.

    All ranks of the shard group must call it, because it issues an all-gather.

    Args:
        layout: the unit's layout.
        local_shard: another tensor of the shard's size to all-gather; ``None`` for the shard.
    """
    local_shard, group = layout.local_values().data if local_shard is None else local_shard, layout.mesh.shard
    if group is None:
        return local_shard
    row = torch.empty(layout.partition.padded_numel, dtype=local_shard.dtype, device=layout.device)
    collectives.all_gather(group, row, local_shard.to(layout.device)).wait()
    return row


def full_gradient_row(layout: FlatLayout) -> Gradients:
    """The unsharded reduced gradients, and for each parameter whether any rank has a gradient.

    All ranks of the shard group must call it.
    """
    local_shard, present = layout.owner.reduced_gradient()
    row, group = full_row(layout, local_shard), layout.mesh.shard
    if group is None:
        return row, present
    votes = torch.tensor(present, dtype=torch.int32, device=layout.device)
    collectives.all_reduce(group, votes).wait()
    return row, [vote > 0 for vote in votes.tolist()]


class Summoned:
    """Registers ordinary unsharded parameters on the modules of a unit, until `hide` is called.

    Args:
        layout: the unit's layout.
        row: the unsharded flat tensor.
        gradients: for ``.grad`` of the parameters; ``None`` for no gradients.
    """

    def __init__(self, layout: FlatLayout, row: torch.Tensor, gradients: Gradients | None) -> None:
        self._layout, self._row, self._gradients = layout, row, gradients
        self._parameters = layout.owner.use_full_params(layout.views_of(row))
        if gradients is not None:
            for parameter, view, is_there in zip(
                self._parameters, layout.views_of(gradients[0]), gradients[1], strict=True
            ):
                parameter.grad = view if is_there else None
        layout.use_summoned_params(self._parameters)

    def hide(self, *, keep_changes: bool) -> None:
        """Restores the attributes of the modules. If ``keep_changes``, writes this rank's changes to the shard.

        Raises:
            RuntimeError: a module has another parameter than the one that was registered.
        """
        layout = self._layout
        exchanged = layout.hide_summoned(self._parameters)
        local_shard = layout.partition.local_shard(layout.mesh.shard_index)
        gradients = [parameter.grad for parameter in self._parameters]
        if keep_changes:
            self._collect(self._row, [parameter.data for parameter in self._parameters])
            if layout.mesh.shard is not None:
                layout.owner.overwrite(self._row[local_shard])
            # Otherwise `_row` is the shard itself. A copy in another dtype may exist from an earlier all-gather.
            layout.forget_gather()
        layout.owner.hide_full()
        if keep_changes and self._gradients is not None:
            self._collect(self._gradients[0], gradients)
            layout.owner.overwrite_gradient(self._gradients[0][local_shard], [one is not None for one in gradients])
        if exchanged:
            raise replaced_parameter_error(exchanged[0], layout.name)

    def _collect(self, row: torch.Tensor, values: Sequence[torch.Tensor | None]) -> None:
        """Copies values that have other memory into the flat tensor ``row``."""
        for view, value in zip(self._layout.views_of(row), values, strict=True):
            if value is None:
                continue
            place, found = local_part(view), local_part(value)
            if place.data_ptr() != found.data_ptr():
                place.copy_(found)
