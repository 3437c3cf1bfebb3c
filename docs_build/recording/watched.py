"""Runs a script like ``torchrun``, and records when the data of each recorded collective arrived.

    torchrun --nproc-per-node 2 -m docs_build.recording.watched tutorials/overlap.py --folder /tmp

This is for tutorials that draw their recordings: their pictures then show arrivals, as all pictures of the site do.
"""

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from docs_build.recording import arrivals
from minifsdp import trace

_record = trace.record


@contextmanager
def _noted() -> Iterator[trace.Recorder]:
    with _record() as recorder, arrivals.noted(recorder):
        yield recorder


if __name__ == "__main__":
    del sys.argv[0]
    # A script imports the modules in its own folder.
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    trace.record = _noted
    runpy.run_path(sys.argv[0], run_name="__main__")
