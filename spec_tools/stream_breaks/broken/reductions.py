"""Broken reductions: waits, follows and streams for gradients."""

from __future__ import annotations

from spec_tests.harness.edit import always, remove, replace
from spec_tests.streams.engines import Break

__all__ = ["BREAKS"]

BREAKS = [
    Break(
        "reduces-before-backward",
        "The reduce stream does not wait for the backward that makes the gradient.",
        remove("Reducer.reduce", "self.comm_streams.reduce.wait_compute()"),
        "flat_full",
    ),
    Break(
        "reduction-not-waited-for",
        "The compute stream does not wait for the reduction of a gradient.",
        remove("Reducer._complete", "handle.wait()"),
        "flat_full",
    ),
    Break(
        "hook-not-waited-for",
        "The compute stream does not wait for a communication hook.",
        replace(
            "Reducer.reduce",
            "self._in_flight = new",
            "if plan.hook is not None:\n    new.scattered = new.ended = COMPLETED\nself._in_flight = new",
        ),
        "flat_hook",
    ),
    Break(
        "stepped-in-backward-not-followed",
        "An all-gather in the same backward does not wait for the optimizer step of a user's hook.",
        remove("Reducer._complete", "all_gather.wait_compute()"),
        "each_used_often_with_the_optimizer_in_backward",
    ),
    Break(
        "steps-while-gathers-read",
        "A user's hook runs the optimizer step while a prefetched all-gather reads the shard.",
        remove("Reducer._complete", "all_gather.join()"),
        "originals_used_twice_with_the_optimizer_in_backward",
    ),
    Break(
        "steps-on-the-cpu-while-gathers-read",
        "A user's hook steps on the CPU while a prefetched all-gather reads the shard.",
        replace("Reducer._complete", "all_gather.synchronize()", "all_gather.join()"),
        "originals_offload_used_twice_with_the_optimizer_in_backward",
    ),
    Break(
        "optimizer-writes-while-gathers-read",
        "After backward the optimizer writes to a shard that an unused prefetch still reads.",
        remove("Unit.reshard", "self.wait()"),
        "each_prefetching_in_vain",
    ),
    Break(
        "optimizer-writes-while-gathers-read-forward",
        "After a forward without backward the optimizer writes to a shard that an unused prefetch still reads.",
        remove("RootState.end_forward", "self.comm_streams.all_gather.join()"),
        "flat_loss_abandoned_with_a_block_left_out",
    ),
    Break(
        "joining-a-stream-does-nothing",
        "The compute stream never joins a communication stream.",
        remove("CommStream.join", "current_stream($device).wait_stream(self.stream)"),
        "originals_used_twice_with_the_optimizer_in_backward",
    ),
    Break(
        "promise-before-the-last-stage",
        "The event is recorded before the last stages are issued.",
        replace(
            "Reducer._issue_end",
            "_end(new)\nnew.ended = $stream.handle()",
            "handle = $stream.handle()\n_end(new)\nnew.ended = handle",
        ),
        "flat_full",
    ),
    Break(
        "all-reduce-before-the-reduce-scatter",
        "The all-reduce stream does not wait for the reduce stream.",
        remove("Reducer._issue_end", "new.scattered.wait()"),
        "each_hybrid",
    ),
    Break(
        "reduce-scatter-without-a-handle",
        "The all-reduce stream does not wait, because the reduce-scatter has no handle.",
        replace("Reducer.reduce", "new.scattered = $stream.handle($work)", "$work\nnew.scattered = COMPLETED"),
        "each_hybrid",
    ),
    Break(
        "all-reduce-not-waited-for",
        "The division does not wait for the all-reduce (threaded backend).",
        replace("_end", "$collective.wait()", "$collective"),
        "hybrid_over_a_backend_with_threads",
    ),
    Break(
        "all-reduce-on-the-reduce-stream",
        "The all-reduce over replicas delays the next reduce-scatter.",
        replace("Reducer._issue_end", "is_hybrid = $is_hybrid", "is_hybrid = False"),
        "each_hybrid",
        "overlap",
    ),
    Break(
        "completed-at-once",
        "The compute stream waits for each reduction before it goes on.",
        always("Reducer.reduce", "not plan.overlaps"),
        "flat_full",
        "overlap",
    ),
    Break(
        "hook-stream-does-not-wait",
        "A hook on a user's stream reads the sum before it has arrived.",
        remove("on_stream", "stream.wait_stream(here)"),
        "each_with_a_hook_on_its_own_stream",
    ),
    Break(
        "hook-stream-not-waited-for",
        "The reduction does not wait for a hook on a user's stream.",
        remove("on_stream", "here.wait_stream(stream)"),
        "each_with_a_hook_on_its_own_stream",
    ),
    Break(
        "hybrid-division-before-the-sum-on-the-all-reduce-stream",
        "The division before a float16 sum runs on the all-reduce stream.",
        replace(
            "Reducer._issue",
            "plan.scaling.prepare($whole)",
            "with self.comm_streams.all_reduce:\n    plan.scaling.prepare($whole)",
        ),
        "each_hybrid_in_float16",
    ),
    Break(
        "dropped-after-an-error",
        "After an error a running reduction is dropped.",
        remove("Reducer.drop", "last.scattered.wait()\nlast.ended.wait()"),
        "flat_after_an_error_in_backward",
    ),
]
