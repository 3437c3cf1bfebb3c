"""The tutorial's training. In its first run one rank has a fault, in its fourth step or in the save after it.

    torchrun --nproc-per-node 2 --max-restarts 1 spec_tools/faults/restarted.py FAULT VICTIM MOMENT FOLDER OPTIONS ...

Checkpoints are saved every second step. At the end rank 0 writes three values to ``FOLDER/result``: the losses of all
steps, the number of starts of the job, and the number of complete steps at the last start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tutorials"), str(ROOT)]

from spec_tools.kills.moments import EVERY, after_call, resumed_training  # noqa: E402

STRUCK_IN = 4
TIMEOUT = 20.0  # seconds, of all groups; torch's half an hour is too long for a test


def strike(fault: str) -> None:
    if fault == "raises":
        raise ValueError("a bad batch")
    if fault == "exits":
        sys.exit(0)
    if fault == "is slow":
        time.sleep(3 * TIMEOUT)
    os.kill(os.getpid(), signal.SIGSTOP if fault == "is stopped" else signal.SIGKILL)


def main() -> None:
    import train_gpt

    torch.set_num_threads(1)
    fault, victim, moment, folder, *options = sys.argv[1:]
    num_restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.distributed_c10d._get_default_timeout = lambda backend: timedelta(seconds=TIMEOUT)
    if num_restarts == 0 and os.environ["RANK"] == victim:
        if moment == "in a step":
            after_call(torch.optim.AdamW, "step", STRUCK_IN, lambda: strike(fault))
        else:
            # The files of this rank are written, but the other ranks have not received its message yet.
            after_call(dcp.FileSystemWriter, "write_data", STRUCK_IN // EVERY, lambda: strike(fault))
    reported = resumed_training(train_gpt, Path(folder), options)
    if os.environ["RANK"] == "0":
        (Path(folder) / "result").write_text(json.dumps({**reported, "starts": num_restarts + 1}))


if __name__ == "__main__":
    main()
