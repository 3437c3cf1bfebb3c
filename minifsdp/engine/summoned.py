"""The full parameters that modules show for the time of ``summon_full_params``.

They are gathered into a *row* of their own, in the stored dtype. While a unit is summoned its modules show ordinary
parameters, views of that row, so that what the user writes in place is in the row at once, and the way back is to cut
the row. But users may also *replace*: ``p.data = ...`` gives a parameter memory of its own. That is noticed by its
address, and copied into the row before it is cut.

Worked example, a row ``w w w w b b``::

    weight.mul_(2)          the row has it
    bias.data = zeros(2)    bias is elsewhere now; `_collect` copies the zeros to the end of the row

*In torch:* ``_unshard_params`` and ``_writeback_orig_params``.

Spec: SUMMON-05 to SUMMON-09.
"""

from collections.abc import Sequence

import torch

from minifsdp.engine import collectives
from minifsdp.engine.flat import FlatLayout
from minifsdp.engine.layout import replaced_parameter_error
from minifsdp.engine.partition import local_part

# The full gradients in a row, and for each parameter whether there is one.
Gradients = tuple[torch.Tensor, list[bool]]


def full_row(layout: FlatLayout, piece: torch.Tensor | None = None) -> torch.Tensor:
    """The full values of all parameters in the stored dtype; the shard itself if nothing is sharded.

    All ranks of the shard group must call it: it is a gather of its own.

    Args:
        layout: the unit's.
        piece: this rank's piece of something else, like the shard; ``None`` for the shard.
    """
    piece, group = layout.local_values().data if piece is None else piece, layout.mesh.shard
    if group is None:
        return piece
    row = torch.empty(layout.partition.padded_numel, dtype=piece.dtype, device=layout.device)
    collectives.gather(group, row, piece.to(layout.device)).wait()
    return row


def full_gradient_row(layout: FlatLayout) -> Gradients:
    """The full reduced gradients, and for each parameter whether there is one on any rank.

    All ranks of the shard group must call it.
    """
    piece, present = layout.owner.reduced_gradient()
    row, group = full_row(layout, piece), layout.mesh.shard
    if group is None:
        return row, present
    votes = torch.tensor(present, dtype=torch.int32, device=layout.device)
    collectives.all_reduce(group, votes).wait()
    return row, [vote > 0 for vote in votes.tolist()]


class Summoned:
    """Ordinary parameters on the modules of a unit, from now until `hide`.

    Args:
        layout: the unit's.
        row: the full values.
        gradients: to be shown as well; ``None`` to show none.
    """

    def __init__(self, layout: FlatLayout, row: torch.Tensor, gradients: Gradients | None) -> None:
        self._layout, self._row, self._gradients = layout, row, gradients
        self._parameters = layout.owner.show_full(layout.views_of(row))
        if gradients is not None:
            for parameter, view, is_there in zip(
                self._parameters, layout.views_of(gradients[0]), gradients[1], strict=True
            ):
                parameter.grad = view if is_there else None
        layout.show_summoned(self._parameters)

    def hide(self, *, keep_changes: bool) -> None:
        """Puts back what the modules had before, and if wished this rank's part of the changes into the shard.

        Raises:
            RuntimeError: a module shows another parameter than the one it was given.
        """
        layout = self._layout
        exchanged = layout.hide_summoned(self._parameters)
        piece = layout.partition.piece(layout.mesh.shard_index)
        gradients = [parameter.grad for parameter in self._parameters]
        if keep_changes:
            self._collect(self._row, [parameter.data for parameter in self._parameters])
            if layout.mesh.shard is not None:
                layout.owner.overwrite(self._row[piece])
            # Else the row was the shard itself. A copy of it in another dtype may be there from an earlier gather.
            layout.forget_gather()
        layout.owner.hide_full()
        if keep_changes and self._gradients is not None:
            self._collect(self._gradients[0], gradients)
            layout.owner.overwrite_gradient(self._gradients[0][piece], [one is not None for one in gradients])
        if exchanged:
            raise replaced_parameter_error(exchanged[0], layout.name)

    def _collect(self, row: torch.Tensor, values: Sequence[torch.Tensor | None]) -> None:
        """Brings into a row what was put in other memory."""
        for view, value in zip(self._layout.views_of(row), values, strict=True):
            if value is None:
                continue
            place, found = local_part(view), local_part(value)
            if place.data_ptr() != found.data_ptr():
                place.copy_(found)
