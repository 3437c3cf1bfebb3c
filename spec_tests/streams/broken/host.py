"""Broken accesses and stops of the CPU while the device is running."""

from __future__ import annotations

from spec_tests.streams.engines import Break

__all__ = ["BREAKS"]

REDUCE, FLAT, BUCKET, PER_PARAMETER = "engine/reduce.py", "engine/flat.py", "engine/bucket.py", "engine/per_param.py"
LAYOUT = "engine/layout.py"

FLAT_COPY = "        return local_shard.to(dtype).to(shard.device, non_blocking=True)\n"
EACH_COPY = "        return local_shard.to(dtypes.pop()).to(self.params[0].local_shard.device, non_blocking=True)\n"
HOOKED, GIVEN = "self.has_gradient_hooks", "any(p.grad is not None for p in self.local_parameters())"

BREAKS = [
    # --- copies to the device ---
    Break(
        "shards-given-back-while-they-are-copied",
        "engine/root.py",
        "            self.comm_streams.all_gather.synchronize()\n",
        "            pass\n",
        "After an evaluation the CPU can write to offloaded shards during their copy to the device.",
        "each_offload_evaluated_and_changed",
    ),
    Break(
        "nobody-stops-for-the-gather-stream",
        "engine/comm_streams.py",
        "            self.stream.synchronize()\n",
        "            pass\n",
        "Synchronizing a communication stream does not stop the CPU.",
        "each_offload_evaluated_and_changed",
    ),
    # --- memory of the host ---
    Break(
        "pinned-memory-of-flat-gradients-is-used-again",
        FLAT,
        FLAT_COPY,
        "        if '_pinned' not in vars(self):\n"
        "            self._pinned = torch.empty(local_shard.shape, dtype=dtype, pin_memory=not local_shard.is_cpu)\n"
        "        return self._pinned.copy_(local_shard.to(dtype), non_blocking=True)\n",
        "A gradient is copied to pinned memory in which an earlier gradient still is.",
        "flat_offload_with_kept_gradients",
        "wrong values",
    ),
    Break(
        "pinned-memory-of-gradients-is-used-again",
        PER_PARAMETER,
        EACH_COPY,
        "        dtype = dtypes.pop()\n        if '_pinned' not in vars(self):\n"
        "            self._pinned = torch.empty(local_shard.shape, dtype=dtype, pin_memory=not local_shard.is_cpu)\n"
        "        return self._pinned.copy_(local_shard.to(dtype), non_blocking=True)\n",
        "The same defect exists in the layout with one DTensor per parameter.",
        "each_offload_with_kept_gradients",
        "wrong values",
    ),
    # --- copies to the host ---
    Break(
        "batches-answered-without-an-event",
        "batches.py",
        'num_without, event = num_without.to("cpu", non_blocking=True), comm_stream.stream.record_event()\n'
        "            # It is complete when the CPU has the result, so the watchdog sees a rank that waits for it.\n"
        "            work.wait_for(event.synchronize)\n",
        'num_without = num_without.to("cpu", non_blocking=True)\n            work.wait_for(bool)\n',
        "No event is recorded for the copy of the batch check's answer.",
        "each_in_batches_of_tokens",
    ),
    Break(
        "batches-given-before-the-answer",
        "batches.py",
        "        work.wait()\n        return",
        "        return",
        "The CPU reads the answer of the batch check before it is copied.",
        "each_in_batches_of_tokens",
    ),
    Break(
        "gradients-read-before-they-arrive",
        REDUCE,
        "            current_stream(self._comm_streams.device).synchronize()\n",
        "            pass\n",
        "At the end of backward the CPU does not wait for the copies of the gradients.",
        "flat_offload",
    ),
    Break(
        "offload-not-told",
        "engine/root.py",
        "offloads=any(unit.layout.offloads for unit in self.units)",
        "offloads=False",
        "The reducer assumes that no gradients go to the CPU.",
        "each_offload",
    ),
    Break(
        "prefetched-in-vain-and-not-waited-for",
        REDUCE,
        "            self._comm_streams.all_gather.join()\n",
        "",
        "At the end of backward the CPU can write to a shard that an unused prefetch reads.",
        "each_offload_prefetching_in_vain",
    ),
    Break(
        "steps-on-the-cpu-while-gathers-read",
        REDUCE,
        "            all_gather.synchronize()\n",
        "            all_gather.join()\n",
        "A user's hook steps on the CPU while a prefetched all-gather reads the shard.",
        "originals_offload_used_twice_with_the_optimizer_in_backward",
    ),
    Break(
        "copies-not-waited-for-at-the-end",
        REDUCE,
        "        self._stop_cpu()\n        for",
        "        for",
        "The end of backward waits for the last reduction but not for the copies.",
        "flat_offload",
    ),
    Break(
        "copies-not-waited-for-after-an-error",
        REDUCE,
        "            last.ended.wait()\n        self._stop_cpu()\n",
        "            last.ended.wait()\n",
        "After an error the CPU writes to shards during their copy to the device.",
        "originals_offload_after_an_error_in_backward",
    ),
    Break(
        "another-device-synchronized",
        REDUCE,
        "            current_stream(self._comm_streams.device).synchronize()\n",
        "            torch.get_device_module(self._comm_streams.device).current_stream().synchronize()\n",
        "The CPU waits for the current device instead of the unit's device.",
        "originals_offload_on_another_device_after_an_error",
    ),
    Break(
        "accumulates-before-it-arrives",
        REDUCE,
        "            old.copied.synchronize()\n",
        "            pass\n",
        "The CPU accumulates a gradient before its copy has finished.",
        "flat_offload_accumulating",
    ),
    Break(
        "accumulates-at-the-end",
        LAYOUT,
        f"{HOOKED} or {GIVEN}",
        HOOKED,
        "An existing gradient is not detected, so two gradients stay on the CPU until the end of backward.",
        "each_offload_accumulating",
        "stops",
    ),
    Break(
        "hooks-called-at-the-end",
        LAYOUT,
        f"{HOOKED} or {GIVEN}",
        GIVEN,
        "The user's hooks are called only after all gradients have arrived.",
        "each_offload_with_the_optimizer_in_backward",
        "stops",
    ),
    Break(
        "stops-for-each-unit",
        LAYOUT,
        f"        return {HOOKED} or {GIVEN}\n",
        "        return True\n",
        "The CPU waits for the copy of each unit.",
        "flat_offload",
        "stops",
    ),
    Break(
        "copied-event-of-the-wrong-stream",
        REDUCE,
        "                new.copied = comm_stream.stream.record_event()\n",
        "                new.copied = "
        "torch.get_device_module(self._comm_streams.device).default_stream().record_event()\n",
        "The CPU's event is recorded on the compute stream instead of the stream that copies.",
        "flat_offload_accumulating",
    ),
    Break(
        "copied-event-too-early",
        REDUCE,
        """\
            _end(new)
            new.ended = comm_stream.handle()
            if new.result is not None and new.result is not new.local_shard:
                new.copied = comm_stream.stream.record_event()
""",
        """\
            copied = comm_stream.stream.record_event()
            _end(new)
            new.ended = comm_stream.handle()
            if new.result is not None and new.result is not new.local_shard:
                new.copied = copied
""",
        "The event for the CPU is recorded before the copy.",
        "flat_offload_accumulating",
    ),
    Break(
        "blocking-copies-flat",
        FLAT,
        FLAT_COPY,
        "        return local_shard.to(dtype).to(shard.device)\n",
        "The copy of each unit's gradient stops the CPU.",
        "flat_offload",
        "stops",
    ),
    Break(
        "blocking-copies-each",
        PER_PARAMETER,
        EACH_COPY,
        "        return local_shard.to(dtypes.pop()).to(self.params[0].local_shard.device)\n",
        "The same defect exists in the layout with one DTensor per parameter.",
        "each_offload",
        "stops",
    ),
    Break(
        "cast-on-the-host-flat",
        FLAT,
        FLAT_COPY,
        "        return local_shard.to(shard.device, non_blocking=True).to(dtype)\n",
        "The CPU casts a gradient before it has arrived.",
        "flat_offload_in_bf16",
    ),
    Break(
        "cast-on-the-host-each",
        PER_PARAMETER,
        EACH_COPY,
        "        return local_shard.to(self.params[0].local_shard.device, non_blocking=True).to(dtypes.pop())\n",
        "The same defect exists in the layout with one DTensor per parameter.",
        "each_offload_in_bf16",
    ),
    Break(
        "accepted-before-it-arrives",
        PER_PARAMETER,
        "        local_shard = local_shard.to(self.params[0].local_shard.device)\n",
        "        local_shard = local_shard.to(self.params[0].local_shard.device, non_blocking=True)\n",
        "Without pinned memory the CPU does not wait for the copy.",
        "each_offload_not_pinned_accumulating",
    ),
    Break(
        "one-copy-for-each-parameter",
        PER_PARAMETER,
        """\
        local_shard = local_shard.to(self.params[0].local_shard.device)
        start = 0
        for number in gradient.numbers:
            param = self.params[number]
            part = local_shard[start : start + param.local_shard.numel()].view(param.local_shard.shape)
""",
        """\
        start = 0
        for number in gradient.numbers:
            param = self.params[number]
            part = local_shard[start : start + param.local_shard.numel()].view(param.local_shard.shape)
            part = part.to(param.local_shard.device)
""",
        "The copy of each parameter's gradient stops the CPU.",
        "each_offload_not_pinned",
        "stops",
    ),
    Break(
        "gradient-assigned-across-devices",
        "engine/flat_params.py",
        " and gradient.device == parameter.device:\n",
        ":\n",
        "A gradient on the device is assigned to a parameter on the CPU.",
        "flat_offload_no_sync",
        "exception",
    ),
    Break(
        "one-norm-at-a-time",
        "fsdp1/training_aids.py",
        "    norms = [torch.stack(of_one).to(device) for of_one in of_devices.values()]\n",
        "    norms = [one.reshape(1).to(device) for of_one in of_devices.values() for one in of_one]\n",
        "Clipping copies one norm at a time to the device.",
        "flat_offload_clipping",
        "stops",
    ),
    Break(
        "one-factor-at-a-time",
        "fsdp1/training_aids.py",
        "        gradient.mul_(factors[gradient.device, gradient.dtype])\n",
        "        gradient.mul_(factor.to(gradient.device, gradient.dtype))\n",
        "Clipping copies the factor once for each gradient.",
        "flat_offload_clipping",
        "stops",
    ),
    # --- copies to the device ---
    Break(
        "blocking-copy-of-the-shard-flat",
        FLAT,
        "                local_shard.copy_(shard, non_blocking=True)\n",
        "                local_shard.copy_(shard)\n",
        "The CPU waits for the copy of each offloaded shard.",
        "flat_offload",
        "stops",
    ),
    Break(
        "blocking-copy-of-the-shard-each",
        BUCKET,
        "            local_shard.copy_(source.local, non_blocking=True)\n",
        "            local_shard.copy_(source.local)\n",
        "The same defect exists in the layout with one DTensor per parameter.",
        "each_offload",
        "stops",
    ),
    Break(
        "blocking-copy-of-the-shard-extension",
        "engine/extension.py",
        "self._padded.to(self.device, non_blocking=True)\n",
        "self._padded.to(self.device)\n",
        "The same defect exists for a parameter with an all-gather extension.",
        "each_extended_offload",
        "stops",
    ),
    Break(
        "batch-read-later",
        "engine/precision.py",
        "    return map_tensors(lambda t: t.to(device), args)\n",
        "    return map_tensors(lambda t: t.to(device, non_blocking=True), args)\n",
        "The caller overwrites a pinned batch during its copy to the device.",
        "flat_pinned_batch",
    ),
]
