"""Compares the collectives of all ranks at the end of each backward.

Collectives pair up by the order of their issue, not by name. If two ranks run two equal units in different order, each
unit gets the weights of the other unit. If each rank uses another expert of a layer, the gradients of different experts
are added up. The loss still decreases, and no error appears. With units of different sizes, the job hangs. The cause is
control flow that depends on the rank.

At the end of a backward, the ranks of each group compare two hashes of their collective logs (``collective_log.py``)::

                                           rank 0       rank 1       result
    kinds, sizes, dtypes, parameters       5f1d...      90ab...      RuntimeError on both: they cannot be right
    numbers of the units                   77c0...      1e42...      a warning on both, once

The first hash contains what all ranks of a collective must have in common. The second hash contains the number of each
unit in its root. Ranks may build the same units in different roots, so different numbers prove nothing. With
``TORCH_DISTRIBUTED_DEBUG=DETAIL``, or while `RankChecks.is_strict` is set, they are an error as well.

1. *Cost*: one collective of 24 bytes for each rank, group and backward. It is issued before the wait for the last
   reduction, and takes almost no time.
2. *Which groups*: the groups in which units of this root communicated during this backward. Other ranks may compute
   more backwards without communication, for example through frozen parameters or in ``no_sync()``. These are not
   compared. If one backward computes several roots, the last one compares for all, because other ranks may have built
   one root of the same units.
3. *Which ranks raise*: all. With replicas, the question to the replicate group contains the result of the shard group,
   so a rank raises the error even if both of its own groups agree.
4. *When*: on a CPU before backward returns, so no optimizer steps. An accelerator computes later, and waiting for the
   answer would stop the CPU. So the answer is read at the end of the next backward, before a state dict is created, and
   when the program ends. These moments are the same on all ranks. The message contains the number of optimizer steps in
   between, usually one.
5. *Another warning*: some ranks have stepped an optimizer of this root since the last comparison, and others have not.
   This is a mistake if one rank uses ``no_sync()`` and the others do not, but a program may also intend it. It appears
   once.

A rank that issues fewer collectives makes the other ranks wait. The watchdog detects this case (``minifsdp/watchdog``).
Between CPUs, sizes are compared before data is sent (``minifsdp_gloo``).

*In torch:* FSDP1 compares the order of all-gathers, for debugging only (``_exec_order_utils.py``); FSDP2 has no check.

Spec: NEW-19, ORDER-01 to ORDER-09, ORDER-12, ORDER-13, HEALTHY-01.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed import DebugLevel, get_debug_level
from torch.utils._python_dispatch import _disable_current_modes

from minifsdp.checks.collective import Collective, ask
from minifsdp.checks.collective_log import CollectiveSequence, UnitName, log
from minifsdp.checks.forward_checks import check_not_in_ddp, check_transforms
from minifsdp.engine.events import events
from minifsdp.engine.mesh import Group, MeshGroups
from minifsdp.engine.messages import message, warn

if TYPE_CHECKING:
    from minifsdp.engine.hooks import IterationState
    from minifsdp.engine.unit import Unit


class RankChecks:
    """The comparisons of one root. An observer of `Events.roots`.

    The constructor sets the names of the units, which contain what the collective log needs.

    Args:
        units: all units of the root, in the same order on every rank.

    Attributes:
        is_strict: whether units with different numbers are an error, for all roots; for debugging. Must be equal on all
            ranks.
        unread: checks of all roots, including deleted roots, whose answer on an accelerator is not read yet.
        in_backward: the checks of all roots in each backward of autograd, by its ID.
    """

    is_strict: ClassVar[bool] = False
    unread: ClassVar[list[RankChecks]] = []
    in_backward: ClassVar[dict[int, weakref.WeakSet[RankChecks]]] = {}

    def __init__(self, units: Sequence[Unit]) -> None:
        # The sequences in which the units issued a collective since the last backward began.
        self._used = set[CollectiveSequence]()
        numbers = defaultdict[MeshGroups, Iterator[int]](count)
        for unit in units:
            unit.name = unit.layout.name = UnitName(
                unit.name, next(numbers[unit.plans[0].mesh]), self._used
            )
        meshes = [plan.mesh for unit in units for plan in unit.plans]
        groups = [mesh.shard for mesh in meshes] + [mesh.replicate for mesh in meshes]
        self._groups = {
            log.sequence_of(group): group for group in groups if group is not None
        }
        self._is_detailed = (
            dist.is_initialized() and get_debug_level() == DebugLevel.DETAIL
        )
        # The questions, the answers of the last group, an accelerator's event after them, and the number of steps of
        # all optimizers when they were issued.
        self._asked: tuple[list[Collective], torch.Tensor, Any, int] | None = None
        # The number of steps of this root's optimizers at that time.
        self._num_own_steps = 0
        self._has_warned_of_steps = self._has_warned_of_units = False
        # The ID of the running backward, and the groups of other roots for which this one compares at its end.
        self._graph_task = -1
        self._of_others = dict[CollectiveSequence, Group]()

    def forward_begins(self, units: Sequence[Unit]) -> None:
        """The collectives of this forward share one place in the program.

        Raises:
            RuntimeError: if a ``DistributedDataParallel`` or a function transform is around the model.
        """
        check_transforms(units)
        check_not_in_ddp(units)
        log.iteration += 1
        log.place = log.place_in_program()

    def left(self) -> None:
        """The next collective may have another place."""
        log.place = None

    def backward_begins(self, graph_task: int) -> None:
        """Forgets the groups of the last backward."""
        log.place = log.place_in_program()
        self._used.clear()
        self._of_others.clear()
        # A backward that failed never ends.
        self.in_backward.pop(self._graph_task, None)
        self._graph_task = graph_task
        self.in_backward.setdefault(graph_task, weakref.WeakSet()).add(self)

    def backward_ends(self, iteration: IterationState) -> None:
        """Issues the question in each group that this backward used."""
        comm_streams = iteration.reducer.comm_streams
        num_steps = iteration.units[0].layout.steps.count
        if (group := iteration.reducer.next_group) is not None:
            self._used.add(log.sequence_of(group))
        if not (groups := self._groups_to_ask()):
            return
        self.read_now()
        has_stepped = num_steps != self._num_own_steps
        self._num_own_steps = num_steps
        asked: list[Collective] = []
        answers: Any = None
        arrived: Any = None
        with _disable_current_modes(), comm_streams.all_gather as comm_stream:
            for sequence, group in groups.items():
                # Kernels fill this tensor, one number after the other. A copy from the CPU would block the CPU.
                mine = torch.full(
                    (3,), sequence.now[2], dtype=torch.int64, device=comm_streams.device
                )
                mine[1] = sequence.now[3]
                mine[2] = has_stepped
                if self.is_strict or self._is_detailed:
                    mine[0] ^= mine[1]
                if asked:
                    # 3. If the hashes of the last group differ, those of the next group must differ as well.
                    asked[-1].wait()
                    mine[:2] += _differ(answers) * (group.rank + 1)
                answers = mine.repeat(group.size).view(group.size, 3)
                asked.append(ask(group, answers.view(-1), mine))
                sequence.begin_epoch()
            if comm_stream.stream is not None:
                asked[-1].wait()
                answers = answers.to("cpu", non_blocking=True)
                arrived = events.last_event = comm_stream.stream.record_event()
                self.unread.append(self)
        self._asked = (asked, answers, arrived, log.num_steps)

    def _groups_to_ask(self) -> dict[CollectiveSequence, Group]:
        """The groups in which this backward issued a collective; none while another root of it has not ended."""
        mine = {
            sequence: group
            for sequence, group in self._groups.items()
            if sequence in self._used
        }
        used = mine | self._of_others
        # 2. Another root of this backward has not ended.
        others = self.in_backward.get(self._graph_task, weakref.WeakSet[RankChecks]())
        others.discard(self)
        for last in list(others)[:1]:
            last._of_others |= used
            return {}
        self.in_backward.pop(self._graph_task, None)
        return used

    def reduced(self) -> None:
        """Reads the answer. Does nothing on an accelerator.

        Raises:
            RuntimeError: if the ranks issued different collectives.
        """
        if self._asked is not None and self._asked[2] is None:
            self.read_now()

    @_disable_current_modes()
    def read_now(self) -> None:
        """Reads the answer. The CPU waits for it if it has not arrived.

        Raises:
            RuntimeError: if the ranks issued different collectives.
        """
        if self._asked is None:
            return
        asked, answers, arrived, num_steps = self._asked
        self._asked = None
        if arrived is not None:
            self.unread.remove(self)
            arrived.synchronize()
        asked[-1].wait()
        is_wrong, has_other_units = _differ(answers).tolist()
        if is_wrong:
            for question in asked:
                question.position[0].forget_sizes()
            number = log.num_steps - num_steps
            when = (
                "no step was taken",
                "one step was taken since",
                f"{number} steps were taken since",
            )[min(number, 2)]
            raise RuntimeError(
                message("order-differs", when=when, report=_report(asked))
            )
        if has_other_units and not self._has_warned_of_units:
            self._has_warned_of_units = True
            warn(message("units-differ", report=_report(asked)))
        have_stepped = answers[:, 2].tolist()
        if len(set(have_stepped)) > 1 and not self._has_warned_of_steps:
            self._has_warned_of_steps = True
            both = zip(asked[-1].position[0].ranks, have_stepped, strict=True)
            warn(
                message(
                    "uneven-steps", ranks=[rank for rank, stepped in both if stepped]
                )
            )


def _differ(answers: torch.Tensor) -> torch.Tensor:
    """Whether the two hashes of the ranks differ: two booleans."""
    return (answers[:, :2] != answers[0, :2]).any(0)


def _report(asked: Sequence[Collective]) -> str:
    """Where the ranks of each group are, and where they differ first."""
    return "".join(log.diagnosis((*question.position[:2], 0)) for question in asked)


def read_all(*_: Any) -> None:
    """Called before a state dict is created, and when the program ends: reads all answers.

    Raises:
        RuntimeError: if the ranks issued different collectives for units of some root.
    """
    while RankChecks.unread:
        RankChecks.unread[0].read_now()
