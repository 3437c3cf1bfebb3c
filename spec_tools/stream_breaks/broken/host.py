"""Broken accesses and stops of the CPU while the device is running."""

from __future__ import annotations

from spec_tests.harness.edit import remove, replace
from spec_tests.streams.engines import Break

__all__ = ["BREAKS"]

BREAKS = [
    # --- copies to the device ---
    Break(
        "shards-given-back-while-they-are-copied",
        "After an evaluation the CPU can write to offloaded shards during their copy to the device.",
        remove("RootState.end_forward", "self.comm_streams.all_gather.synchronize()"),
        "each_offload_evaluated_and_changed",
    ),
    Break(
        "nobody-stops-for-the-gather-stream",
        "Synchronizing a communication stream does not stop the CPU.",
        remove("CommStream.synchronize", "self.stream.synchronize()"),
        "each_offload_evaluated_and_changed",
    ),
    Break(
        "blocking-copy-of-the-shard-flat",
        "The CPU waits for the copy of each offloaded shard.",
        replace("FlatLayout.all_gather", "$local.copy_($shard, non_blocking=True)", "$local.copy_($shard)"),
        "flat_offload",
        "stops",
    ),
    Break(
        "blocking-copy-of-the-shard-each",
        "The same defect exists in the layout with one DTensor per parameter.",
        replace("Bucket.prepare_all_gather", "$local.copy_($shard, non_blocking=True)", "$local.copy_($shard)"),
        "each_offload",
        "stops",
    ),
    Break(
        "blocking-copy-of-the-shard-extension",
        "The same defect exists for a parameter with an all-gather extension.",
        replace("ExtendedBucket.prepare_all_gather", "$shard.to($device, non_blocking=True)", "$shard.to($device)"),
        "each_extended_offload",
        "stops",
    ),
    Break(
        "batch-read-later",
        "The caller overwrites a pinned batch during its copy to the device.",
        replace("move", "$tensor.to(device)", "$tensor.to(device, non_blocking=True)"),
        "flat_pinned_batch",
    ),
    # --- copies to the host ---
    Break(
        "pinned-memory-of-flat-gradients-is-used-again",
        "A gradient is copied to pinned memory in which an earlier gradient still is.",
        replace(
            "FlatLayout.copy_to_host",
            "return local_shard.to(dtype).to(...)",
            "self._pinned = vars(self).get('_pinned', torch.empty_like(shard, dtype=dtype, pin_memory=True))\n"
            "return self._pinned.copy_(local_shard.to(dtype), non_blocking=True)",
        ),
        "flat_offload_with_kept_gradients",
        "wrong values",
    ),
    Break(
        "batches-that-stop-the-cpu",
        "The CPU waits for the copy of the batch check's answer.",
        replace("_all_reduce", "$tensor.to('cpu', non_blocking=True)", "$tensor.to('cpu')"),
        "each_in_batches_of_tokens",
        "overlap",
    ),
    Break(
        "batches-answered-without-an-event",
        "No event is recorded for the copy of the batch check's answer.",
        replace(
            "_all_reduce",
            "event = $recorded\nreturn SimpleNamespace(wait=event.synchronize)",
            "return SimpleNamespace(wait=bool)",
        ),
        "each_in_batches_of_tokens",
    ),
    Break(
        "gradients-read-before-they-arrive",
        "At the end of backward the CPU does not wait for the copies of the gradients.",
        remove("Reducer._stop_cpu", "current_stream($device).synchronize()"),
        "flat_offload",
    ),
    Break(
        "another-device-synchronized",
        "The CPU waits for the current device instead of the unit's device.",
        replace("Reducer._stop_cpu", "current_stream($device)", "torch.get_device_module($device).current_stream()"),
        "originals_offload_on_another_device_after_an_error",
    ),
    Break(
        "prefetched-in-vain-and-not-waited-for",
        "At the end of backward the CPU can write to a shard that an unused prefetch reads.",
        remove("Reducer._stop_cpu", "self.comm_streams.all_gather.join()"),
        "each_offload_prefetching_in_vain",
    ),
    Break(
        "copies-not-waited-for-after-an-error",
        "After an error the CPU writes to shards during their copy to the device.",
        remove("Reducer.drop", "self._stop_cpu()"),
        "originals_offload_after_an_error_in_backward",
    ),
    Break(
        "accumulates-before-it-arrives",
        "The CPU accumulates a gradient before its copy has finished.",
        remove("Reducer._complete", "old.copied.synchronize()"),
        "flat_offload_accumulating",
    ),
    Break(
        "copied-event-of-the-wrong-stream",
        "The CPU's event is recorded on the compute stream instead of the stream that copies.",
        replace(
            "Reducer._issue_end",
            "$stream.stream.record_event()",
            "torch.get_device_module(new.whole.device).default_stream().record_event()",
        ),
        "flat_offload_accumulating",
    ),
    Break(
        "blocking-copies-flat",
        "The copy of each unit's gradient stops the CPU.",
        replace("FlatLayout.copy_to_host", "$shard.to($device, non_blocking=True)", "$shard.to($device)"),
        "flat_offload",
        "stops",
    ),
    Break(
        "cast-on-the-host-each",
        "The CPU casts a gradient before it has arrived.",
        replace(
            "PerParameterLayout.copy_to_host",
            "$shard.to($dtype).to($device, non_blocking=True)",
            "$shard.to($device, non_blocking=True).to($dtype)",
        ),
        "each_offload_in_bf16",
    ),
    Break(
        "accepted-before-it-arrives",
        "Without pinned memory the CPU does not wait for the copy.",
        replace(
            "PerParameterLayout.accept_gradient",
            "local_shard.to(device)",
            "local_shard.to(device, non_blocking=True)",
        ),
        "each_offload_not_pinned_accumulating",
    ),
    Break(
        "gradient-assigned-across-devices",
        "A gradient on the device is assigned to a parameter on the CPU.",
        replace(
            "assign_gradient", "$shapes and $dtypes and gradient.device == parameter.device", "$shapes and $dtypes"
        ),
        "flat_offload_no_sync",
        "exception",
    ),
]
