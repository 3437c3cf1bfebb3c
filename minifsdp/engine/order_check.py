"""Checks before the first all-gather of each unit that all ranks all-gather the same unit.

Collectives pair up by the order of their issue, not by name. If rank 0 all-gathers unit ``a`` while rank 1 all-gathers
``b``, units of equal size get each other's weights without an error. Units of different sizes hang. The cause is
control flow that depends on the rank, for instance a tower that runs only if the batch has an image, or an expert
without tokens.

So before a unit is all-gathered for the first time, the ranks exchange its identity (``ledger.py``)::

    rank 0: a    rank 1: a        equal, never checked again
    rank 0: a    rank 1: b        RuntimeError on both, with the names and with the units before

The check is a small all-gather, once for each unit and group. Where a forward needs the unit, the rank waits for the
answer before it issues the all-gather. A prefetch or ``unshard()`` issues the all-gather without a wait, because the
program may first do something else on which other ranks depend. Then the answer is read when the unit is used.

With ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, or while `always` is set, every all-gather is checked. This detects a later
change of the order immediately, at a cost for debugging only. Otherwise the comparison at the end of the backward finds
it (``comparison.py``). A rank that does not all-gather at all makes the others wait. The watchdog detects that.

*In torch:* FSDP1 has the check in ``_exec_order_utils.py``, for debugging only; FSDP2 has none.

Spec: NEW-19, HEALTHY-01.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]
from torch.utils._python_dispatch import _disable_current_modes

from minifsdp.engine import collectives
from minifsdp.engine.ledger import Collective, UnitName
from minifsdp.engine.messages import message
from minifsdp.engine.unit import Unit

# Whether every all-gather is checked, for all roots; for debugging. Must be equal on all ranks.
always = False


class OrderCheck:
    """Compares the units that the ranks are about to all-gather.

    Args:
        units: all units of the root.
        device: the device of the numbers that are exchanged.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device) -> None:
        self._units, self._device = list(units), device
        self._always = dist.is_initialized() and get_debug_level() == DebugLevel.DETAIL
        self._asked: dict[Unit, tuple[Collective, torch.Tensor]] = {}
        self._before: dict[str, None] = {}

    def ask(self, unit: Unit) -> None:
        """Called before an all-gather of ``unit`` is issued. All ranks of its shard group must call it."""
        group = unit.plan.mesh.shard
        if group is None:
            return
        assert isinstance(unit.name, UnitName)
        identity = group.chain.identity_of(unit.name)
        if identity in group.chain.agreed and not (self._always or always):
            return
        group.chain.agreed.add(identity)
        # Not a part of training: dispatch modes that count collectives, and fake tensor modes, do not see it.
        with _disable_current_modes():
            answers = torch.full((group.size,), identity, device=self._device)
            question = collectives.ask(group, answers, torch.tensor([identity], device=self._device))
        self._asked[unit] = question, answers

    def read(self, unit: Unit) -> None:
        """Called before ``unit`` is used: waits for the answer to `ask`, if there was a question.

        Raises:
            RuntimeError: the ranks all-gather different units.
        """
        if not (self._always or always):
            unit.order_check = None
        if unit not in self._asked:
            return
        question, answers = self._asked.pop(unit)
        question.wait()
        with _disable_current_modes():
            identities: list[int] = answers.tolist()
        chain = question.chain
        if len(set(identities)) > 1:
            chain.forget()
            chain.agreed.discard(chain.identity_of(unit.name))
            unit.order_check = self
            names = {chain.identity_of(each.name): repr(each.name) for each in self._units}
            both = zip(chain.ranks, identities, strict=True)
            about_to = [f"rank {rank}: {names.get(number, 'another unit')}" for rank, number in both]
            raise RuntimeError(message("different-order", about_to=", ".join(about_to), before=[*self._before]))
        self._before[str(unit.name)] = None
