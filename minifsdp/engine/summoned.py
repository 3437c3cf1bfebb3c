"""The full parameters that modules show for the time of ``summon_full_params``.

While a unit is summoned its modules show ordinary parameters. Each is a view of one long row, so that what the user
writes in place is in the row at once, and the way back is to cut the row. But users may also *replace*:
``p.data = ...`` gives a parameter memory of its own. That is noticed by its address, and copied into the row before it
is cut.

Worked example, a row ``w w w w b b``::

    weight.mul_(2)          the row has it
    bias.data = zeros(2)    bias is elsewhere now; `collect` copies the zeros to the end of the row

*In torch:* ``_writeback_orig_params``.

Spec: SUMMON-05 to SUMMON-09.
"""

from __future__ import annotations

import torch
from torch import nn

from minifsdp.engine.partition import local_part


class Summoned:
    """The full parameters of a summoned unit.

    Args:
        row: the full values.
        views: the parameters in it, in their shapes.
        gradients: the full gradients in a row like that, and which parameters have one; ``None`` to show none.

    Attributes:
        parameters: what modules show, one for each view.
    """

    def __init__(
        self, row: torch.Tensor, views: list[torch.Tensor], gradients: tuple[torch.Tensor, list[bool]] | None
    ) -> None:
        self.row, self.views, self.gradients = row, views, gradients
        self.parameters: list[nn.Parameter] = []
        self._gradient_views: list[torch.Tensor] = []

    def show_gradients(self, views: list[torch.Tensor], present: list[bool]) -> None:
        """Puts ``views`` into the ``.grad`` of those parameters that have one."""
        self._gradient_views = views
        for parameter, view, is_there in zip(self.parameters, views, present, strict=True):
            parameter.grad = view if is_there else None

    def collect(self) -> None:
        """Brings into the rows what was put in other memory, and notes which gradients there are by now."""
        for view, parameter in zip(self.views, self.parameters, strict=True):
            _fetch(view, parameter.data)
        if self.gradients is None:
            return
        for view, parameter in zip(self._gradient_views, self.parameters, strict=True):
            if parameter.grad is not None:
                _fetch(view, parameter.grad)
        self.gradients = self.gradients[0], [parameter.grad is not None for parameter in self.parameters]


def _fetch(view: torch.Tensor, value: torch.Tensor) -> None:
    place, value = local_part(view), local_part(value)
    if place.data_ptr() != value.data_ptr():
        place.copy_(value)
