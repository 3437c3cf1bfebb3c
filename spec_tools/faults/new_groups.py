"""A program whose ranks fail, catch the error, and start again with other process groups.

    python -m spec_tools.faults.new_groups FOLDER

For each start it prints the number of watchdogs and of open pipe ends, and the number of both that are
left after the process group was destroyed.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from minifsdp.engine.collective_log import log
from spec_tools.faults.deviate import sharded
from spec_tools.faults.ends import ends_as_python_does


def num_pipes() -> int:
    """The number of pipe ends that the process has open."""
    return sum(os.readlink(end).startswith("pipe:") for end in Path("/proc/self/fd").iterdir() if end.is_symlink())


def main() -> None:
    torch.set_num_threads(1)
    rank, x = int(os.environ["RANK"]), torch.ones(2, 8)
    for start in range(2):
        store = f"file://{sys.argv[1]}/store-{start}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(minutes=5))
        before = num_pipes()
        model = sharded("function", keeps=False, are_equal=True)
        for _ in range(2):
            model(x).sum().backward()
        threads = [thread for thread in threading.enumerate() if thread.name == "minifsdp watchdog"]
        print(len(threads), num_pipes() - before, flush=True)
        try:
            # One rank skips a unit, so each rank waits for a collective that the other does not issue.
            model(x, "b" if rank else "ab").sum().backward()
        except RuntimeError:
            print("caught", bool(log.fatal_error), flush=True)
        dist.destroy_process_group()
        threads = [thread for thread in threading.enumerate() if thread.name == "minifsdp watchdog"]
        print("left", len(threads), max(0, num_pipes() - before), flush=True)


if __name__ == "__main__":
    ends_as_python_does(main)
