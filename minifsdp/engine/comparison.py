"""Have all ranks sent the same? Asked at the end of each backward.

Collectives pair up by the order of their issue, not by name. Two ranks that run two equal units in different order
train on with each other's weights; if each has used another expert of a layer, the gradients of one are added to those
of the other. The loss goes down all the same, and nothing says a word.

So the ranks compare the chains of their ledgers (``ledger.py``): how many collectives they have issued in each group
since the last comparison, and a hash of which, in which order::

    rank 0: 9, 5f1d...    rank 1: 9, 5f1d...        fine
    rank 0: 9, 5f1d...    rank 1: 9, 90ab...        RuntimeError on both, with the first place where they part

1. *What it costs*: one collective of 24 bytes a rank for each group and backward. It is issued before the last
   reduction is waited for, and takes next to no time.
2. *What it finds*: another order of gathers, gradients of parameters that only some ranks have used, a ``no_sync()``
   on some ranks: whatever is issued, or left out on purpose, in another place or for another unit.
3. *Who raises*: all ranks. Where there are replicas, the answer of the shard group goes along with the question to the
   replicas, so a rank hears of it whose own two groups agree.
4. *When*: on a CPU before backward returns, so that no optimizer steps. An accelerator computes later, and to wait for
   the answer would stop the CPU. There it is read when the next forward begins, if it has come, at the latest when the
   next question is asked; the error says how many steps were taken by then, mostly one. Who saves stops the CPU
   anyway, so it is read before any state dict, and at the end of the program: nothing wrong is saved without a word.

A rank that sends *less* than the others lets them wait, and the question with them. That is noticed by another thread
(``minifsdp/ledger``).

*In torch:* nothing.

Spec: ORDER-01 to ORDER-09, ORDER-12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from minifsdp.engine import collectives, ledger
from minifsdp.engine.lanes import Lanes
from minifsdp.engine.ledger import Collective
from minifsdp.engine.messages import message
from minifsdp.engine.unit import Unit

# With an answer of an accelerator that is not read yet; of all trees, also of those that are gone.
_unread: list[Comparison] = []


def read_all(*_: Any) -> None:
    """Called before anything is saved, and when the program ends: reads all answers that are still on their way.

    Raises:
        RuntimeError: in some tree the ranks have not sent the same.
    """
    while _unread:
        _unread[0].read_now()


class Comparison:
    """Compares what the ranks of a tree have sent.

    Args:
        units: all units of the tree, in the same order on every rank.
        lanes: of the tree.
    """

    def __init__(self, units: Sequence[Unit], lanes: Lanes) -> None:
        self._lanes = lanes
        meshes = [plan.mesh for unit in units for plan in unit.plans]
        groups = [mesh.shard for mesh in meshes] + [mesh.replicate for mesh in meshes]
        self._groups = {group.chain: group for group in groups if group is not None}
        self._numbers: list[int] = []
        # What was asked and not read yet; the answers of the last group; an accelerator's event behind their copy.
        self._asked: list[Collective] = []
        self._answers = torch.empty(0)
        self._arrived: Any = None
        # How many steps optimizers had taken when it was asked.
        self._num_steps = 0

    def begin_backward(self) -> None:
        """A backward begins; what it sends is compared at its end."""
        self._numbers = [chain.number for chain in self._groups]

    def ask(self) -> None:
        """Called at the end of a backward: issues the question. All ranks of the tree must call it.

        A backward that has sent nothing, of a frozen model, is one in which other ranks need not take part.
        """
        if all(chain.number == before for chain, before in zip(self._groups, self._numbers, strict=True)):
            return
        self.read_now()
        self._num_steps = ledger.num_steps
        with _disable_current_modes(), self._lanes.gather as lane:
            for chain, group in self._groups.items():
                # Filled by kernels, one number after the other: a copy of all from the CPU would stop it.
                mine = torch.full((3,), chain.digest, device=self._lanes.device)
                mine[1], mine[2] = chain.number, 0
                if self._asked:
                    # Those who only ask the next group learn from it what the last one has answered.
                    self._asked[-1].wait()
                    mine[2] = _differ(self._answers)
                answers = mine.repeat(group.size)
                self._asked.append(collectives.ask(group, answers, mine))
                self._answers = answers.view(group.size, 3)
                chain.begin_epoch()
            if lane.stream is not None:
                self._asked[-1].wait()
                self._answers = self._answers.to("cpu", non_blocking=True)
                # For the watcher, too: who reads waits for it.
                self._arrived = ledger.on_its_way = lane.stream.record_event()
                _unread.append(self)

    def read(self) -> None:
        """Called at the end of a backward, when its last reduction was waited for. On an accelerator nothing happens.

        Raises:
            RuntimeError: the ranks have not sent the same.
        """
        if self._arrived is None:
            self.read_now()

    def begin_forward(self) -> None:
        """An iteration begins; reads an answer of an accelerator, if it has come.

        Raises:
            RuntimeError: the ranks have not sent the same in the iteration before.
        """
        ledger.iteration += 1
        if self._arrived is not None and self._arrived.query():
            self.read_now()

    def read_now(self) -> None:
        """Reads the answer, for which the CPU waits if it has not come.

        Raises:
            RuntimeError: the ranks have not sent the same.
        """
        asked, self._asked = self._asked, []
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            _unread.remove(self)
            arrived.synchronize()
        for question in asked[-1:]:
            question.wait()
        if asked and _differ(self._answers):
            report = "".join(ledger.explained(question.chain, question.epoch) for question in asked)
            number = ledger.num_steps - self._num_steps
            when = ("no step was taken", "one step was taken since", f"{number} steps were taken since")[min(number, 2)]
            raise RuntimeError(message("order-differs", when=when, report=report))


def _differ(answers: torch.Tensor) -> torch.Tensor:
    """Whether the lines of all ranks, ``digest, number, others differ``, tell of a difference."""
    return (answers[:, :2] != answers[0, :2]).any() | answers[:, 2].any()
