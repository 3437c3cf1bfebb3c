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
     POST_BACKWARD -> FORWARD        if it ran twice, and its second forward runs again in backward
     IDLE -> POST_BACKWARD           if its gradients are complete, or the backward ends, before a sign of its beginning
     FORWARD -> POST_BACKWARD        if a backward inside the forward completes the gradients of a flat unit
     IDLE -> SUMMONED -> IDLE        only FullyShardedDataParallel: the user reads the full parameters, and modules can
                                     run a forward with them

The state describes memory, and the phase describes the module. They are independent. Between forward and backward, a
unit with ``reshard_after_forward=False`` is UNSHARDED and IDLE, and one with ``True`` is SHARDED and IDLE.

There is no flag for "was prefetched" or "needs an all-gather". A prefetch is a call of ``unshard`` by the hooks of
another unit. If a unit is not SHARDED, ``unshard`` does nothing.

*In torch:* FSDP1 has the flags ``_prefetched``, ``_needs_pre_forward_unshard``, ``_needs_pre_backward_unshard``,
``_ran_pre_backward_hook`` and ``_post_backward_called``; FSDP2's ``ShardedState`` and ``TrainingState`` are similar.

Spec: SHARD-04, SHARD-08, SHARD-13, PREF-02 to PREF-06, LIM-02.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Generic

from torch import nn
from typing_extensions import TypeVar

from minifsdp.engine.comm_streams import Handle
from minifsdp.engine.events import events
from minifsdp.engine.layout import Layout, full_name
from minifsdp.engine.messages import message
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
        prefetch_in_forward: units to prefetch after this one; ``None`` for none.
        prefetch_in_backward: units to prefetch after this one; ``None`` uses the schedule.
        reduces: whether the next backward ends in a reduction.
    """

    reshard_after_forward: Any
    reshard_after_backward: bool = True
    unshards_in_backward: bool = True
    prefetch_in_forward: tuple[Unit, ...] | None = None
    prefetch_in_backward: tuple[Unit, ...] | None = None
    reduces: bool = True


@dataclass(slots=True)
class Uses:
    """The forwards of a unit, and their backward, in one iteration.

    Attributes:
        awaits_backward: whether autograd has recorded a forward whose backward has not begun.
        recorded: the numbers of the outermost forwards in which the unit was recorded and whose backward has not ended.
        ran_in: the number of the latest outermost forward in which the unit ran; 0 before the first one.
        graph_task: ID of the backward in which the gradient of the unit's output was computed.
    """

    awaits_backward: bool = False
    recorded: set[int] = field(default_factory=set)
    ran_in: int = 0
    graph_task: int = -1


# Generic over the layout, so that code can use ``Unit[FlatLayout]`` and the extra methods of that layout.
LayoutT = TypeVar("LayoutT", bound=Layout, covariant=True, default=Layout)


class Unit(Generic[LayoutT]):
    """A group of parameters that is all-gathered, resharded and reduced together.

    Args:
        modules: the modules whose forwards use the parameters. A unit of several modules is a case.
        layout: how the unit's parameters are stored.
        plans: how the unit's gradients are reduced; one plan for each mesh over which parameters are sharded.
        policy: the initial policy.

    Attributes:
        plans: also an attribute. Nearly always there is one.
        name: full name of the module inside the root; set by the root.
        policy: when the unit is all-gathered, resharded and reduced.
        uses: its forwards and its backward in this iteration.
        inner: the units inside this unit's module.
        root: the root state, which has the communication streams, the rate limiter and the cases; ``None`` until a
            forward of the unit, or of a module around it, begins, or a method such as ``unshard`` is called. Until
            then, the unit stays sharded.
        is_held: whether a case, or a graph of gradients, needs the unsharded parameters. The unit then stays unsharded
            until the end of the backward that computes its gradients.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        layout: LayoutT,
        plans: Sequence[ReducePlan],
        policy: UnitPolicy,
    ) -> None:
        self.modules = modules
        self.layout = layout
        self.plans = plans
        self.policy = policy
        self.name = type(modules[0]).__name__
        self.state = State.SHARDED
        self.phase = Phase.IDLE
        self.is_held = False
        self.uses = Uses()
        self.inner: frozenset[Unit] = frozenset()
        self.root: Any = None
        self._handle: Handle | None = None

    def update_policy(self, **changes: Any) -> None:
        """Replaces the policy with a copy that has these ``changes``."""
        self.policy = replace(self.policy, **changes)

    def plan_reductions(self) -> None:
        """Sets the dtype for gradient reduction. Called again if the model was converted."""
        for plan in self.plans:
            plan.computed_in = self.layout.dtype
            plan.use(self.layout.precision.reduces_in(self.layout.dtype))

    def unshard(self) -> None:
        """SHARDED -> GATHERING: issues the all-gather. Does nothing in other states and in the phase SUMMONED."""
        # A unit in the user's prefetch list may not have a root yet. Then its own forward all-gathers it.
        if (
            self.state is not State.SHARDED
            or self.phase is Phase.SUMMONED
            or self.root is None
        ):
            return
        self.root.limiter.throttle(self.name)
        if events.recorder is not None:
            events.recorder.all_gather_begins(self)
        self._handle = self.layout.all_gather(self.root.comm_streams)
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
        root = self.root
        if root is None:
            return
        if self.state is State.GATHERING:
            self.wait()
        for extend in root.iteration.points.unit_reshards:
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
            root.limiter.released(event)


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
