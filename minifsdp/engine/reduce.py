"""Gradient reduction: from unsharded gradients to sharded ones, stage by stage.

When a unit's gradient is complete, it differs between the ranks, because each rank used different data. The optimizer
needs only this rank's shard of the mean. The stages are:

1. the layout packs the gradient into one tensor, in the reduce dtype;
2. divide by a part of the number of ranks, in float16 only (see `Scaling`);
3. reduce-scatter over the shard group: each rank gets the sum of its shard; skipped if the unit is not sharded;
4. all-reduce the shard over the replicate group, if there are replicas. Without this all-reduce
   (`ReducePlan.all_reduces`), the result is a partial sum, which a later backward includes;
5. divide by the rest of the number of ranks;
6. the layout adds the shard to the gradient that the optimizer uses.

Worked example, a unit of four elements on a mesh of 2 x 2; the shard groups are ranks 0 and 1, and ranks 2 and 3::

    gradients        [1 1 1 1]   [2 2 2 2]   [3 3 3 3]   [4 4 4 4]
    3. scattered     [3 3]       [3 3]       [7 7]       [7 7]
    4. all-reduced   [10 10]     [10 10]     [10 10]     [10 10]
    5. divided       2.5 everywhere: the mean of 1, 2, 3 and 4

The result is not needed before the optimizer step. So a reduction is issued and runs while the next unit's backward
computes (unless the user disables this to save memory: `ReducePlan.overlaps`). It is completed after the next reduction
is issued, or at the end of backward. More reductions in flight would only wait for each other on the same network. The
reducer waits for the reduce-scatter before it packs the next gradient, so that only a shard of the previous gradient is
in memory. Otherwise two unsharded gradients and a packed copy would be in memory.

On the CPU, a waiting thread is blocked, so only the first collective is issued, and the other stages run at completion.
On an accelerator, a wait does not block other streams, so all stages are issued at once::

    compute stream       B2 -----  1 B1 -----------  s 1 w B0 -----------  s 1 w     s, w = wait for the previous
    reduce stream                    2 3                 2 3                         reduce-scatter, and reduction
    all-reduce stream                    4 5 copy            4 5 copy

On a hybrid mesh, stages 4 and 5 have their own stream; otherwise they run on the reduce stream. With CPU offload, they
are followed by a copy to pinned memory. The CPU waits once for all copies, at the end of backward. It waits earlier
only if it reads a gradient, to add it to another gradient or to pass it to hooks.

Memory must not be reused while a stream reads it. `_InFlight` keeps the packed gradient until the compute stream has
waited for the reduce-scatter, and the inputs of all later stages until it has waited for the last stage.

*In torch:* FSDP1's ``_reduce_grad``, FSDP2's ``foreach_reduce`` (254 lines). On the CPU both wait immediately.

Spec: SHARD-04, SHARD-06, SHARD-11, HYB-04, HYB-05, MP-05 to MP-08, HOOK-02, HOOK-03, STREAM-03, STREAM-06, STREAM-09
to STREAM-11, STREAM-17.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from minifsdp.engine import collectives
from minifsdp.engine.collectives import Scaling
from minifsdp.engine.comm_streams import COMPLETED, CommStreams, Handle, current_stream
from minifsdp.engine.events import events
from minifsdp.engine.layout import Gradient, Layout
from minifsdp.engine.mesh import Group, MeshGroups

CommHook = Callable[..., Any]


@dataclass(slots=True)
class ReducePlan:
    """How one unit's gradients are reduced.

    Attributes:
        mesh: the shard group and the replicate group.
        indices: the parameters of this plan, as indices into `Layout.param_infos`; ``None`` for all.
        dtype: the reduce dtype.
        scaling: the divisors.
        hook: the user's communication hook, which replaces stages 2 to 5. For a sharded unit,
            ``hook(whole, local_shard)`` must fill ``local_shard``; otherwise ``hook(whole)`` must change ``whole``.
        all_reduces: whether to all-reduce over replicas in this backward. If ``False``, adds to `partial` instead.
        overlaps: whether the reduction runs while the next unit's backward computes.
        partial: sum of earlier backwards that was not all-reduced yet, with the numbers of its parameters.
        computed_in: `Layout.dtype` when `dtype` was chosen; ``None`` until the first forward.
        after_reduction: a function of the user, which gets the reduced shard before the layout accepts it.
        join_partial: a function of a case, for layouts whose backwards can have gradients of other parameters than
            `partial`. It gets the layout, the plan and the gradient, and makes their parameters equal.
    """

    mesh: MeshGroups
    dtype: torch.dtype
    scaling: Scaling
    hook: CommHook | None = None
    all_reduces: bool = True
    overlaps: bool = True
    partial: tuple[list[int], torch.Tensor] | None = None
    after_reduction: Callable[[torch.Tensor], None] | None = None
    indices: frozenset[int] | None = None
    computed_in: torch.dtype | None = None
    join_partial: Any = None

    @classmethod
    def mean(
        cls,
        mesh: MeshGroups,
        dtype: torch.dtype,
        indices: frozenset[int] | None = None,
    ) -> ReducePlan:
        """The mean over all ranks of the mesh."""
        return cls(
            mesh,
            dtype,
            Scaling.of(mesh.num_ranks, dtype),
            indices=indices,
        )

    def use(self, dtype: torch.dtype) -> None:
        """Changes the reduce dtype to ``dtype``."""
        self.dtype = dtype
        self.scaling = Scaling.of(self.scaling.before * self.scaling.after, dtype)


@dataclass(slots=True)
class _InFlight:
    """A reduction that was issued but is not complete. Keeps the inputs of its stages alive.

    Attributes:
        whole: the packed gradient.
        local_shard: the result of the stages that were issued.
        all_reduces: whether stage 4 is an all-reduce, a copy of the plan's value.
        scattered: handle of stages 1 to 3. After them, no stage reads `whole`.
        ended: handle of the later stages.
        event: the event of the collective that runs, if a recorder is installed.
        result: the shard for the layout; ``None`` for a partial sum.
        copied: an accelerator event after the copy to the host, if there is one.
        partial: the partial sum that this reduction includes.
        hook_input: the memory that a hook received. It is kept alive even if the hook gives the tensor other memory.
    """

    layout: Layout
    plan: ReducePlan
    gradient: Gradient
    whole: torch.Tensor
    local_shard: torch.Tensor
    all_reduces: bool
    scattered: Handle = COMPLETED
    ended: Handle = COMPLETED
    event: Any = None
    result: torch.Tensor | None = None
    copied: Any = None
    partial: torch.Tensor | None = None
    hook_input: torch.Tensor | None = None


class Reducer:
    """Reduces the gradients of all units of one root, one reduction in flight at a time.

    Args:
        comm_streams: the communication streams of the root.
        offloads: whether any unit has its shard and gradient on the CPU.

    Attributes:
        comm_streams: the communication streams, from the next reduction on.
    """

    def __init__(self, comm_streams: CommStreams, offloads: bool = False) -> None:
        self.comm_streams = comm_streams
        self._offloads = offloads
        self._in_flight: _InFlight | None = None
        # Gradients that are being copied to the CPU. The CPU must wait before it reads them. Dropped if backward fails.
        self._arriving: list[tuple[Layout, Gradient, torch.Tensor]] = []

    @property
    def next_group(self) -> Group | None:
        """The group of the all-reduce of the reduction in flight, if any."""
        last = self._in_flight
        # An accelerator has issued it already. A hook replaces it.
        if (
            last is None
            or last.plan.hook is not None
            or self.comm_streams.reduce.stream is not None
        ):
            return None
        return last.plan.mesh.replicate if last.all_reduces else None

    def reduce(self, layout: Layout, plan: ReducePlan, gradient: Gradient) -> None:
        """Issues a unit's reduction, then completes the previous one. All ranks must call it, in the same order."""
        before = self._in_flight
        if before is not None and before.plan is plan and not before.all_reduces:
            # The partial sum of the previous reduction is included in this one, so it must be complete.
            self._in_flight = None
            self._complete(before)
            before = None
        if plan.partial is not None and plan.partial[0] != gradient.indices:
            plan.join_partial(layout, plan, gradient)
        if before is not None and before.scattered is not COMPLETED:
            self.before_concat()
        # 1. On the compute stream, which allocated the parts, so their memory can be reused immediately. During
        #    backward, other code may write to memory that it shares with the gradient.
        is_written = (
            plan.overlaps
            or plan.mesh.shard is None
            or plan.hook is not None
            or plan.scaling.before != 1.0
        )
        whole = layout.pack(gradient, plan.dtype, is_written=is_written)
        gradient.parts.clear()
        new = _InFlight(layout, plan, gradient, whole, whole, plan.all_reduces)
        self.comm_streams.reduce.wait_compute()
        try:
            with self.comm_streams.reduce as comm_stream:
                new.scattered = comm_stream.handle(self._issue(new))
            if comm_stream.stream is not None:
                self._issue_end(new)
        except BaseException:
            # A hook has failed. Its memory must not be reused while the communication streams still use it.
            for comm_stream in (self.comm_streams.reduce, self.comm_streams.all_reduce):
                comm_stream.join()
            for comm_stream in (self.comm_streams.reduce, self.comm_streams.all_reduce):
                comm_stream.wait_compute()
            raise
        self._in_flight = new
        self._complete(before)
        if not plan.overlaps:
            del whole
            self.before_concat()
            self._in_flight = None
            self._complete(new)

    def before_concat(self, *_: Any) -> None:
        """Called before a gradient is concatenated or packed: frees the unsharded gradient in flight."""
        last = self._in_flight
        if last is not None and last.scattered is not COMPLETED:
            last.scattered.wait()
            last.scattered = COMPLETED
            last.whole = last.local_shard

    def finish(self) -> None:
        """Completes the reduction in flight. Afterwards the compute stream and the CPU can read every gradient."""
        last = self._in_flight
        self._in_flight = None
        self._complete(last)
        self._stop_cpu()
        for layout, gradient, result in self._arriving:
            layout.accept_gradient(gradient, result)
        self._arriving.clear()

    def finish_open(self) -> None:
        """Completes reductions that an earlier backward has left in flight, if any."""
        if self._in_flight is not None or self._arriving:
            self.finish()

    def finish_on_cpu(self) -> None:
        """Completes the reduction in flight, unless an accelerator can run it while the next micro-batch computes."""
        if self.comm_streams.reduce.stream is None:
            self.finish()

    def drop(self) -> None:
        """Waits for the reductions of a failed backward, because other ranks take part. Discards the results."""
        last = self._in_flight
        self._in_flight = None
        if last is not None:
            last.scattered.wait()
            last.ended.wait()
        self._stop_cpu()
        self._arriving.clear()

    def _stop_cpu(self) -> None:
        """With CPU offload, makes the CPU wait before it reads gradients and writes to shards that all-gathers read.

        The compute stream has waited for each reduction, but possibly not for the all-gather of an unused prefetch.
        """
        if self._offloads and self.comm_streams.all_gather.stream is not None:
            self.comm_streams.all_gather.join()
            current_stream(self.comm_streams.device).synchronize()

    def _issue(self, new: _InFlight) -> Handle:
        plan = new.plan
        shard = new.plan.mesh.shard
        replicas = new.plan.mesh.replicate
        name = new.layout.name
        if shard is not None:
            # A sharded unit needs only this rank's shard of the sum.
            new.local_shard = new.whole.new_empty(new.whole.numel() // shard.size)
        if plan.hook is not None:
            # Compression hooks give the tensor other memory while a stream still reads its previous memory.
            new.hook_input = new.whole.detach()
            if shard is None:
                plan.hook(new.whole)
            else:
                plan.hook(new.whole, new.local_shard)
            return COMPLETED
        # 2. Before the sum.
        plan.scaling.prepare(new.whole)
        if shard is not None:
            # 3. Over the shard group.
            if events.recorder is not None:
                new.event = events.recorder.reduction_begins("RS", new, shard, "reduce")
            return collectives.reduce_scatter(
                shard, new.local_shard, new.whole, name, new.gradient.indices
            )
        if replicas is not None and new.all_reduces:
            # 4. Without a shard group the all-reduce is the only collective, so it can be issued immediately.
            _add_partial(new)
            if events.recorder is not None:
                new.event = events.recorder.reduction_begins(
                    "AR", new, replicas, "reduce"
                )
            return collectives.all_reduce(
                replicas, new.local_shard, name, new.gradient.indices
            )
        return COMPLETED

    def _issue_end(self, new: _InFlight) -> None:
        """On an accelerator, issues the stages that run at completion on a CPU."""
        mesh = new.plan.mesh
        # The all-reduce uses another network than the reduce-scatter, so it has its own stream.
        is_hybrid = mesh.shard is not None and mesh.replicate is not None
        with (
            self.comm_streams.all_reduce
            if is_hybrid
            else self.comm_streams.reduce as comm_stream
        ):
            new.scattered.wait()
            _end(new)
            new.ended = comm_stream.handle()
            if new.result is not None and new.result is not new.local_shard:
                new.copied = comm_stream.stream.record_event()
                if not is_hybrid and mesh.shard is not None:
                    # The local shard was allocated on this stream, and no other stream reads it.
                    new.local_shard = new.result

    def _complete(self, old: _InFlight | None) -> None:
        if old is None:
            return
        is_ended = self.comm_streams.reduce.stream is not None
        if (handle := old.ended if is_ended else old.scattered) is not COMPLETED:
            handle.wait()
        if events.recorder is not None:
            events.recorder.finish(old.event)
        if not is_ended:
            _end(old)
        if old.result is None:
            return
        if old.copied is not None:
            if not reads_gradient(old.layout):
                self._arriving.append((old.layout, old.gradient, old.result))
                return
            old.copied.synchronize()
        # 6. The layout stores the gradient for the optimizer. A hook of the user may run an optimizer, after earlier
        #    all-gathers and before later ones.
        all_gather = self.comm_streams.all_gather
        runs_hooks = all_gather.stream is not None and _has_hooks(old.layout)
        if runs_hooks and old.layout.offloads:
            all_gather.synchronize()
        elif runs_hooks:
            all_gather.join()
        old.layout.accept_gradient(old.gradient, old.result)
        if runs_hooks:
            all_gather.wait_compute()


def reads_gradient(layout: Layout) -> bool:
    """Whether the layout reads the values of a gradient, to add them to an earlier one or for the user's hooks."""
    return _has_hooks(layout) or any(
        p.grad is not None for p in layout.local_parameters
    )


def _has_hooks(layout: Layout) -> bool:
    """Whether there are post-accumulate-grad hooks of the user."""
    return any(p._post_accumulate_grad_hooks for p in layout.local_parameters)


def _end(item: _InFlight) -> None:
    """Stages 4 and 5, `ReducePlan.after_reduction`, and the copy to the host. The caller has waited for the others."""
    plan = item.plan
    replicas = item.plan.mesh.replicate
    if plan.hook is None:
        if replicas is not None and (
            plan.mesh.shard is not None or not item.all_reduces
        ):
            _add_partial(item)
            if not item.all_reduces:
                plan.partial = (item.gradient.indices, item.local_shard)
                return
            if events.recorder is not None:
                item.event = events.recorder.reduction_begins(
                    "AR", item, replicas, "all_reduce"
                )
            # 4. Over the replicas.
            collectives.all_reduce(
                replicas, item.local_shard, item.layout.name, item.gradient.indices
            ).wait()
            if events.recorder is not None:
                events.recorder.finish(item.event)
        # 5. After the sum.
        plan.scaling.complete(item.local_shard)
        if plan.after_reduction is not None:
            plan.after_reduction(item.local_shard)
    item.result = item.local_shard
    if item.layout.offloads:
        if events.recorder is not None:
            events.recorder.begin(
                "D2H", item.layout.name, num_bytes=item.local_shard.nbytes
            )
        item.result = item.layout.copy_to_host(item.local_shard)


def _add_partial(item: _InFlight) -> None:
    """Adds the partial sum of earlier backwards."""
    if item.plan.partial is not None:
        (_, item.partial), item.plan.partial = item.plan.partial, None
        item.local_shard.add_(item.partial)
