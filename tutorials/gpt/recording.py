"""Records the last steps of a training, and writes them as a trace and as a picture.

Only minifsdp records the events of its units. Other libraries record no events.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from .ranks import from_all_ranks
from .report import fact

__all__ = ["Recordings"]


class Recordings:
    """The events of some steps of this rank, collected from all ranks at the end.

    Args:
        trace: file for a Chrome trace of all recorded steps; ``None`` for no trace.
        timeline: file for a picture of the last recorded step, as SVG; ``None`` for no picture.
        num_steps: how many steps at the end to record.
    """

    def __init__(self, trace: Path | None, timeline: Path | None, num_steps: int = 2) -> None:
        self.trace, self.timeline, self.num_steps = trace, timeline, num_steps
        self._steps: list[tuple[float, list]] = []

    @contextmanager
    def around(self, step: int, of: int) -> Iterator[None]:
        """Records a ``with`` block if enabled and ``step`` is one of the last steps; every rank must enter it."""
        if not (self.trace or self.timeline) or step < of - self.num_steps:
            yield
            return
        from minifsdp import trace

        # All ranks leave a barrier at nearly the same time, so it serves as the common time origin.
        dist.barrier()
        origin = time.perf_counter()
        with trace.record() as recorder:
            yield
        self._steps.append((origin, recorder.events))

    def write(self, *, speaks: bool) -> None:
        """Collects the events of all ranks. Rank 0 writes the files. Every rank must call it."""
        if not self._steps:
            return
        all_ranks = from_all_ranks(self._steps)
        if not speaks:
            return
        from minifsdp_tools import timeline

        if self.trace is not None:
            # All steps use the time origin of the first step, so that the optimizer step is visible as a gap.
            events = [[event for _, events in steps for event in events] for steps in all_ranks]
            origins = [steps[0][0] for steps in all_ranks]
            self.trace.write_text(json.dumps(timeline.chrome_trace(events, origins=origins)), encoding="utf-8")
            fact("trace", f"{self.trace}: the last {len(self._steps)} steps, for https://ui.perfetto.dev")
        if self.timeline is not None:
            last = [steps[-1] for steps in all_ranks]
            picture = timeline.svg(
                [events for _, events in last],
                origins=[origin for origin, _ in last],
                title="The last step of train_gpt.py",
            )
            self.timeline.write_text(picture, encoding="utf-8")
            fact("timeline", f"{self.timeline}: the last step, for any browser")
