"""From unsharded gradients to sharded ones, stage by stage.

When a unit's gradient is complete, every rank has a different one, because every rank saw other data. What the
optimizer needs is the mean, and of the mean only this rank's slice. The stages, with the dtype at each:

1. let the layout pack it into one row, in the dtype in which gradients travel;
2. divide by a part of the number of ranks, in float16 only (see `Scaling`);
3. reduce-scatter over the shard group: each rank gets the sum of its slice; for a unit that is not sharded there is
   nothing to scatter, and the stage is skipped;
4. all-reduce of the slice over the replicate group, if there are replicas; or add it to a partial sum, which a later
   backward takes along, if so wished;
5. divide by the rest;
6. hand the slice to the layout, which adds it to the gradient that the optimizer will see.

Worked example, mesh of 2 x 2, a unit of four elements; ranks 0 and 1 shard, 2 and 3 are their replicas::

    gradients        [1 1 1 1]   [2 2 2 2]   [3 3 3 3]   [4 4 4 4]
    3. scattered     [3 3]       [3 3]       [7 7]       [7 7]
    4. all-reduced   [10 10]     [10 10]     [10 10]     [10 10]
    5. divided       2.5 everywhere: the mean of 1, 2, 3 and 4

Nobody needs the result before the optimizer runs. So a reduction is issued and left alone while the next unit's
backward computes; it is completed when the next reduction has been issued, or at the end of backward. One reduction in
flight overlaps with compute; a second one would wait for the first on the same wire and hold another unsharded
gradient meanwhile.

*In torch:* FSDP1's ``_reduce_grad`` and ``_post_backward_final_callback``, FSDP2's ``foreach_reduce`` (254 lines). On
the CPU both wait for each collective on the spot.

Spec: SHARD-04, SHARD-06, SHARD-11, HYB-04, HYB-05, MP-05 to MP-08, HOOK-02, HOOK-03.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minifsdp import trace
from minifsdp.engine import collectives
from minifsdp.engine.collectives import Scaling
from minifsdp.engine.lanes import Lanes, Promise
from minifsdp.engine.layout import Gradient, Layout
from minifsdp.engine.mesh import Group, Mesh
from minifsdp.engine.trouble import trouble

__all__ = ["CommHook", "ReducePlan", "Reducer"]

CommHook = Callable[..., Any]


@dataclass(slots=True)
class ReducePlan:
    """How one unit's gradients are combined.

    Attributes:
        mesh: over whom.
        dtype: in which dtype they travel.
        scaling: by what they are divided.
        hook: a user's replacement for stages 2 to 5, called as ``hook(whole, piece)`` for a sharded unit, which must
            fill ``piece``, and as ``hook(whole)`` for a unit that is not, which must change ``whole`` in place.
        all_reduces: whether stage 4 sends; if not, it adds to `partial`.
        partial: what earlier backwards have left to be all-reduced: the numbers of the parameters, and the sum.
        after: a user's function that is called with the reduced piece before the layout gets it.
        after_lane: where to call it, an accelerator's stream; ``None`` for the lane of the reduction.
    """

    mesh: Mesh
    dtype: torch.dtype
    scaling: Scaling
    hook: CommHook | None = None
    all_reduces: bool = True
    partial: tuple[list[int], torch.Tensor] | None = None
    after: Callable[[torch.Tensor], None] | None = None
    after_lane: Any = None

    @classmethod
    def mean(cls, mesh: Mesh, dtype: torch.dtype) -> ReducePlan:
        """The mean over all ranks of the mesh."""
        return cls(mesh, dtype, Scaling.mean(mesh.num_ranks, dtype))

    def use(self, dtype: torch.dtype) -> None:
        """From now on gradients travel in ``dtype``."""
        if dtype is not self.dtype:
            self.dtype, self.scaling = dtype, self.scaling.within(dtype)


class _InFlight:
    """One reduction that was issued and not completed yet. It keeps its input alive: the collective still reads it."""

    __slots__ = ("all_reduced", "event", "gradient", "layout", "name", "piece", "plan", "promise", "whole")

    def __init__(self, name: str, layout: Layout, plan: ReducePlan, gradient: Gradient) -> None:
        self.name, self.layout, self.plan, self.gradient = name, layout, plan, gradient
        # 1. Packed in the lane, so that the main road can go on.
        self.whole = self.piece = layout.pack(gradient, plan.dtype)
        self.promise: Promise | None = None
        self.event: trace.Event | None = None
        self.all_reduced = False


class Reducer:
    """Reduces the gradients of all units of one tree, one in flight at a time."""

    __slots__ = ("_in_flight", "_lanes")

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._in_flight: _InFlight | None = None

    def reduce(self, name: str, layout: Layout, plan: ReducePlan, gradient: Gradient) -> None:
        """Issues the reduction of a unit's unsharded gradient, then completes the one before it.

        Every rank of the unit's mesh must call it, in the same order of units.
        """
        self._lanes.reduce.follow()
        with self._lanes.reduce as lane:
            new = _InFlight(name, layout, plan, gradient)
            if lane.stream is None:
                # Packed at once; nobody reads the parts any more.
                gradient.parts.clear()
            if plan.hook is not None:
                _run_hook(new)
            else:
                self._issue(new)
        before, self._in_flight = self._in_flight, new
        if before is not None:
            self._complete(before)

    def finish(self) -> None:
        """Completes what is in flight; afterwards the main road may read every gradient."""
        last, self._in_flight = self._in_flight, None
        if last is not None:
            self._complete(last)

    def drop(self) -> None:
        """Waits for what is in flight, since other ranks take part in it, and forgets the result.

        It belongs to a backward that was broken off. The user may have cleared all gradients since.
        """
        last, self._in_flight = self._in_flight, None
        if last is not None and last.promise is not None:
            last.promise.wait()

    def _issue(self, new: _InFlight) -> None:
        plan, shard = new.plan, new.plan.mesh.shard
        # 2. Before the sum.
        plan.scaling.prepare(new.whole)
        if shard is not None:
            # 3. Of a sharded unit only the own slice of the sum is wanted.
            new.piece = new.whole.new_empty(new.whole.numel() // shard.size)
            new.event = _traced("RS", new, shard, "reduce")
            work = collectives.reduce_scatter(shard, new.piece, new.whole)
            new.promise = self._lanes.reduce.promise(work)
            if plan.mesh.replicate is not None and plan.all_reduces and self._lanes.all_reduce.stream is not None:
                # One stream can wait for another without stopping anybody; a thread of the CPU cannot.
                self._all_reduce(new, plan.mesh.replicate)
        elif plan.mesh.replicate is not None and plan.all_reduces:
            # 4. Without a shard group the all-reduce is all there is, so it can be issued at once.
            _add_partial(new)
            new.event = _traced("AR", new, plan.mesh.replicate, "reduce")
            work = collectives.all_reduce(plan.mesh.replicate, new.piece)
            new.promise = self._lanes.reduce.promise(work)

    def _complete(self, old: _InFlight) -> None:
        if old.promise is not None:
            old.promise.wait()
        if trace.recorder is not None:
            trace.recorder.finish(old.event)
        plan = old.plan
        if plan.hook is None:
            if plan.mesh.replicate is not None and not plan.all_reduces:
                _add_partial(old)
                plan.partial = (old.gradient.numbers, old.piece)
                return
            if plan.mesh.shard is not None and plan.mesh.replicate is not None and not old.all_reduced:
                self._all_reduce(old, plan.mesh.replicate)
                assert old.promise is not None
                old.promise.wait()
            # 5. After the sum.
            plan.scaling.complete(old.piece)
            if plan.after is not None:
                self._call_after(plan.after, old)
        if trace.recorder is not None and old.layout.offloads:
            trace.recorder.begin("D2H", old.name, num_bytes=old.piece.numel() * old.piece.element_size())
        # 6. The layout knows what the optimizer owns.
        old.layout.accept_gradient(old.gradient, old.piece)

    def _call_after(self, after: Callable[[torch.Tensor], None], old: _InFlight) -> None:
        lane = old.plan.after_lane
        if lane is None:
            after(old.piece)
            return
        module: Any = torch.get_device_module(old.piece.device)
        lane.wait_stream(module.current_stream())
        with module.stream(lane):
            after(old.piece)
        module.current_stream().wait_stream(lane)

    def _all_reduce(self, old: _InFlight, replicas: Group) -> None:
        # 4. Over the replicas; another network than the reduce-scatter's, hence a lane of its own.
        event = _traced("AR", old, replicas, "all_reduce")
        with self._lanes.all_reduce as lane:
            assert old.promise is not None
            old.promise.wait()
            _add_partial(old)
            old.promise = lane.promise(collectives.all_reduce(replicas, old.piece))
        old.all_reduced = True
        if trace.recorder is not None:
            trace.recorder.finish(event)


def _add_partial(item: _InFlight) -> None:
    """Takes along what earlier backwards have left."""
    partial, item.plan.partial = item.plan.partial, None
    if partial is None:
        return
    numbers, row = partial
    if numbers != item.gradient.numbers:
        raise RuntimeError(
            trouble(
                "uneven-partial",
                f"unit {item.name!r} has a partial gradient of {len(numbers)} parameters that waits for its "
                f"all-reduce, and a new one of {len(item.gradient.numbers)}; between two all-reduces each backward "
                "must reach the same parameters",
            )
        )
    item.piece.add_(row)


def _run_hook(new: _InFlight) -> None:
    hook, shard = new.plan.hook, new.plan.mesh.shard
    assert hook is not None
    if shard is None:
        hook(new.whole)
        return
    new.piece = new.whole.new_empty(new.whole.numel() // shard.size)
    hook(new.whole, new.piece)


def _traced(kind: str, item: _InFlight, group: Group, lane: str) -> trace.Event | None:
    if trace.recorder is None:
        return None
    sent = item.whole if kind == "RS" else item.piece
    num_bytes = sent.numel() * sent.element_size()
    return trace.recorder.begin(kind, item.name, num_bytes=num_bytes, ranks=group.ranks, dtype=sent.dtype, lane=lane)
