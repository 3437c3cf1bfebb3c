"""Broken handling of failures: hooks that raise, aborted collectives, captures while the watchdog runs."""

from __future__ import annotations

from spec_tests.harness.edit import never, remove, replace
from spec_tests.streams.engines import Break

__all__ = ["BREAKS"]

BREAKS = [
    Break(
        "memory-of-a-failed-hook-reused",
        "The compute stream reuses the memory of a reduction whose hook has raised.",
        remove("Reducer.reduce", "comm_stream.join()"),
        "flat_after_an_error_in_a_hook",
    ),
    Break(
        "optimizer-steps-after-an-abort",
        "The optimizer steps with the output of an aborted collective.",
        never("OptimizerChecks.step_begins", "layouts and log.fatal_error"),
        "each_after_an_abort",
        "wrong values",
    ),
    Break(
        "query-invalidates-a-capture",
        "The watchdog queries an event in the mode of a new thread while a graph is captured.",
        remove("_is_complete", "exchange(ctypes.byref(ctypes.c_int(1)))"),
        "each_captured_beside_the_watchdog",
        "exception",
    ),
    Break(
        "cpu-waits-for-the-default-stream",
        "With offload, the CPU waits for the default stream instead of the stream that called backward.",
        replace(
            "Reducer._stop_cpu",
            "current_stream($device).synchronize()",
            "torch.get_device_module($device).default_stream($device).synchronize()",
        ),
        "flat_offload_on_a_stream_of_the_user",
    ),
]
