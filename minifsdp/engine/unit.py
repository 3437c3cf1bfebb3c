"""The state machine of one unit: gather, wait, reshard.

A unit is a group of parameters that is gathered, freed and reduced together. Where it stands is one of three states::

                 unshard                wait
     SHARDED  ------------>  GATHERING  ------->  UNSHARDED
        ^                        |                    |
        |        reshard         |      reshard       |
        +------------------------+--------------------+

``unshard`` *issues* the gather and returns at once; ``wait`` stops the compute stream until the values are there.
Between the two lies all the overlap that FSDP is about. The arrow from GATHERING straight back to SHARDED is a prefetch
that turned out to be wrong: it is waited for, because other ranks take part in it, and dropped.

Beside the state there is a *phase*, which says what the unit's module is doing::

     IDLE -> FORWARD -> IDLE -> PRE_BACKWARD -> POST_BACKWARD -> IDLE
     IDLE -> SUMMONED -> IDLE        the user looks at the full parameters, and nothing may compute with them

The state is about memory, the phase about time; neither follows from the other. A unit with ``SHARD_GRAD_OP`` is
UNSHARDED and IDLE between its forward and its backward, one with ``FULL_SHARD`` is SHARDED and IDLE there.

No flag says "was prefetched" or "needs to be gathered": a prefetch is ``unshard`` called by another unit, and a unit
that is not SHARDED answers a second ``unshard`` with nothing.

*In torch:* FSDP1 spreads this over ``_prefetched``, ``_needs_pre_forward_unshard``, ``_needs_pre_backward_unshard``,
``_ran_pre_backward_hook`` and ``_post_backward_called``; FSDP2's ``ShardedState`` and ``TrainingState`` come close.

Spec: SHARD-04, SHARD-08, SHARD-13, PREF-02 to PREF-06, LIM-02.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Generic

from torch import nn
from typing_extensions import TypeVar

from minifsdp import trace
from minifsdp.engine import ledger, misuse
from minifsdp.engine.lanes import Lanes, Promise
from minifsdp.engine.layout import Gradient, Layout, full_name
from minifsdp.engine.lifetime import RateLimiter
from minifsdp.engine.messages import message
from minifsdp.engine.precision import Precision
from minifsdp.engine.reduce import ReducePlan


class State(Enum):
    """Where the unit's full parameters are."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


class Phase(Enum):
    """What the unit's module is doing."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()
    SUMMONED = auto()


@dataclass(frozen=True)
class Resting:
    """Another place to gather from than the shards, between a forward and its backward.

    Attributes:
        begin: keeps a part of the unsharded parameters, which are freed next; the next gather comes from there.
        end: the next gather comes from the shards again.
    """

    begin: Callable[[], None]
    end: Callable[[], None]


@dataclass(frozen=True)
class UnitPolicy:
    """When a unit gathers, frees and reduces. It is replaced as a whole and never changed.

    Attributes:
        reshard_after_forward: free after forward and gather again for backward, or keep in between.
        reshard_after_backward: free after a backward.
        reshard_after_evaluation: free after a forward without grad mode, also if it would be kept for a backward. If
            not, later evaluations use the memory again.
        stays_for_backward: it belongs to the outermost module, whose backward follows at once, and is not freed before.
        resting: where the unit is resharded to after forward, instead of all the way.
        gathers_in_backward: whether backward needs the parameters.
        ahead_in_forward, ahead_in_backward: units to be gathered right after this one; ``None``: as the schedule says.
        reduces: whether the next backward ends in a reduction.
    """

    reshard_after_forward: bool
    reshard_after_backward: bool = True
    reshard_after_evaluation: bool = True
    stays_for_backward: bool = False
    resting: Resting | None = None
    gathers_in_backward: bool = True
    ahead_in_forward: tuple[Unit, ...] | None = None
    ahead_in_backward: tuple[Unit, ...] | None = None
    reduces: bool = True


# Who makes units of one layout only may say so, ``Unit[FlatLayout]``, and use what that layout has beside the verbs.
LayoutT = TypeVar("LayoutT", bound=Layout, covariant=True, default=Layout)


class Unit(Generic[LayoutT]):
    """A group of parameters that is gathered, freed and reduced together.

    Args:
        module: the module whose forward the unit surrounds.
        layout: its parameters in memory.
        plan: how its gradients are combined; several, one for each mesh, if not all parameters are cut over the same.
        precision: its dtypes.
        policy: when it gathers, frees and reduces, to begin with.

    Attributes:
        plan, plans: the first plan, and all of them, nearly always one.
        name: full name of the module inside the root; set by the root.
        policy: when it gathers, frees and reduces.
        awaits_backward: a forward has been recorded whose backward has not begun.
        inner: the units inside this unit's module.
        graph_task: number of the backward in which the gradient of its output arrived.
        num_pending: outermost forwards in which it was recorded and whose backward has not ended.
        counted_in: the number of the latest of these; it counts once, however often the unit runs in it.
        ran_in: the number of the latest outermost forward in which it ran.
        num_uses: recorded forwards since the last backward, counted where nothing is trained.
        is_for_evaluation: the parameters were gathered for a forward that no backward follows.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: LayoutT,
        plan: ReducePlan | tuple[ReducePlan, ...],
        precision: Precision,
        policy: UnitPolicy,
    ) -> None:
        self.module, self.layout, self.precision = module, layout, precision
        self.plans = plan if isinstance(plan, tuple) else (plan,)
        self.plan = self.plans[0]
        self.policy = policy
        self.name = type(module).__name__
        self.state, self.phase = State.SHARDED, Phase.IDLE
        self.awaits_backward = self.is_for_evaluation = False
        self.inner: frozenset[Unit] = frozenset()
        self.graph_task, self.num_uses, self.num_pending, self.counted_in, self.ran_in = -1, 0, 0, -1, -1
        self.lanes: Lanes
        self.limiter: RateLimiter
        self._promise: Promise | None = None
        self._event: trace.Event | None = None
        for watch in misuse.watchers:
            watch(layout)

    def choose(self, **changes: Any) -> None:
        """Another policy, the same but for ``changes``."""
        self.policy = replace(self.policy, **changes)

    def join(self, lanes: Lanes, limiter: RateLimiter) -> None:
        """Becomes part of a tree, which shares its lanes and its limiter."""
        self.lanes, self.limiter = lanes, limiter

    def unshard(self) -> None:
        """SHARDED -> GATHERING: issues the gather. In any other state there is nothing to do."""
        # On a user's list to be prefetched, and in no tree yet: it is gathered when its own forward comes.
        if self.state is not State.SHARDED or "limiter" not in vars(self):
            return
        self.limiter.admit(self.name)
        layout = self.layout
        if trace.recorder is not None and layout.offloads:
            trace.recorder.begin("H2D", self.name, num_bytes=layout.num_bytes // self.plan.mesh.num_shards)
        if trace.recorder is not None and (group := layout.gather_group) is not None:
            self._event = trace.recorder.begin(
                "AG", self.name, num_bytes=layout.num_bytes, ranks=group.ranks, dtype=layout.dtype, lane="gather"
            )
        self._promise = self.layout.gather(self.lanes)
        self.state = State.GATHERING

    def wait(self) -> None:
        """GATHERING -> UNSHARDED: the compute stream may use the parameters from here on.

        Raises:
            RuntimeError: `unshard` was not called.
        """
        if self.state is State.UNSHARDED:
            return
        if self.state is State.SHARDED:
            raise RuntimeError(message("never-gathered", name=self.name))
        promise, self._promise = self._promise, None
        if promise is not None:
            promise.wait()
        event, self._event = self._event, None
        if trace.recorder is not None:
            trace.recorder.finish(event)
        self.state = State.UNSHARDED

    def reshard(self, *, rests: bool = False) -> None:
        """Any state -> SHARDED: frees the unsharded parameters; a gather in flight is waited for first.

        Args:
            rests: keep a part of them, if the policy says so.
        """
        resting = self.policy.resting
        if resting is not None:
            # Also where the unit is SHARDED and rests: the next gather is to come from the shards.
            resting.end()
        if self.state is State.SHARDED:
            return
        if self.state is State.GATHERING:
            self.wait()
        if rests and resting is not None:
            resting.begin()
        self.layout.show_sharded()
        self.state = State.SHARDED
        event = self.layout.free()
        if event is not None:
            if trace.recorder is not None:
                trace.recorder.begin("FREE", self.name, num_bytes=self.layout.num_bytes)
            self.limiter.released(event)

    def keep_gradient(self, gradient: Gradient) -> None:
        """Leaves a gradient to a later backward. Other ranks must not reduce theirs, so the ledger has it."""
        for group in {group for plan in self.plans for group in (plan.mesh.shard, plan.mesh.replicate) if group}:
            ledger.skip("no reduction", group, self.name)
        self.layout.keep_unreduced(gradient)


def not_while_summoned(unit: Unit, what: str) -> RuntimeError:
    """The error for computing with full parameters that are summoned."""
    return RuntimeError(message("while-summoned", what=what, unit=unit.name))


def modules_of_unit(roots: Iterable[nn.Module], is_apart: Callable[[nn.Module], bool]) -> list[tuple[str, nn.Module]]:
    """The modules whose own parameters belong to the unit around ``roots``, with their paths, each once.

    Args:
        roots: the unit's modules, nearly always one.
        is_apart: tells a module that is a unit of its own, with all that is inside it.
    """
    found: dict[nn.Module, str] = {}

    def walk(path: str, module: nn.Module) -> None:
        if module in found or is_apart(module):
            return
        found[module] = path
        for name, child in module.named_children():
            walk(full_name(path, name), child)

    for root in roots:
        walk("", root)
    return [(path, module) for module, path in found.items()]
