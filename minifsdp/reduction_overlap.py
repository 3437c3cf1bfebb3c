"""Time or memory: whether a unit's gradient is reduced while the next unit computes.

By default a unit's reduction is under way while the backward of the next unit runs. That hides it, and costs memory:
the packed gradient, and the place for its sum, lie there while another gradient is computed. Worked example, backward
of units of 4 MB on two ranks, in MB::

    gathered, and asked for ahead    4 + 4
    the gradient being computed      4
    the one being reduced            4 + 2      not there without overlap

Who lacks memory switches it off, and with FSDP1 asks for ``backward_prefetch=None`` as well, which saves the unit that
is gathered ahead. A flat unit of several parameters puts its gradient together from theirs, when the one before has
been reduced to a piece. That moment takes as much, so there nothing is saved at the peak; and if pieces are stored in
more bits than they travel in, there is a little more.

*In torch:* nothing; on a CPU each reduction is waited for on the spot, and takes copies of its own.

Spec: NEW-24.
"""

from torch import nn

from minifsdp.engine.messages import message
from minifsdp.fsdp1.wrapper import Wrapper
from minifsdp.fsdp2.fsdp_state import states_in

__all__ = ["set_reduction_overlap"]


def set_reduction_overlap(module: nn.Module, overlaps: bool) -> None:
    """Chooses whether reductions overlap with the next unit's backward, for all units in ``module``, from now on.

    Every rank must choose alike. The gradients are the same.

    Args:
        module: sharded, or with sharded modules inside.
        overlaps: ``False`` for the least memory; ``True``, the default of every unit, for the least time.

    Raises:
        ValueError: there is no sharded module.
    """
    units = [wrapper._unit for wrapper in Wrapper.fsdp_modules(module)] + [state.unit for _, state in states_in(module)]
    if not units:
        raise ValueError(message("nothing-sharded", type=type(module).__name__))
    for unit in units:
        for plan in unit.plans if unit is not None else ():
            plan.overlaps = overlaps
