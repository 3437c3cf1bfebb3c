"""Do all ranks gather the same unit? Asked before the first gather of each unit.

Collectives pair up by the order of their issue, not by name. If rank 0 gathers unit ``a`` while rank 1 gathers ``b``,
then with units of equal size each gets the other's weights, in silence; with units of different size one of them hangs
or dies of a message about sizes. Both come from control flow that depends on the rank: a tower that runs only when the
batch has an image, an expert that got no tokens.

So before a unit is gathered for the first time, every rank says which one it means, by its number in the tree::

    rank 0: 2    rank 1: 2        fine, never asked again
    rank 0: 2    rank 1: 3        RuntimeError on both, with the names and with what was gathered before

One small collective and one wait for each unit, once. With ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, or while `always` is
set, it is asked for every gather, which finds an order that changes later at once, at a price that only debugging pays;
without it that is found at the end of the backward (``comparison.py``).

What it cannot find is a rank that does not gather at all: the others then wait for it. Waiting in vain is noticed by
another thread (``minifsdp/ledger``).

*In torch:* FSDP1 has the check in ``_exec_order_utils.py``, for debugging only; FSDP2 has none.

Spec: NEW-19.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.utils._python_dispatch import _disable_current_modes

from minifsdp.engine import collectives
from minifsdp.engine.mesh import Group
from minifsdp.engine.messages import message
from minifsdp.engine.unit import Unit

# Whether every gather is asked for, in all trees and from now on; for debugging, equal on all ranks.
always = False


class OrderCheck:
    """Compares what the ranks are about to gather.

    Args:
        units: all units of the tree, in the same order on every rank.
        device: where the numbers travel.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._units, self._device = list(units), device
        self._always = dist.is_initialized() and get_debug_level() == DebugLevel.DETAIL
        self._agreed: dict[Unit, None] = {}

    def check(self, unit: Unit) -> None:
        """Called before ``unit`` is gathered for a forward. All ranks of its shard group must call it.

        Raises:
            RuntimeError: the ranks are about to gather different units.
        """
        if unit in self._agreed and not (self._always or always):
            return
        group = unit.plan.mesh.shard
        if group is not None:
            numbers = self._ask(group, self._units.index(unit))
            if len(set(numbers)) > 1:
                names = [f"rank {rank}: {self._name(n)}" for rank, n in zip(group.ranks, numbers, strict=True)]
                before = [earlier.name for earlier in self._agreed]
                raise RuntimeError(message("different-order", about_to=", ".join(names), before=before))
        self._agreed[unit] = None

    def _name(self, number: int) -> str:
        return repr(self._units[number].name) if number < len(self._units) else "a unit of another model"

    def _ask(self, group: Group, number: int) -> list[int]:
        """What each rank of ``group`` says."""
        # Not a part of training: who counts collectives, or only pretends to have memory, does not see it. Where a
        # group only pretends to communicate, everybody says the same.
        with _disable_current_modes():
            numbers = torch.full((group.size,), number, device=self._device)
            collectives.ask(group, numbers, torch.tensor([number], device=self._device)).wait()
            answers: list[int] = numbers.tolist()
        return answers
