"""A program whose ranks fail, catch the error, and start again with other process groups.

    python -m spec_tools.processes.new_groups FOLDER

For each start it prints the number of watchdogs, and the number that is left after the process group was destroyed.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from minifsdp.checks.collective_log import log
from spec_tools.processes.deviate import sharded
from spec_tools.processes.ranks import end_as_python_does


def main() -> None:
    torch.set_num_threads(1)
    rank, x = int(os.environ["RANK"]), torch.ones(2, 8)
    for start in range(2):
        store = f"file://{sys.argv[1]}/store-{start}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(minutes=5))
        model = sharded("function", keeps=False, are_equal=True)
        for _ in range(2):
            model(x).sum().backward()
        watchdog = log.watchdog
        print(int(watchdog is not None), flush=True)
        try:
            # One rank skips a unit, so each rank waits for a collective that the other does not issue.
            model(x, "b" if rank else "ab").sum().backward()
        except RuntimeError:
            print("caught", bool(log.fatal_error), flush=True)
        dist.destroy_process_group()
        print("left", int(not watchdog._has_ended.is_set()), flush=True)


if __name__ == "__main__":
    end_as_python_does(main)
