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
        "After an evaluation the CPU may write to offloaded shards that are still copied to the device.",
        "each_offload_evaluated_and_changed",
    ),
    Break(
        "nobody-stops-for-the-gather-stream",
        "engine/comm_streams.py",
        "            self.stream.synchronize()\n",
        "            pass\n",
        "Stopping for a communication stream does not stop.",
        "each_offload_evaluated_and_changed",
    ),
    # --- copies to the host ---
    Break(
        "batches-answered-without-an-event",
        "batches.py",
        'answer, event = number.to("cpu", non_blocking=True), comm_stream.stream.record_event()\n'
        "            # It is complete when the CPU has the result, so the watchdog sees a rank that waits for it.\n"
        "            work.wait_for(event.synchronize)\n",
        'answer = number.to("cpu", non_blocking=True)\n            work.wait_for(bool)\n',
        "Nobody knows when the answer, whether all ranks have a batch, has been copied.",
        "each_in_batches_of_tokens",
    ),
    Break(
        "batches-given-before-the-answer",
        "batches.py",
        "        wait()\n",
        "        pass\n",
        "The CPU reads whether all ranks have a batch before that was copied.",
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
        "Who reduces does not know that gradients go to the CPU.",
        "each_offload",
    ),
    Break(
        "prefetched-in-vain-and-not-waited-for",
        REDUCE,
        "            self._comm_streams.all_gather.join()\n",
        "",
        "At the end of backward the CPU may write to a shard that was prefetched in vain.",
        "each_offload_prefetching_in_vain",
    ),
    Break(
        "steps-on-the-cpu-while-gathers-read",
        REDUCE,
        "            all_gather.synchronize()\n",
        "            all_gather.join()\n",
        "A hook of the user's steps on the CPU while a gather that was prefetched reads the shard.",
        "originals_offload_used_twice_with_the_optimizer_in_backward",
    ),
    Break(
        "copies-not-waited-for-at-the-end",
        REDUCE,
        "        self._stop_cpu()\n        for",
        "        for",
        "The end of backward completes the last reduction, and not the copies.",
        "flat_offload",
    ),
    Break(
        "copies-not-waited-for-after-an-error",
        REDUCE,
        "            last.ended.wait()\n        self._stop_cpu()\n",
        "            last.ended.wait()\n",
        "After an error shards are written while they are still copied to the device.",
        "originals_offload_after_an_error_in_backward",
    ),
    Break(
        "another-device-synchronized",
        REDUCE,
        "            current_stream(self._comm_streams.device).synchronize()\n",
        "            torch.get_device_module(self._comm_streams.device).current_stream().synchronize()\n",
        "The CPU waits for the current device instead of the unit's. Race 7 of the list.",
        "originals_offload_on_another_device_after_an_error",
    ),
    Break(
        "accumulates-before-it-arrives",
        REDUCE,
        "            old.copied.synchronize()\n",
        "            pass\n",
        "The CPU adds a gradient that is still being copied to the one that is there.",
        "flat_offload_accumulating",
    ),
    Break(
        "accumulates-at-the-end",
        LAYOUT,
        f"{HOOKED} or {GIVEN}",
        HOOKED,
        "That a gradient is there already is overlooked, so that two of them lie on the CPU until the end.",
        "each_offload_accumulating",
        "stops",
    ),
    Break(
        "hooks-called-at-the-end",
        LAYOUT,
        f"{HOOKED} or {GIVEN}",
        GIVEN,
        "That the user's hooks wait for the gradient is overlooked: they are called when all have arrived.",
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
        "The event for the CPU is recorded on the compute stream, which does not copy.",
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
        "Each unit's gradient stops the CPU. Point 10 of the list.",
        "flat_offload",
        "stops",
    ),
    Break(
        "blocking-copies-each",
        PER_PARAMETER,
        EACH_COPY,
        "        return local_shard.to(dtypes.pop()).to(self.params[0].local_shard.device)\n",
        "The same with a DTensor for each parameter.",
        "each_offload",
        "stops",
    ),
    Break(
        "cast-on-the-host-flat",
        FLAT,
        FLAT_COPY,
        "        return local_shard.to(shard.device, non_blocking=True).to(dtype)\n",
        "The CPU casts a gradient that has not arrived.",
        "flat_offload_in_bf16",
    ),
    Break(
        "cast-on-the-host-each",
        PER_PARAMETER,
        EACH_COPY,
        "        return local_shard.to(self.params[0].local_shard.device, non_blocking=True).to(dtypes.pop())\n",
        "The same with a DTensor for each parameter.",
        "each_offload_in_bf16",
    ),
    Break(
        "accepted-before-it-arrives",
        PER_PARAMETER,
        "        local_shard = local_shard.to(self.params[0].local_shard.device)\n",
        "        local_shard = local_shard.to(self.params[0].local_shard.device, non_blocking=True)\n",
        "Without pinned memory, too, the copy is not waited for.",
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
        "Each parameter's gradient stops the CPU.",
        "each_offload_not_pinned",
        "stops",
    ),
    Break(
        "gradient-assigned-across-devices",
        "engine/flat_params.py",
        " and gradient.device == parameter.device:\n",
        ":\n",
        "A gradient of the device is assigned to a parameter of the CPU. Race 9 of the list.",
        "flat_offload_no_sync",
        "exception",
    ),
    Break(
        "one-norm-at-a-time",
        "fsdp1/training_aids.py",
        "    norms = [torch.stack(of_one).to(device) for of_one in of_devices.values()] or [\n",
        "    norms = [one.reshape(1).to(device) for of_one in of_devices.values() for one in of_one] or [\n",
        "Clipping sends one norm at a time to the device.",
        "flat_offload_clipping",
        "stops",
    ),
    Break(
        "one-factor-at-a-time",
        "fsdp1/training_aids.py",
        "        gradient.mul_(factors[gradient.device, gradient.dtype])\n",
        "        gradient.mul_(factor.to(gradient.device, gradient.dtype))\n",
        "Clipping fetches the factor once for each gradient.",
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
        "            in_buffer.copy_(local_shard, non_blocking=True)\n",
        "            in_buffer.copy_(local_shard)\n",
        "The same with a DTensor for each parameter.",
        "each_offload",
        "stops",
    ),
    Break(
        "blocking-copy-of-the-shard-extension",
        "engine/extension.py",
        "self._padded.to(self.device, non_blocking=True)\n",
        "self._padded.to(self.device)\n",
        "The same for a parameter that decides what is sent.",
        "each_extended_offload",
        "stops",
    ),
    Break(
        "batch-read-later",
        "engine/precision.py",
        "    return map_tensors(lambda t: t.to(device), args)\n",
        "    return map_tensors(lambda t: t.to(device, non_blocking=True), args)\n",
        "The caller fills his pinned batch anew while it is still being copied.",
        "flat_pinned_batch",
    ),
]
