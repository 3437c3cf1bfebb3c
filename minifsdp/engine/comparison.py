"""Checks at the end of each backward that all ranks issued the same collectives.

Collectives pair up by the order of their issue, not by name. Two ranks that run two equal units in different order
train with each other's weights. If each rank uses another expert of a layer, the gradients of one expert are added to
those of another. The loss still decreases, and no error appears.

So the ranks compare the chains of the collective log (``ledger.py``): the number of collectives in each group since the
last comparison, and a hash of their order::

    rank 0: 9, 5f1d...    rank 1: 9, 5f1d...        equal
    rank 0: 9, 5f1d...    rank 1: 9, 90ab...        RuntimeError on both, with the first position that differs

1. *Cost*: one collective of 32 bytes for each rank, group and backward. It is issued before the wait for the last
   reduction and takes almost no time.
2. *Detected errors*: a different order of all-gathers, gradients of parameters that only some ranks used, and any
   other collective at another position or for another unit.
3. *Which groups*: those in which units of this root communicated during this backward. Other ranks may compute more
   backwards without communication, for instance through frozen parameters or in ``no_sync()``. These are not compared.
4. *Which ranks raise*: all. With replicas, the result of the shard group is part of the question to the replicate
   group, so a rank also raises if both of its own groups agree.
5. *When*: on a CPU before backward returns, so no optimizer steps. An accelerator computes later, and waiting for the
   answer would stop the CPU. So the answer is read at the end of the next backward, before a state dict is created, and
   when the program ends. These moments are the same on all ranks. The message says how many optimizer steps were taken
   in between, usually one.

6. *Only a warning*: optimizers that stepped since the last comparison on some ranks but not on others. That is a
   mistake if one rank uses ``no_sync()`` and the others do not, but a program may also intend it. It appears once.

A rank that issues fewer collectives makes the others wait. The watchdog detects that (``minifsdp/ledger``).

*In torch:* nothing.

Spec: ORDER-01 to ORDER-09, ORDER-12, HEALTHY-01.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from minifsdp.engine import collectives, ledger
from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.ledger import Collective, Tree
from minifsdp.engine.messages import message, warn
from minifsdp.engine.unit import Unit

# Comparisons whose answer on an accelerator was not read yet, of all roots, also of deleted ones.
_unread: list[Comparison] = []


def read_all(*_: Any) -> None:
    """Called before a state dict is created, and when the program ends: reads all answers.

    Raises:
        RuntimeError: the ranks issued different collectives for units of some root.
    """
    while _unread:
        _unread[0].read_now()


class Comparison:
    """Compares the collectives that all ranks issued for the units of one root.

    Args:
        units: all units of the root, in the same order on every rank.
        comm_streams: the communication streams of the root.
        tree: the units in the collective log.
    """

    def __init__(self, units: Sequence[Unit], comm_streams: CommStreams, tree: Tree) -> None:
        self._comm_streams, self._tree = comm_streams, tree
        meshes = [plan.mesh for unit in units for plan in unit.plans]
        groups = [mesh.shard for mesh in meshes] + [mesh.replicate for mesh in meshes]
        self._groups = {group.chain: group for group in groups if group is not None}
        # Questions without an answer yet; the answers of the last group; an accelerator's event after their copy.
        self._asked: list[Collective] = []
        self._answers = torch.empty(0)
        self._arrived: Any = None
        # Number of optimizer steps when the question was issued.
        self._num_steps, self._has_warned = 0, False

    def begin_backward(self) -> None:
        """Called when a backward begins."""
        self._tree.used.clear()

    def ask(self) -> None:
        """Called at the end of a backward: issues the question in each group that this backward used."""
        groups = [(chain, group) for chain, group in self._groups.items() if chain in self._tree.used]
        if not groups:
            return
        self.read_now()
        has_stepped, self._num_steps = ledger.num_steps != self._num_steps, ledger.num_steps
        with _disable_current_modes(), self._comm_streams.all_gather as comm_stream:
            for chain, group in groups:
                # Filled by kernels, one number after the other. A copy from the CPU would block the CPU.
                mine = torch.full((4,), chain.digest, device=self._comm_streams.device)
                mine[1], mine[2], mine[3] = chain.number, 0, has_stepped
                if self._asked:
                    # The question to the next group contains whether the last group differs.
                    self._asked[-1].wait()
                    mine[2] = _differ(self._answers)
                answers = mine.repeat(group.size)
                self._asked.append(collectives.ask(group, answers, mine))
                self._answers = answers.view(group.size, 4)
                chain.begin_epoch()
            if comm_stream.stream is not None:
                self._asked[-1].wait()
                self._answers = self._answers.to("cpu", non_blocking=True)
                self._arrived = ledger.on_its_way = comm_stream.stream.record_event()
                _unread.append(self)

    def read(self) -> None:
        """Called at the end of a backward, after the wait for its last reduction. Does nothing on an accelerator.

        Raises:
            RuntimeError: the ranks issued different collectives.
        """
        if self._arrived is None:
            self.read_now()

    def read_now(self) -> None:
        """Reads the answer. The CPU waits for it if it has not arrived.

        Raises:
            RuntimeError: the ranks issued different collectives.
        """
        asked, self._asked = self._asked, []
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            _unread.remove(self)
            arrived.synchronize()
        for question in asked[-1:]:
            question.wait()
        if not asked or not _differ(self._answers):
            self._warn_of_uneven_steps(asked)
            return
        report = "".join(ledger.explained((question.chain, question.epoch, 0)) for question in asked)
        for question in asked:
            question.chain.forget()
        number = ledger.num_steps - self._num_steps
        when = ("no step was taken", "one step was taken since", f"{number} steps were taken since")[min(number, 2)]
        raise RuntimeError(message("order-differs", when=when, report=report))

    def _warn_of_uneven_steps(self, asked: Sequence[Collective]) -> None:
        have_stepped = self._answers[:, 3].tolist() if asked and not self._has_warned else []
        if len(set(have_stepped)) > 1:
            self._has_warned = True
            ranks = [rank for rank, stepped in zip(asked[-1].chain.ranks, have_stepped, strict=True) if stepped]
            warn(message("uneven-steps", ranks=ranks))


def _differ(answers: torch.Tensor) -> torch.Tensor:
    """Whether the rows ``digest, number, others differ, steps`` of all ranks contain a difference."""
    return (answers[:, :2] != answers[0, :2]).any() | answers[:, 2].any()
