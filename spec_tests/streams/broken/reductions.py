"""Broken reductions: waits, follows and streams for gradients."""

from __future__ import annotations

from spec_tests.streams.engines import Break

__all__ = ["BREAKS"]

REDUCE, HOOKS = "engine/reduce.py", "engine/hooks.py"

ISSUE_END = """\
            new.scattered.wait()
            _end(new)
            new.ended = comm_stream.handle()
"""

ISSUED = """\
            if comm_stream.stream is not None:
                self._issue_end(new)
"""

BREAKS = [
    Break(
        "reduces-before-backward",
        REDUCE,
        "        self._comm_streams.reduce.wait_compute()\n",
        "",
        "The reduce stream does not wait for the backward that makes the gradient.",
        "flat_full",
    ),
    Break(
        "follows-inside-of-the-stream",
        REDUCE,
        "        self._comm_streams.reduce.wait_compute()\n"
        "        try:\n            with self._comm_streams.reduce as comm_stream:\n",
        "        try:\n            with self._comm_streams.reduce as comm_stream:\n"
        "                comm_stream.wait_compute()\n",
        "The reduce stream waits for itself instead of the compute stream.",
        "flat_full",
    ),
    Break(
        "reduction-not-waited-for",
        REDUCE,
        "        (old.ended if is_ended else old.scattered).wait()\n",
        "",
        "The compute stream does not wait for the reduction of a gradient.",
        "flat_full",
    ),
    Break(
        "hook-not-waited-for",
        REDUCE,
        ISSUED,
        ISSUED + "            if plan.hook is not None:\n                new.scattered = new.ended = COMPLETED\n",
        "The compute stream does not wait for a communication hook.",
        "flat_hook",
    ),
    Break(
        "last-reduction-not-waited-for",
        REDUCE,
        "        self._complete(last)\n",
        "        if last is not None:\n            last.ended = COMPLETED\n        self._complete(last)\n",
        "At the end of backward the last reduction counts as complete.",
        "flat_full",
    ),
    Break(
        "last-reduction-forgotten",
        HOOKS,
        "            self.reducer.finish()\n",
        "",
        "The end of backward does not complete the last reduction.",
        "flat_full",
        "wrong values",
    ),
    Break(
        "stepped-in-backward-not-followed",
        REDUCE,
        "            all_gather.wait_compute()\n",
        "            pass\n",
        "An all-gather in the same backward does not wait for the optimizer step of a user's hook.",
        "each_used_often_with_the_optimizer_in_backward",
    ),
    Break(
        "steps-while-gathers-read",
        REDUCE,
        "            all_gather.join()\n",
        "            pass\n",
        "A user's hook runs the optimizer step while a prefetched all-gather reads the shard.",
        "originals_used_twice_with_the_optimizer_in_backward",
    ),
    Break(
        "optimizer-writes-while-gathers-read",
        "engine/unit.py",
        "            return\n        if self.state is State.GATHERING:\n            self.wait()\n",
        "            return\n",
        "After backward the optimizer writes to a shard that an unused prefetch still reads.",
        "each_prefetching_in_vain",
    ),
    Break(
        "optimizer-writes-while-gathers-read-forward",
        "engine/root.py",
        "        self.comm_streams.all_gather.join()\n",
        "",
        "After a forward without backward the optimizer writes to a shard that an unused prefetch still reads.",
        "flat_loss_abandoned_with_a_block_left_out",
    ),
    Break(
        "joining-a-stream-does-nothing",
        "engine/comm_streams.py",
        "            current_stream(self._device).wait_stream(self.stream)\n",
        "            pass\n",
        "The compute stream never joins a communication stream.",
        "originals_used_twice_with_the_optimizer_in_backward",
    ),
    Break(
        "promise-of-the-first-stage",
        REDUCE,
        "            new.ended = comm_stream.handle()\n",
        "",
        "The handle completes before the division and the copies.",
        "flat_full",
    ),
    Break(
        "promise-before-the-last-stage",
        REDUCE,
        ISSUE_END,
        "            new.scattered.wait()\n            handle = comm_stream.handle()\n            _end(new)\n"
        "            new.ended = handle\n",
        "The event is recorded before the last stages are issued.",
        "flat_full",
    ),
    Break(
        "all-reduce-before-the-reduce-scatter",
        REDUCE,
        ISSUE_END,
        "            _end(new)\n            new.ended = comm_stream.handle()\n",
        "The all-reduce stream does not wait for the reduce stream.",
        "each_hybrid",
    ),
    Break(
        "all-reduce-not-waited-for",
        REDUCE,
        "item.local_shard, item.layout.name, item.gradient.numbers).wait()\n",
        "item.local_shard, item.layout.name, item.gradient.numbers)\n",
        "The division does not wait for the all-reduce (threaded backend).",
        "hybrid_over_a_backend_with_threads",
    ),
    Break(
        "all-reduce-on-the-reduce-stream",
        REDUCE,
        "        is_hybrid = mesh.shard is not None and mesh.replicate is not None\n",
        "        is_hybrid = False\n",
        "The all-reduce over replicas delays the next reduce-scatter.",
        "each_hybrid",
        "overlap",
    ),
    Break(
        "ends-on-the-compute-stream",
        REDUCE,
        "            if comm_stream.stream is not None:\n                self._issue_end(new)\n",
        "            if comm_stream.stream is not None:\n"
        "                new.scattered.wait()\n                _end(new)\n",
        "The compute stream waits for each reduction and runs the division itself.",
        "flat_full",
        "overlap",
    ),
    Break(
        "completed-at-once",
        REDUCE,
        "        if not plan.overlaps:\n",
        "        if True:\n",
        "The compute stream waits for each reduction before it goes on.",
        "flat_full",
        "overlap",
    ),
    Break(
        "hook-stream-does-not-wait",
        REDUCE,
        "    stream.wait_stream(here)\n",
        "",
        "A hook on a user's stream reads the sum before it has arrived.",
        "each_with_a_hook_on_its_own_stream",
    ),
    Break(
        "division-before-the-sum-on-the-compute-stream",
        REDUCE,
        "        plan.scaling.prepare(new.whole)\n",
        "        if new.whole.is_cpu:\n            plan.scaling.prepare(new.whole)\n        else:\n"
        "            main = torch.get_device_module(new.whole.device).default_stream(new.whole.device)\n"
        "            with torch.get_device_module(new.whole.device).stream(main):\n"
        "                plan.scaling.prepare(new.whole)\n",
        "The division before a float16 sum runs on the compute stream, and the reduce-scatter does not wait for it.",
        "flat_in_float16",
    ),
    Break(
        "hybrid-division-before-the-sum-on-the-all-reduce-stream",
        REDUCE,
        "        plan.scaling.prepare(new.whole)\n",
        "        with self._comm_streams.all_reduce:\n            plan.scaling.prepare(new.whole)\n",
        "The division before a float16 sum runs on the all-reduce stream.",
        "each_hybrid_in_float16",
    ),
    Break(
        "hook-stream-not-waited-for",
        REDUCE,
        "    here.wait_stream(stream)\n",
        "    pass\n",
        "The reduction does not wait for a hook on a user's stream.",
        "each_with_a_hook_on_its_own_stream",
    ),
]
