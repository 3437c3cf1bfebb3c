"""The state machine of one unit: gather, wait, reshard.

A unit is a group of parameters that is gathered, freed and reduced together. Where it stands is one of three states::

                 unshard                wait
     SHARDED  ------------>  GATHERING  ------->  UNSHARDED
        ^                        |                    |
        |        reshard         |      reshard       |
        +------------------------+--------------------+

``unshard`` *issues* the gather and returns at once; ``wait`` stops the main road until the values are there. Between
the two lies all the overlap that FSDP is about. The arrow from GATHERING straight back to SHARDED is a prefetch that
turned out to be wrong: it is waited for, because other ranks take part in it, and dropped.

Beside the state there is a *phase*, which says what the unit's module is doing::

     IDLE -> FORWARD -> IDLE -> PRE_BACKWARD -> POST_BACKWARD -> IDLE
     IDLE -> SUMMONED -> IDLE        the user has the full parameters in his hands, nobody may compute with them

The state is about memory, the phase about time; neither follows from the other. A unit with ``SHARD_GRAD_OP`` is
UNSHARDED and IDLE between its forward and its backward, one with ``FULL_SHARD`` is SHARDED and IDLE there.

No flag says "was prefetched" or "needs to be gathered": a prefetch is ``unshard`` called by somebody else, and a unit
that is not SHARDED answers a second ``unshard`` with nothing.

*In torch:* FSDP1 spreads this over ``_prefetched``, ``_needs_pre_forward_unshard``, ``_needs_pre_backward_unshard``,
``_ran_pre_backward_hook`` and ``_post_backward_called``; FSDP2's ``ShardedState`` and ``TrainingState`` come close.

Spec: SHARD-04, SHARD-08, SHARD-13, PREF-02 to PREF-06, LIM-02.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

import torch
from torch import nn

from minifsdp import trace
from minifsdp.engine.collectives import rank_of_this_process
from minifsdp.engine.lanes import Lanes, Promise
from minifsdp.engine.layout import Layout
from minifsdp.engine.lifetime import RateLimiter
from minifsdp.engine.precision import Precision
from minifsdp.engine.reduce import ReducePlan

__all__ = ["Phase", "State", "Unit"]


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


class Unit:
    """A group of parameters that is gathered, freed and reduced together.

    Args:
        module: the module whose forward the unit surrounds.
        layout: its parameters in memory.
        plan: how its gradients are combined.
        precision: its dtypes.
        reshard_after_forward: free after forward and gather again for backward, or keep in between.

    Attributes:
        name: full name of the module inside the root; set by the root.
        reduces: whether the next backward ends in a reduction; off under ``no_sync``.
        awaits_backward: a forward has been recorded whose backward has not begun.
        inner: the units inside this unit's module.
        is_root: whether it belongs to the root of its tree.
        on_gradient_of_output: the hook that is laid on each output.
        graph_task: number of the backward in which the gradient of its output arrived.
        num_uses: recorded forwards since the last backward, counted where nothing is trained.
    """

    __slots__ = (
        "_event",
        "_promise",
        "awaits_backward",
        "graph_task",
        "inner",
        "is_root",
        "lanes",
        "layout",
        "limiter",
        "module",
        "name",
        "num_uses",
        "on_gradient_of_output",
        "phase",
        "plan",
        "precision",
        "reduces",
        "reshard_after_forward",
        "state",
    )

    def __init__(
        self, module: nn.Module, layout: Layout, plan: ReducePlan, precision: Precision, *, reshard_after_forward: bool
    ) -> None:
        self.module, self.layout, self.plan, self.precision = module, layout, plan, precision
        self.reshard_after_forward = reshard_after_forward
        self.name = type(module).__name__
        self.state, self.phase = State.SHARDED, Phase.IDLE
        self.reduces, self.awaits_backward, self.is_root = True, False, False
        self.inner: frozenset[Unit] = frozenset()
        self.graph_task, self.num_uses = -1, 0
        self.on_gradient_of_output: Callable[[torch.Tensor], None]
        self.lanes: Lanes
        self.limiter: RateLimiter
        self._promise: Promise | None = None
        self._event: trace.Event | None = None

    def join(self, lanes: Lanes, limiter: RateLimiter) -> None:
        """Becomes part of a tree, which shares its lanes and its limiter."""
        self.lanes, self.limiter = lanes, limiter

    def unshard(self) -> None:
        """SHARDED -> GATHERING: issues the gather. In any other state there is nothing to do."""
        if self.state is not State.SHARDED:
            return
        self.limiter.admit(self.name)
        shard = self.plan.mesh.shard
        layout = self.layout
        if trace.recorder is not None and layout.offloads:
            trace.recorder.begin("H2D", self.name, num_bytes=layout.num_bytes // self.plan.mesh.num_shards)
        if trace.recorder is not None and shard is not None:
            self._event = trace.recorder.begin(
                "AG", self.name, num_bytes=layout.num_bytes, ranks=shard.ranks, dtype=layout.dtype, lane="gather"
            )
        self._promise = self.layout.gather(self.lanes)
        self.state = State.GATHERING

    def wait(self) -> None:
        """GATHERING -> UNSHARDED: the main road may use the parameters from here on.

        Raises:
            RuntimeError: nobody has called `unshard`.
        """
        if self.state is State.UNSHARDED:
            return
        if self.state is State.SHARDED:
            raise RuntimeError(
                f"rank {rank_of_this_process()}: unit {self.name!r} is waited for but was never gathered"
            )
        promise, self._promise = self._promise, None
        if promise is not None:
            promise.wait()
        event, self._event = self._event, None
        if trace.recorder is not None:
            trace.recorder.finish(event)
        self.state = State.UNSHARDED

    def reshard(self) -> None:
        """Any state -> SHARDED: frees the unsharded parameters; a gather in flight is waited for first."""
        if self.state is State.SHARDED:
            return
        self.wait()
        self.layout.show_sharded()
        self.state = State.SHARDED
        event = self.layout.free()
        if event is not None:
            if trace.recorder is not None:
                trace.recorder.begin("FREE", self.name, num_bytes=self.layout.num_bytes)
            self.limiter.released(event)
