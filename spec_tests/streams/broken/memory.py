"""Broken memory management: reuse of memory, peak memory, and stops of the CPU because of memory."""

from __future__ import annotations

from spec_tests.streams.engines import Break

__all__ = ["BREAKS"]

LIFETIME, BUCKET, PER_PARAMETER = "engine/lifetime.py", "engine/bucket.py", "engine/per_param.py"
EXTENSION, REDUCE, UNIT, HOOKS = "engine/extension.py", "engine/reduce.py", "engine/unit.py", "engine/hooks.py"

BREAKS = [
    # --- memory of the all-gather stream that the compute stream reads ---
    Break(
        "no-record-stream",
        LIFETIME,
        "        storage_owner.record_stream(compute_stream)\n",
        "",
        "The allocator reuses memory that the compute stream still reads.",
        "flat_full",
    ),
    Break(
        "record-stream-of-the-default-stream",
        LIFETIME,
        "        storage_owner.record_stream(compute_stream)\n",
        "        storage_owner.record_stream(torch.get_device_module(storage_owner.device).default_stream())\n",
        "record_stream receives the default stream instead of the stream that reads.",
        "flat_evaluating_on_a_stream_of_the_user",
    ),
    Break(
        "record-stream-after-the-release",
        LIFETIME,
        "        storage_owner.record_stream(compute_stream)\n        event = compute_stream.record_event()\n"
        "    storage_owner.untyped_storage().resize_(0)\n",
        "        event = compute_stream.record_event()\n    storage_owner.untyped_storage().resize_(0)\n"
        "    if event is not DONE:\n        storage_owner.record_stream(compute_stream)\n",
        "record_stream is called after the memory was released.",
        "flat_full",
    ),
    Break(
        "unsharded-freed-by-hand",
        "engine/flat.py",
        "        return None if self._unsharded.is_borrowed else lifetime.release(self._unsharded.alias)\n",
        "        if not self._unsharded.is_borrowed:\n            self._unsharded.alias.untyped_storage().resize_(0)\n"
        "        return None\n",
        "The flat parameter is freed without record_stream.",
        "flat_full",
    ),
    Break(
        "freed-before-its-last-use",
        HOOKS,
        "            unit.wait()\n            unit.layout.use_unsharded_params_again()\n",
        "            unit.wait()\n            unit.layout.use_unsharded_params_again()\n            unit.reshard()\n",
        "A unit is resharded before its backward computes.",
        "flat_full",
    ),
    Break(
        "buffer-given-back-at-once",
        BUCKET,
        "            comm_stream.wait_compute()\n",
        "",
        "The all-gather buffer is released before the copy-out has finished.",
        "each_full",
    ),
    Break(
        "only-concatenated-rows-are-followed",
        BUCKET,
        "                self._concatenate(sorted_by_rank, source)\n"
        "            # The buffer's memory returns to its stream, which must not reuse it before the copy is done.\n"
        "            comm_stream.wait_compute()\n",
        "                self._concatenate(sorted_by_rank, source)\n                comm_stream.wait_compute()\n",
        "The communication stream waits only for the copy-out of parameters sharded along another dimension.",
        "each_full",
    ),
    Break(
        "sorted-rows-in-place",
        BUCKET,
        '        self._copies = not is_sorted or self.device.type != "cpu"\n',
        "        self._copies = not is_sorted\n",
        "A bucket of one parameter is all-gathered in place into memory that no stream holds.",
        "each_with_single_parameters",
    ),
    Break(
        "copies-out-on-the-gather-stream",
        PER_PARAMETER,
        "            has_new_leaves |= bucket.copy_out()\n",
        "            with bucket._in_flight[2]:\n                has_new_leaves |= bucket.copy_out()\n",
        "The copy-out runs on the all-gather stream, and its memory is freed like memory of the compute stream.",
        "each_full",
    ),
    Break(
        "extension-neither-tells-nor-waits",
        EXTENSION,
        "                lifetime.release(tensor)\n        self._freed_at = compute_event(self.device)\n",
        "                tensor.untyped_storage().resize_(0)\n",
        "The buffers of an all-gather extension are freed while the compute stream reads them.",
        "each_extended_with_metadata",
    ),
    Break(
        "extension-keeps-no-metadata",
        EXTENSION,
        "            comm_stream.wait_compute(self._freed_at)\n",
        "            pass\n",
        "An extension's metadata is overwritten while the compute stream reads it.",
        "each_extended_with_metadata",
    ),
    # --- inputs of a reduction ---
    Break(
        "gradients-kept-until-the-end",
        REDUCE,
        "        gradient.parts.clear()\n        new",
        "        new",
        "Gradients stay in memory until their reduction is complete.",
        "each_full",
        "peak",
    ),
    Break(
        "packed-on-the-reduce-stream",
        REDUCE,
        "        whole = layout.pack(gradient, plan.dtype, is_written=is_written)\n",
        "        self._comm_streams.reduce.wait_compute()\n        with self._comm_streams.reduce:\n"
        "            whole = layout.pack(gradient, plan.dtype, is_written=is_written)\n",
        "Gradients of the compute stream are freed while the reduce stream packs them.",
        "each_full",
    ),
    Break(
        "whole-dropped-at-once",
        REDUCE,
        "                new.scattered = comm_stream.handle(self._issue(new))\n",
        "                new.scattered = comm_stream.handle(self._issue(new))\n"
        "            del whole\n            new.whole = new.local_shard\n",
        "The unsharded gradient is dropped while the reduce-scatter reads it.",
        "flat_full",
    ),
    Break(
        "whole-dropped-without-waiting",
        REDUCE,
        "        if last is not None and last.scattered is not COMPLETED:\n            last.scattered.wait()\n",
        "        if last is not None and last.scattered is not COMPLETED:\n",
        "The unsharded gradient is dropped before the reduce-scatter has read it.",
        "each_full",
    ),
    Break(
        "partial-sum-dropped",
        REDUCE,
        "(_, item.partial), item.plan.partial = item.plan.partial, None\n        item.local_shard.add_(item.partial)\n",
        "(_, row), item.plan.partial = item.plan.partial, None\n        item.local_shard.add_(row)\n",
        "A partial sum is freed while the all-reduce stream adds it.",
        "each_hybrid_partial",
    ),
    Break(
        "piece-dropped-on-another-stream",
        REDUCE,
        "                if not is_hybrid and mesh.shard is not None:\n",
        "                if mesh.shard is not None:\n",
        "A local shard of the reduce stream is freed while the all-reduce stream copies it.",
        "each_hybrid_offload_in_bf16",
    ),
    Break(
        "whole-dropped-while-copied",
        REDUCE,
        "                if not is_hybrid and mesh.shard is not None:\n",
        "                if not is_hybrid:\n",
        "A gradient of a unit that is not sharded is dropped while it is copied to the host.",
        "flat_not_sharded_offload",
    ),
    Break(
        "reduced-in-the-memory-of-the-input",
        REDUCE,
        "            new.local_shard = new.whole.new_empty(new.whole.numel() // shard.size)\n",
        "            new.local_shard = new.whole.tensor_split(shard.size)[shard.rank]\n",
        "The result of a reduce-scatter is a part of its input, so `.grad` keeps the memory of the unsharded gradient.",
        "flat_full_of_many_blocks",
        "peak",
    ),
    Break(
        "piece-kept-while-it-is-on-the-host",
        REDUCE,
        "                    new.local_shard = new.result\n",
        "                    pass\n",
        "A local shard stays on the device after its copy to the host was issued.",
        "each_offload",
        "peak",
    ),
    Break(
        "piece-dropped-while-copied",
        REDUCE,
        "        item.result = item.layout.copy_to_host(item.local_shard)\n",
        "        item.result = item.local_shard = item.layout.copy_to_host(item.local_shard)\n",
        "A reduced gradient is freed while its copy to the host reads it, as in torch before PR 180665.",
        "each_hybrid_offload_in_bf16",
    ),
    Break(
        "dropped-after-an-error",
        REDUCE,
        "        if last is not None:\n            last.scattered.wait()\n            last.ended.wait()\n",
        "",
        "After an error a running reduction is dropped.",
        "flat_after_an_error_in_backward",
    ),
    # --- the limiter ---
    Break(
        "limiter-is-not-told",
        UNIT,
        "            self.limiter.released(event)\n",
        "            pass\n",
        "The limiter records no release, so the CPU never waits.",
        "flat_full_of_many_blocks",
        "peak",
    ),
    Break(
        "limiter-does-not-wait",
        LIFETIME,
        "        oldest.synchronize()\n",
        "",
        "The limiter treats the oldest release as complete.",
        "flat_full_of_many_blocks",
        "peak",
    ),
    Break(
        "limiter-thinks-all-is-done",
        LIFETIME,
        "        event = compute_stream.record_event()\n",
        "        event = DONE\n",
        "Each release counts as complete immediately.",
        "flat_full_of_many_blocks",
        "peak",
    ),
    Break(
        "limiter-allows-three",
        LIFETIME,
        "def __init__(self, enabled: bool, num_in_flight: int = 2)",
        "def __init__(self, enabled: bool, num_in_flight: int = 3)",
        "Three units are in flight.",
        "flat_full_of_many_blocks",
        "peak",
    ),
    Break(
        "limiter-allows-one",
        LIFETIME,
        "def __init__(self, enabled: bool, num_in_flight: int = 2)",
        "def __init__(self, enabled: bool, num_in_flight: int = 1)",
        "Only one unit is in flight.",
        "flat_full_of_many_blocks",
        "overlap",
    ),
    Break(
        "never-freed-after-forward",
        HOOKS,
        "            unit.reshard(to_smaller_mesh=unit.awaits_backward and self.is_recorded)\n",
        "            pass\n",
        "No unit is resharded after its forward.",
        "flat_full_of_many_blocks",
        "peak",
    ),
]
