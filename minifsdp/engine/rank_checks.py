"""Checks that all ranks issue the same collectives.

Collectives pair up by the order of their issue, not by name. If two ranks run two equal units in different order, each
unit gets the weights of the other unit. If each rank uses another expert of a layer, the gradients of different experts
are added up. The loss still decreases, and no error appears. With units of different sizes, the job hangs. The cause is
control flow that depends on the rank.

`RankChecks` has two checks. The runtime calls the first check before a unit is all-gathered for the first time, and the
second check at the end of each backward. (A third check, of sizes between CPUs, is in ``gloo.py``.)

*Before the first all-gather of a unit*, the ranks exchange its identity (``collective_log.py``)::

    rank 0: a    rank 1: a        equal, never checked again
    rank 0: a    rank 1: b        RuntimeError on both, with the names and the previous units

The identity includes the shapes, dtypes and ``requires_grad`` of the parameters, the precision, and the division of
gradients. Only after a difference, the ranks exchange these facts as text, and the error contains the first difference.
Two equal units are distinguished by the order of their construction.

This costs a small all-gather, once for each unit and group. Where a forward needs the unit, the rank waits for the
answer before it issues the all-gather. A prefetch or ``unshard()`` issues the all-gather without a wait, because other
ranks may depend on something that the program does first. Then the rank reads the answer when the unit is used. With
``TORCH_DISTRIBUTED_DEBUG=DETAIL``, or while `RankChecks.always` is set, every all-gather is checked. This is slow, and
only for debugging.

*At the end of each backward*, the ranks compare their collective logs: the number of collectives in each group since
the last comparison, and a hash of their order::

    rank 0: 9, 5f1d...    rank 1: 9, 5f1d...        equal
    rank 0: 9, 5f1d...    rank 1: 9, 90ab...        RuntimeError on both, with the first position that differs

1. *Cost*: one collective of 32 bytes for each rank, group and backward. It is issued before the wait for the last
   reduction, and takes almost no time.
2. *Detected errors*: a different order of all-gathers, gradients of parameters that only some ranks used, and any
   other collective at another position or for another unit.
3. *Which groups*: the groups in which units of this root communicated during this backward. Other ranks may compute
   more backwards without communication, for example through frozen parameters or in ``no_sync()``. These are not
   compared.
4. *Which ranks raise*: all. With replicas, the question to the replicate group contains the result of the shard group,
   so a rank raises the error even if both of its own groups agree.
5. *When*: on a CPU before backward returns, so no optimizer steps. An accelerator computes later, and waiting for the
   answer would stop the CPU. So the answer is read at the end of the next backward, before a state dict is created, and
   when the program ends. These moments are the same on all ranks. The message contains the number of optimizer steps in
   between, usually one.
6. *Only a warning*: some ranks have stepped an optimizer of this root since the last comparison, and others have not.
   This is a mistake if one rank uses ``no_sync()`` and the others do not, but a program may also intend it. It appears
   once.

A rank that issues fewer collectives makes the other ranks wait. The watchdog detects this case (``minifsdp/watchdog``).

*In torch:* FSDP1 has the first check in ``_exec_order_utils.py``, for debugging only; FSDP2 has none.

Spec: NEW-19, ORDER-01 to ORDER-09, ORDER-12, ORDER-13, HEALTHY-01, AGREE-01 to AGREE-05.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import zip_longest
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import DebugLevel, get_debug_level
from torch.utils._python_dispatch import _disable_current_modes

from minifsdp.engine import collectives
from minifsdp.engine.collective_log import CollectiveSequence, RootId, log
from minifsdp.engine.comm_streams import CommStreams
from minifsdp.engine.mesh import Group, MeshGroups
from minifsdp.engine.messages import message, warn

# A question about a unit, and the answers of all ranks.
_Question = tuple[collectives.Collective, torch.Tensor]


class RankChecks:
    """The checks of one root.

    Args:
        meshes: the shard groups and replicate groups of these units, in the same order on every rank.
        comm_streams: the communication streams of the root.
        root_id: the units in the collective log.

    Attributes:
        always: whether every all-gather is checked, for all roots; for debugging. Must be equal on all ranks.
        unread: checks of all roots, including deleted roots, whose answer on an accelerator is not read yet.
    """

    always: ClassVar[bool] = False
    unread: ClassVar[list[RankChecks]] = []

    def __init__(self, meshes: Sequence[MeshGroups], comm_streams: CommStreams, root_id: RootId) -> None:
        self._comm_streams, self._root_id = comm_streams, root_id
        groups = [mesh.shard for mesh in meshes] + [mesh.replicate for mesh in meshes]
        self._groups = {group.sequence: group for group in groups if group is not None}
        self._is_detailed = dist.is_initialized() and get_debug_level() == DebugLevel.DETAIL
        # Before an all-gather: the questions without an answer yet, and the units that all ranks have all-gathered.
        self._pending: dict[str, _Question] = {}
        self._all_gathered: dict[str, None] = {}
        # At the end of a backward: the questions, the answers of the last group, and an accelerator's event after them.
        self._asked: list[collectives.Collective] = []
        self._answers: Any = None
        self._arrived: Any = None
        # Number of steps of all optimizers, and of those of this root, when the questions were issued.
        self._num_steps = self._num_own_steps = 0
        self._has_warned = False

    # --- before an all-gather ---

    def before_all_gather(self, unit: Any, group: Group | None) -> None:
        """Called before an all-gather of ``unit`` is issued. All ranks of its shard group must call it."""
        if group is None:
            return
        if group.sequence.identity_of(unit) not in group.sequence.agreed or self._is_detailed or self.always:
            self._pending[unit] = _ask(unit, group, self._comm_streams.device)

    def before_use(self, unit: str) -> bool:
        """Called before ``unit`` is used: waits for the answer to the question of `before_all_gather`, if any.

        Returns:
            Whether all ranks agree on this unit, so that no further check is needed.

        Raises:
            RuntimeError: if the ranks all-gather different units.
        """
        if unit in self._pending:
            _read(unit, self._pending.pop(unit), [*self._all_gathered])
            self._all_gathered[str(unit)] = None
        return not (self._is_detailed or self.always)

    # --- at the end of a backward ---

    def begin_backward(self) -> None:
        """Called when a backward begins."""
        self._root_id.used.clear()

    def compare(self, num_steps: int) -> None:
        """Called at the end of a backward: issues the question in each group that this backward used.

        Args:
            num_steps: number of steps of optimizers that hold parameters of this root.
        """
        groups = [(sequence, group) for sequence, group in self._groups.items() if sequence in self._root_id.used]
        if not groups:
            return
        if self._asked:
            self.read_now()
        has_stepped, self._num_own_steps, self._num_steps = num_steps != self._num_own_steps, num_steps, log.num_steps
        with _disable_current_modes(), self._comm_streams.all_gather as comm_stream:
            for sequence, group in groups:
                # Kernels fill this tensor, one number after the other. A copy from the CPU would block the CPU.
                mine = torch.full((4,), sequence.digest, dtype=torch.int64, device=self._comm_streams.device)
                mine[1], mine[2], mine[3] = sequence.number, 0, has_stepped
                if self._asked:
                    # The question to the next group contains whether the last group differs.
                    self._asked[-1].wait()
                    mine[2] = _differ(self._answers)
                answers = mine.repeat(group.size)
                self._asked.append(collectives.ask(group, answers, mine))
                self._answers = answers.view(group.size, 4)
                sequence.begin_epoch()
            if comm_stream.stream is not None:
                self._asked[-1].wait()
                self._answers = self._answers.to("cpu", non_blocking=True)
                self._arrived = log.last_event = comm_stream.stream.record_event()
                self.unread.append(self)

    def read(self) -> None:
        """Called at the end of a backward, after the wait for its last reduction. Does nothing on an accelerator.

        Raises:
            RuntimeError: if the ranks issued different collectives.
        """
        if self._arrived is None:
            self.read_now()

    @_disable_current_modes()
    def read_now(self) -> None:
        """Reads the answer. The CPU waits for it if it has not arrived.

        Raises:
            RuntimeError: if the ranks issued different collectives.
        """
        asked, self._asked = self._asked, []
        arrived, self._arrived = self._arrived, None
        if arrived is not None:
            self.unread.remove(self)
            arrived.synchronize()
        for question in asked[-1:]:
            question.wait()
        if not asked or not _differ(self._answers):
            self._warn_of_uneven_steps(asked)
            return
        report = ""
        for question in asked:
            sequence, epoch, _ = question.position
            report += log.diagnosis((sequence, epoch, 0))
            sequence.forget_sizes()
        number = log.num_steps - self._num_steps
        when = ("no step was taken", "one step was taken since", f"{number} steps were taken since")[min(number, 2)]
        raise RuntimeError(message("order-differs", when=when, report=report))

    def _warn_of_uneven_steps(self, asked: Sequence[collectives.Collective]) -> None:
        have_stepped = self._answers[:, 3].tolist() if asked and not self._has_warned else []
        if len(set(have_stepped)) > 1:
            self._has_warned = True
            both = zip(asked[-1].position[0].ranks, have_stepped, strict=True)
            warn(message("uneven-steps", ranks=[rank for rank, stepped in both if stepped]))


def agree(unit: Any, group: Group | None, device: torch.device) -> None:
    """Called before a manual all-gather, which no forward of ``unit`` needs. All ranks of ``group`` must call it.

    Raises:
        RuntimeError: if the ranks all-gather different units.
    """
    if group is not None and group.sequence.identity_of(unit) not in group.sequence.agreed:
        _read(unit, _ask(unit, group, device))


def _ask(unit: Any, group: Group, device: torch.device) -> _Question:
    sequence = group.sequence
    sequence.agreed.add(sequence.identity_of(unit))
    # This question is not a part of training: dispatch modes for counting, and fake tensor modes, do not see it.
    with _disable_current_modes():
        # A kernel fills this tensor. A copy from the CPU would block the CPU.
        mine = torch.full((1,), sequence.question_about(unit), dtype=torch.int64, device=device)
        answers = mine.repeat(group.size)
        return collectives.ask(group, answers, mine), answers


def _read(unit: Any, question: _Question, before: Sequence[str] = ()) -> None:
    collective, answers = question
    collective.wait()
    sequence = collective.position[0]
    with _disable_current_modes():
        if sequence.agree(answers.tolist()):
            return
    sequence.forget_sizes()
    sequence.agreed.discard(sequence.identity_of(unit))
    found = _units_of_all_ranks(unit, sequence)
    # Parameters with equal names, but in another order, are one unit that the ranks have constructed differently.
    names = [sorted(line.partition(" of shape")[0] for line in facts if " of shape" in line) for _, facts in found]
    lines = zip_longest(*(facts for _, facts in found), fillvalue="nothing")
    first = next((line for line in lines if len(set(line)) > 1), ())
    if first and all(others == names[0] for others in names):
        raise RuntimeError(message("different-unit", unit=str(unit), difference=_by_rank(sequence, first)))
    # Equal units of two models usually have equal names. Only then, the number is added.
    plain = [name.partition(" (number ")[0] for name, _ in found]
    about_to = _by_rank(sequence, plain if len(set(plain)) > 1 else [name for name, _ in found])
    raise RuntimeError(message("different-order", about_to=about_to, before=list(before)))


def _by_rank(sequence: CollectiveSequence, texts: Sequence[str]) -> str:
    return ", ".join(f"rank {rank}: {text}" for rank, text in zip(sequence.ranks, texts, strict=True))


def _units_of_all_ranks(unit: Any, sequence: CollectiveSequence) -> list[tuple[str, list[str]]]:
    """For each rank, the name and the facts of the unit that it was about to all-gather.

    The ranks exchange them through the store, because they may have issued different collectives.
    """
    group: Any = sequence.process_group()
    store, key = group.get_group_store(), f"minifsdp/agreement/{sequence.key}/{sequence.num_disagreements}"
    sequence.num_disagreements += 1
    name = f"{str(unit)!r} (number {unit.built[1] + 1} of its kind)"
    store.set(f"{key}/{group.rank()}", json.dumps((name, unit.facts())))
    keys = [f"{key}/{index}" for index in range(group.size())]
    with suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=5))
    return [json.loads(store.get(each)) if store.check([each]) else ("another unit", []) for each in keys]


def _differ(answers: torch.Tensor) -> torch.Tensor:
    """Whether the rows ``digest, number, others differ, steps`` of the ranks differ."""
    return (answers[:, :2] != answers[0, :2]).any() | answers[:, 2].any()


def read_all(*_: Any) -> None:
    """Called before a state dict is created, and when the program ends: reads all answers.

    Raises:
        RuntimeError: if the ranks issued different collectives for units of some root.
    """
    while RankChecks.unread:
        RankChecks.unread[0].read_now()
