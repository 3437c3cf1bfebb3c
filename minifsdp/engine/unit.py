"""The state machine of one unit: all-gather, wait, reshard.

A unit is a group of parameters that is all-gathered, resharded and reduced together. It is in one of three states::

                 unshard                wait
     SHARDED  ------------>  GATHERING  ------->  UNSHARDED
        ^                        |                    |
        |        reshard         |      reshard       |
        +------------------------+--------------------+

``unshard`` *issues* the all-gather and returns immediately; ``wait`` makes the compute stream wait for the values. All
overlap of communication and compute happens between the two calls. The arrow from GATHERING back to SHARDED is an
unused prefetch: the unit waits for it, because other ranks take part in it, and then frees the result.

A unit also has a *phase*, the current activity of its module::

     IDLE -> FORWARD -> IDLE -> PRE_BACKWARD -> POST_BACKWARD -> IDLE
     POST_BACKWARD -> PRE_BACKWARD   if the module ran twice
     IDLE -> SUMMONED -> IDLE        only FullyShardedDataParallel: the user reads the full parameters, and modules can
                                     run a forward with them

The state describes memory, and the phase describes the module. They are independent. Between forward and backward, a
unit with ``SHARD_GRAD_OP`` is UNSHARDED and IDLE, and one with ``FULL_SHARD`` is SHARDED and IDLE.

There is no flag for "was prefetched" or "needs an all-gather". A prefetch is a call of ``unshard`` by the hooks of
another unit. If a unit is not SHARDED, ``unshard`` does nothing.

*In torch:* FSDP1 has the flags ``_prefetched``, ``_needs_pre_forward_unshard``, ``_needs_pre_backward_unshard``,
``_ran_pre_backward_hook`` and ``_post_backward_called``; FSDP2's ``ShardedState`` and ``TrainingState`` are similar.

Spec: SHARD-04, SHARD-08, SHARD-13, PREF-02 to PREF-06, LIM-02.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Generic

from torch import nn
from typing_extensions import TypeVar

from minifsdp.engine.comm_streams import CommStreams, Handle
from minifsdp.engine.events import events
from minifsdp.engine.extension_points import ExtensionPoints
from minifsdp.engine.layout import Layout, full_name
from minifsdp.engine.lifetime import RateLimiter
from minifsdp.engine.messages import message
from minifsdp.engine.precision import Precision
from minifsdp.engine.reduce import ReducePlan


class State(Enum):
    """Whether the unit's parameters are sharded or unsharded."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


class Phase(Enum):
    """The current activity of the unit's module."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()
    SUMMONED = auto()


@dataclass(frozen=True)
class UnitPolicy:
    """When a unit is all-gathered, resharded and reduced. Immutable: a change replaces the whole policy.

    Attributes:
        reshard_after_forward: reshard after each forward and all-gather again for backward; otherwise, stay unsharded
            until the backward, or until the shard changes. Later forwards then need no all-gather. A bool, or an object
            of a case that counts as true.
        reshard_after_backward: reshard after a backward.
        unshards_in_backward: whether backward needs the parameters.
        prefetch_in_forward, prefetch_in_backward: units to prefetch after this one; ``None`` uses the schedule.
        reduces: whether the next backward ends in a reduction.
    """

    reshard_after_forward: Any
    reshard_after_backward: bool = True
    unshards_in_backward: bool = True
    prefetch_in_forward: tuple[Unit, ...] | None = None
    prefetch_in_backward: tuple[Unit, ...] | None = None
    reduces: bool = True


# Generic over the layout, so that code can use ``Unit[FlatLayout]`` and the extra methods of that layout.
LayoutT = TypeVar("LayoutT", bound=Layout, covariant=True, default=Layout)


class Unit(Generic[LayoutT]):
    """A group of parameters that is all-gathered, resharded and reduced together.

    Args:
        module: the module whose forward uses the parameters.
        layout: how the unit's parameters are stored.
        plans: how the unit's gradients are reduced; one plan for each mesh over which parameters are sharded.
        precision: the unit's dtypes.
        policy: the initial policy.

    Attributes:
        plan, plans: the first plan, and all plans. Nearly always there is one.
        name: full name of the module inside the root; set by the root.
        policy: when the unit is all-gathered, resharded and reduced.
        awaits_backward: whether autograd has recorded a forward whose backward has not begun.
        inner: the units inside this unit's module.
        graph_task: ID of the backward in which the gradient of the unit's output was computed.
        num_pending: number of outermost forwards in which the unit was recorded and whose backward has not ended.
        counted_in: the number of the latest of these. It counts once, even if the unit runs several times in it.
        ran_in: the number of the latest outermost forward in which the unit ran; -1 before the first one.
        planned_for: the dtype of the unsharded parameters when the reductions were planned.
        num_uses: number of recorded forwards since the last backward, only for units without trainable parameters.
        is_held: whether a case, or a graph of gradients, needs the unsharded parameters. The unit then stays unsharded
            until the end of the backward that computes its gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: LayoutT,
        plans: Sequence[ReducePlan],
        precision: Precision,
        policy: UnitPolicy,
    ) -> None:
        self.module = module
        self.layout = layout
        self.precision = precision
        self.plans = plans
        self.plan = plans[0]
        self.policy = policy
        self.name = type(module).__name__
        self.state = State.SHARDED
        self.phase = Phase.IDLE
        self.planned_for: object = None
        self.awaits_backward = self.is_held = False
        self.inner: frozenset[Unit] = frozenset()
        # Its forwards and its backward in this iteration.
        self.graph_task = -1
        self.num_uses = 0
        self.num_pending = 0
        self.counted_in = -1
        self.ran_in = -1
        # Those of the root, see `join`. ``None``, a limiter that never waits, and no cases until the unit has a root.
        self.comm_streams: CommStreams | None = None
        self.limiter = RateLimiter(enabled=False)
        self.points = ExtensionPoints()
        self._handle: Handle | None = None

    def update_policy(self, **changes: Any) -> None:
        """Replaces the policy with a copy that has these ``changes``."""
        self.policy = replace(self.policy, **changes)

    def plan_reductions(self) -> None:
        """Sets the dtype for gradient reduction. Called again if the model was converted."""
        self.planned_for = self.layout.dtype
        for plan in self.plans:
            plan.use(self.precision.reduces_in(self.planned_for))

    def join(
        self, comm_streams: CommStreams, limiter: RateLimiter, points: ExtensionPoints
    ) -> None:
        """Adds the unit to a root, whose communication streams, rate limiter and extension points it then uses."""
        self.comm_streams = comm_streams
        self.limiter = limiter
        self.points = points

    def unshard(self) -> None:
        """SHARDED -> GATHERING: issues the all-gather. Does nothing in other states and in the phase SUMMONED."""
        # A unit in the user's prefetch list may not have a root yet. Then its own forward all-gathers it.
        if (
            self.state is not State.SHARDED
            or self.phase is Phase.SUMMONED
            or self.comm_streams is None
        ):
            return
        self.limiter.throttle(self.name)
        if events.recorder is not None:
            events.recorder.all_gather_begins(self)
        self._handle = self.layout.all_gather(self.comm_streams)
        self.state = State.GATHERING

    def wait(self) -> None:
        """GATHERING -> UNSHARDED: afterwards the compute stream can use the parameters.

        Raises:
            RuntimeError: if `unshard` was not called.
        """
        if self.state is State.UNSHARDED:
            return
        if self.state is State.SHARDED:
            raise RuntimeError(message("never-gathered", name=self.name))
        handle = self._handle
        self._handle = None
        if handle is not None:
            handle.wait()
        if events.recorder is not None:
            events.recorder.end("AG", self.name)
        self.state = State.UNSHARDED

    def reshard(self) -> None:
        """Any state -> SHARDED: frees the unsharded parameters. Waits first for an all-gather in flight."""
        if self.state is State.GATHERING:
            self.wait()
        for extend in self.points.unit_reshards:
            extend(self)
        if self.state is State.SHARDED:
            return
        self.layout.use_sharded_params()
        self.state = State.SHARDED
        self.is_held = False
        event = self.layout.free()
        if event is not None:
            if events.recorder is not None:
                events.recorder.freed(self)
            self.limiter.released(event)


def modules_of_unit(
    roots: Iterable[nn.Module], is_apart: Callable[[nn.Module], bool]
) -> list[tuple[str, nn.Module]]:
    """The modules whose direct parameters belong to the unit of ``roots``, with their paths. Each module appears once.

    Args:
        roots: the unit's modules. Nearly always there is one.
        is_apart: whether a module belongs to another unit, together with all modules inside it.
    """
    found: dict[nn.Module, str] = {}
    # A list, because a recursive function inside this one would be a reference cycle (COST-22).
    left = [("", root) for root in roots][::-1]
    while left:
        path, module = left.pop()
        if module in found or is_apart(module):
            continue
        found[module] = path
        left += [
            (full_name(path, name), child) for name, child in module.named_children()
        ][::-1]
    return [(path, module) for module, path in found.items()]
