"""Broken all-gathers: waits, follows and streams for parameters."""

from __future__ import annotations

from spec_tests.harness.edit import remove, replace
from spec_tests.streams.engines import Break

__all__ = ["BREAKS"]

BREAKS = [
    # --- waiting for an all-gather ---
    Break(
        "promise-never-waits",
        "Waiting for a handle does nothing.",
        remove("_EventHandle.wait", "current_stream($device).wait_event($event)"),
        "flat_full",
    ),
    Break(
        "work-not-waited-for",
        "The communication stream does not wait for the Work of a threaded backend.",
        remove("CommStream.handle", "work.wait()"),
        "flat_over_a_backend_with_threads",
    ),
    Break(
        "work-waited-for-too-late",
        "The event is recorded before the communication stream has waited for the Work.",
        replace("CommStream.handle", "work.wait()\nreturn $handle", "made = $handle\nwork.wait()\nreturn made"),
        "hybrid_over_a_backend_with_threads",
    ),
    Break(
        "unit-does-not-wait",
        "A unit counts as unsharded before its all-gather is complete.",
        remove("Unit.wait", "$handle.wait()"),
        "flat_full",
    ),
    Break(
        "forward-does-not-wait",
        "Forward does not wait for the all-gather of its parameters.",
        remove("IterationState.pre_forward", "unit.wait()"),
        "flat_full",
    ),
    Break(
        "backward-does-not-wait",
        "Backward does not wait for the all-gather of its parameters.",
        remove("IterationState.pre_backward", "unit.wait()"),
        "flat_full",
    ),
    Break(
        "by-hand-does-not-wait",
        "unshard() registers parameters before they have arrived.",
        remove("UnshardHandle.wait", "self._unit.wait()"),
        "each_by_hand_and_read",
    ),
    Break(
        "unshard-does-not-wait",
        "unshard() without a handle does not wait.",
        remove("FSDPModule.unshard", "$handle.wait()"),
        "each_by_hand_and_read",
        "wrong values",
    ),
    Break(
        "rows-sorted-before-they-arrive",
        "The copy-out does not wait for the all-gather.",
        remove("PerParameterLayout.wait", "$handle.wait()"),
        "each_full",
    ),
    Break(
        "only-groups-promise-flat",
        "In a world of one rank the compute stream does not wait for the cast of the parameters.",
        replace("FlatLayout.all_gather", "$stream.handle($work)", "$stream.handle($work) if group else $work"),
        "flat_alone_in_bf16",
    ),
    Break(
        "only-groups-promise-row",
        "The same defect exists in the layout with one DTensor per parameter.",
        replace(
            "PerParameterLayout.all_gather",
            "self._handles.append($handle)",
            "if bucket.group is not None:\n    self._handles.append($handle)",
        ),
        "each_alone_in_bf16",
    ),
    Break(
        "only-groups-promise-extension",
        "The same defect exists for a parameter with an all-gather extension.",
        replace(
            "PerParameterLayout.all_gather",
            "self._handles.append($handle)",
            "if bucket.group is not None or type(bucket).__name__ == 'Bucket':\n    self._handles.append($handle)",
        ),
        "each_extended_alone",
    ),
    # --- waits of an all-gather for other work ---
    Break(
        "follow-does-nothing",
        "Communication streams never wait for the compute stream.",
        remove("CommStream.wait_compute", "self.stream.wait_event($event)"),
        "flat_full",
    ),
    Break(
        "follows-the-default-stream",
        "Communication streams wait for the default stream instead of the current stream of the thread that issues.",
        replace("compute_event", "current_stream($device)", "torch.get_device_module($device).default_stream($device)"),
        "each_on_a_stream_of_the_user",
    ),
    Break(
        "default-stream-waits",
        "The default stream waits for a handle instead of the current stream of the thread that computes.",
        replace(
            "_EventHandle.wait", "current_stream($device)", "torch.get_device_module($device).default_stream($device)"
        ),
        "each_on_a_stream_of_the_user",
    ),
    Break(
        "one-event-for-each-stream",
        "Each stream has one event, which is recorded again for each handle, so a wait includes later all-gathers.",
        replace(
            "CommStream.handle",
            "self.stream.record_event()",
            "self.stream.record_event(vars(self).setdefault('event', torch.get_device_module(self._device).Event()))",
        ),
        "each_prefetching",
        "overlap",
    ),
    Break(
        "gathers-before-the-optimizer",
        "The first all-gathers of an iteration do not wait for the optimizer step.",
        remove("RootState._prepare", "self.comm_streams.all_gather.wait_compute(self.after_optimizer)"),
        "flat_full",
    ),
    Break(
        "event-of-the-optimizer-used-twice",
        "The event of one optimizer step is reused for the next step.",
        remove("RootState._prepare", "self.after_optimizer = None"),
        "each_after_an_event",
    ),
    Break(
        "event-of-the-optimizer-ignored",
        "All-gathers also wait for work issued after the optimizer step.",
        replace("RootState._prepare", "$stream.wait_compute(self.after_optimizer)", "$stream.wait_compute()"),
        "each_after_an_event",
        "overlap",
    ),
    Break(
        "by-hand-does-not-follow",
        "unshard() issues the all-gather without waiting for the optimizer step.",
        remove("FSDPModule.unshard", "root_state.comm_streams.all_gather.wait_compute()"),
        "each_by_hand",
    ),
    Break(
        "new-data-not-followed",
        "The all-gather stream does not wait for the copy of values assigned by p.data.",
        remove("FlatLayout.all_gather", "comm_streams.all_gather.wait_compute()"),
        "flat_new_data",
    ),
    Break(
        "assigned-data-not-followed",
        "The all-gather stream waits for an event from before the copy of assigned values.",
        remove("PerParameterLayout.all_gather", "comm_streams.all_gather.wait_compute()"),
        "each_assigned_after_an_event",
    ),
    Break(
        "gathers-before-it-rests",
        "The all-gather for backward does not wait until the larger shard is cut out.",
        remove("Bucket.prepare_all_gather", "comm_stream.wait_compute(self._written_at)"),
        "each_resting",
    ),
    Break(
        "always-follows",
        "Each all-gather waits for all issued compute work: correct, but nothing overlaps.",
        replace(
            "Unit.unshard",
            "self._handle = $handle",
            "self.comm_streams.all_gather.wait_compute()\nself._handle = $handle",
        ),
        "flat_full",
        "overlap",
    ),
    # --- the stream of an all-gather ---
    Break(
        "streams-are-not-left",
        "Work after an all-gather also runs on the communication stream.",
        remove("CommStream.__exit__", "self._contexts.pop().__exit__(*exception)"),
        "flat_full",
        "overlap",
    ),
    Break(
        "streams-are-not-entered",
        "Work issued on a communication stream runs on the compute stream.",
        remove("CommStream.__enter__", "self._contexts[-1].__enter__()"),
        "each_full",
        "overlap",
    ),
    Break(
        "memory-of-the-compute-stream",
        "An all-gather writes to memory of the compute stream without waiting for that stream.",
        replace(
            "FlatLayout.all_gather",
            "with $stream as $entered:\n    output.allocate()\n    ...",
            "output.allocate()\nwith $stream as $entered:\n    ...",
        ),
        "flat_full",
    ),
    Break(
        "stream-of-another-device",
        "Communication streams are created on the current device instead of the unit's device.",
        replace("CommStream.__init__", "$module.Stream(device=device, priority=$num)", "$module.Stream(priority=$num)"),
        "flat_on_another_device_than_the_current",
        "overlap",
    ),
    Break(
        "current-stream-of-another-device",
        "The current device's stream waits instead of the stream of the unit's device.",
        replace("current_stream", "$module.current_stream(device)", "$module.current_stream()"),
        "flat_on_another_device_than_the_current",
    ),
    # --- other collectives ---
    Break(
        "collective-not-waited-for",
        "The handle of a collective does not wait for its Work.",
        remove("Collective.wait", "self._work.wait()"),
        "flat_over_a_backend_with_threads",
    ),
    Break(
        "collective-returns-nothing",
        "Waiting for a collective fails, because NCCL returns None.",
        replace("Collective.wait", "if self._work is not None:\n    ...", "..."),
        "flat_full",
        "exception",
    ),
    Break(
        "broadcast-not-waited-for",
        "Initial values are used before they have arrived (threaded backend).",
        replace("broadcast", "$collective.wait()", "$collective"),
        "flat_over_a_backend_with_threads",
    ),
    Break(
        "answers-copied-before-they-arrive",
        "The ranks' answers are copied to the CPU before they have arrived (threaded backend).",
        replace("RankChecks.backward_ends", "$asked[-1].wait()\n$answers = $copy", "$answers = $copy"),
        "flat_over_a_backend_with_threads",
    ),
    Break(
        "replicas-asked-before-the-answer",
        "An answer is sent to the replicas before it has arrived (threaded backend).",
        replace("RankChecks.backward_ends", "$asked[-1].wait()\nmine[:2] += $differs", "mine[:2] += $differs"),
        "hybrid_over_a_backend_with_threads",
    ),
    Break(
        "answers-that-stop-the-cpu",
        "The CPU waits for the answers at the end of each backward.",
        replace("RankChecks.backward_ends", "$answers.to('cpu', non_blocking=True)", "$answers.to('cpu')"),
        "flat_full",
        "stops",
    ),
    Break(
        "summons-without-waiting",
        "summon_full_params uses parameters before they have arrived (threaded backend).",
        replace("all_gather_unit", "$collective.wait()", "$collective"),
        "flat_over_a_backend_with_threads",
    ),
    Break(
        "counts-gradients-without-waiting",
        "The presence of a gradient is read before all ranks have reported it.",
        replace("SummonedGradients.__init__", "$collective.wait()", "$collective"),
        "flat_gradients_over_a_backend_with_threads",
    ),
]
