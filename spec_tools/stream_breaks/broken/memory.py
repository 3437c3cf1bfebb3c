"""Broken memory management: reuse of memory, peak memory, and stops of the CPU because of memory."""

from __future__ import annotations

from spec_tests.harness.edit import remove, replace
from spec_tests.streams.engines import Break

__all__ = ["BREAKS"]

BREAKS = [
    # --- memory of the all-gather stream that the compute stream reads ---
    Break(
        "no-record-stream",
        "The allocator reuses memory that the compute stream still reads.",
        remove("release", "storage_owner.record_stream(compute_stream)"),
        "flat_full",
    ),
    Break(
        "record-stream-of-the-default-stream",
        "record_stream receives the default stream instead of the stream that reads.",
        replace(
            "release",
            "$tensor.record_stream(compute_stream)",
            "$tensor.record_stream(torch.get_device_module($tensor.device).default_stream())",
        ),
        "flat_evaluating_on_a_stream_of_the_user",
    ),
    Break(
        "record-stream-after-the-release",
        "record_stream is called after the memory was released.",
        replace(
            "release",
            "storage_owner.record_stream($stream)\nevent = $event",
            "event = $event\nstorage_owner.untyped_storage().resize_(0)\nstorage_owner.record_stream($stream)",
        ),
        "flat_full",
    ),
    Break(
        "buffer-given-back-at-once",
        "The all-gather buffer is released before the copy-out has finished.",
        remove("Bucket.copy_out", "comm_stream.wait_compute()"),
        "each_full",
    ),
    Break(
        "sorted-rows-in-place",
        "A bucket of one parameter is all-gathered in place into memory that no stream holds.",
        replace("Bucket.__init__", "not is_sorted or self.device.type != 'cpu'", "not is_sorted"),
        "each_with_single_parameters",
    ),
    Break(
        "copies-out-on-the-gather-stream",
        "The copy-out runs on the all-gather stream, and its memory is freed like memory of the compute stream.",
        replace(
            "PerParameterLayout.wait",
            "bucket.copy_out()",
            "with bucket._in_flight[2]:\n    bucket.copy_out()",
        ),
        "each_full",
    ),
    Break(
        "forgets-the-second-stream",
        "The memory of parameters is freed while another stream than the one that allocated it reads them.",
        replace("Bucket.free", "self._unsharded.record_stream(stream)", "pass"),
        "each_resharded_on_another_stream",
    ),
    Break(
        "extension-neither-tells-nor-waits",
        "The buffers of an all-gather extension are freed while the compute stream reads them.",
        replace(
            "ExtendedBucket.free",
            "for $tensor in $tensors:\n    ...\nself._freed_at = $event",
            "for $tensor in $tensors:\n    $tensor.untyped_storage().resize_(0)",
        ),
        "each_extended_with_metadata",
    ),
    Break(
        "extension-keeps-no-metadata",
        "An extension's metadata is overwritten while the compute stream reads it.",
        remove("ExtendedBucket.prepare_all_gather", "comm_stream.wait_compute(self._freed_at)"),
        "each_extended_with_metadata",
    ),
    # --- inputs of a reduction ---
    Break(
        "gradients-kept-until-the-end",
        "Gradients stay in memory until their reduction is complete.",
        remove("Reducer.reduce", "gradient.parts.clear()"),
        "each_full",
        "peak",
    ),
    Break(
        "packed-on-the-reduce-stream",
        "Gradients of the compute stream are freed while the reduce stream packs them.",
        replace(
            "Reducer.reduce",
            "whole = $packed",
            "self.comm_streams.reduce.wait_compute()\nwith self.comm_streams.reduce:\n    whole = $packed",
        ),
        "each_full",
    ),
    Break(
        "whole-dropped-without-waiting",
        "The unsharded gradient is dropped before the reduce-scatter has read it.",
        remove("Reducer.before_concat", "last.scattered.wait()"),
        "each_full",
    ),
    Break(
        "partial-sum-dropped",
        "A partial sum is freed while the all-reduce stream adds it.",
        replace(
            "_add_partial",
            "($_, item.partial), item.plan.partial = $values\nitem.local_shard.add_(item.partial)",
            "($_, partial), item.plan.partial = $values\nitem.local_shard.add_(partial)",
        ),
        "each_hybrid_partial",
    ),
    Break(
        "whole-dropped-while-copied",
        "A gradient of a unit that is not sharded is dropped while it is copied to the host.",
        replace("Reducer._issue_end", "not is_hybrid and mesh.shard is not None", "not is_hybrid"),
        "flat_not_sharded_offload",
    ),
    Break(
        "piece-dropped-while-copied",
        "A reduced gradient is freed while its copy to the host reads it, as in torch before PR 180665.",
        replace("_end", "item.result = item.layout.$copy($shard)", "item.result = $shard = item.layout.$copy($shard)"),
        "each_hybrid_offload_in_bf16",
    ),
    Break(
        "reduced-in-the-memory-of-the-input",
        "The result of a reduce-scatter is a part of its input, so `.grad` keeps the memory of the unsharded gradient.",
        replace("Reducer._issue", "new.whole.new_empty(...)", "new.whole.tensor_split(shard.size)[shard.rank]"),
        "flat_full_of_many_blocks",
        "peak",
    ),
    # --- the limiter ---
    Break(
        "limiter-does-not-wait",
        "The limiter treats the oldest release as complete.",
        remove("RateLimiter.throttle", "$oldest.synchronize()"),
        "flat_full_of_many_blocks",
        "peak",
    ),
    Break(
        "limiter-thinks-all-is-done",
        "Each release counts as complete immediately.",
        replace("release", "compute_stream.record_event()", "DONE"),
        "flat_full_of_many_blocks",
        "peak",
    ),
    Break(
        "limiter-allows-one",
        "Only one unit is in flight.",
        replace("RateLimiter.__init__", "self.num_in_flight = num_in_flight", "self.num_in_flight = num_in_flight = 1"),
        "flat_full_of_many_blocks",
        "overlap",
    ),
]
