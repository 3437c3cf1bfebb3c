"""Recording the last steps of a training, and writing what was recorded as a trace and as a picture.

Only minifsdp tells what its units do; with another library there is nothing to record.
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
    """The events of some steps of this rank, and at the end of all ranks.

    Args:
        trace: where to write a Chrome trace of all recorded steps; ``None`` for nowhere.
        timeline: where to draw the last recorded step as SVG; ``None`` for nowhere.
        num_steps: how many steps to record, the last ones.
    """

    def __init__(self, trace: Path | None, timeline: Path | None, num_steps: int = 2) -> None:
        self.trace, self.timeline, self.num_steps = trace, timeline, num_steps
        self._steps: list[tuple[float, list]] = []

    @contextmanager
    def around(self, step: int, of: int) -> Iterator[None]:
        """Records what happens inside if that is wanted and ``step`` is one of the last; every rank must enter it."""
        if not (self.trace or self.timeline) or step < of - self.num_steps:
            yield
            return
        from minifsdp import trace

        # After a barrier all ranks stand at nearly the same moment, and what their clocks show there can be set equal.
        dist.barrier()
        origin = time.perf_counter()
        with trace.record() as recorder:
            yield
        self._steps.append((origin, recorder.events))

    def write(self, *, speaks: bool) -> None:
        """Brings the events of all ranks together and writes the files. Every rank must call it; one writes."""
        if not self._steps:
            return
        everybody = from_all_ranks(self._steps)
        if not speaks:
            return
        from minifsdp import timeline

        if self.trace is not None:
            # One zero for all steps, the first one's: the second shall lie behind it, with the optimizer's gap between.
            events = [[event for _, events in steps for event in events] for steps in everybody]
            origins = [steps[0][0] for steps in everybody]
            self.trace.write_text(json.dumps(timeline.chrome_trace(events, origins=origins)), encoding="utf-8")
            fact("trace", f"{self.trace}: the last {len(self._steps)} steps, for https://ui.perfetto.dev")
        if self.timeline is not None:
            last = [steps[-1] for steps in everybody]
            picture = timeline.svg(
                [events for _, events in last],
                origins=[origin for origin, _ in last],
                title="The last step of train_gpt.py",
            )
            self.timeline.write_text(picture, encoding="utf-8")
            fact("timeline", f"{self.timeline}: the last step, for any browser")
