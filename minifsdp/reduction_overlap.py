"""Trade-off between time and memory: whether a unit's gradient is reduced while the next unit's backward runs.

By default, a unit's reduction overlaps with the backward of the next unit. This hides the reduction but costs memory:
the packed gradient and the buffer for its sum exist while another gradient is computed. Worked example, backward of
units of 4 MB on two ranks, in MB::

    unsharded, and prefetched        4 + 4
    the gradient being computed      4
    the gradient being reduced       4 + 2      only with overlap

To save memory, disable overlap. With FSDP1, also set ``backward_prefetch=None``, which saves the memory of the
prefetched unit. For a flat unit with several parameters, disabling overlap does not lower the peak. The unit
concatenates the gradients of its parameters after the previous gradient is reduced to its shard, and this needs as much
memory. If shards are stored with more bits than the reduction uses, the peak is slightly higher.

*In torch:* no such option. On a CPU, torch waits for each reduction immediately, and the reduction makes extra copies.

Spec: NEW-24.
"""

from torch import nn

from minifsdp.engine.messages import message
from minifsdp.fsdp1.wrapper import Wrapper
from minifsdp.fsdp2.fsdp_state import states_in

__all__ = ["set_reduction_overlap"]


def set_reduction_overlap(module: nn.Module, overlaps: bool) -> None:
    """Sets whether reductions overlap with the next unit's backward, for all units in ``module``.

    Every rank must pass the same value. It does not change the gradients.

    Args:
        module: a sharded module, or a module that contains sharded modules.
        overlaps: ``False`` for the least memory; ``True``, the default of every unit, for the least time.

    Raises:
        ValueError: if there is no sharded module.
    """
    units = [wrapper._unit for wrapper in Wrapper.fsdp_modules(module)] + [
        state.unit for _, state in states_in(module)
    ]
    if not units:
        raise ValueError(message("nothing-sharded", type=type(module).__name__))
    for unit in units:
        for plan in unit.plans if unit is not None else ():
            plan.overlaps = overlaps
