"""The tutorial's training. Rank 2 cuts the link to the other machine, first in a step, and after a restart in a save.

    torchrun --nnodes 2 --nproc-per-node 2 --max-restarts 2 spec_tools/two_machines/interrupted.py FOLDER OPTIONS ...

Checkpoints are saved every second step. In the first run, the link is cut between forward and backward of the fourth
step. In the second run, it is cut in the save after that step, when rank 2 has written its files. Rank 2 creates
the files ``FOLDER/cut-0`` and ``FOLDER/cut-1`` first. Another process must restore the link. At the end rank 0 writes
the losses, and the number of complete steps at its last start, to ``FOLDER/result``.

The time-out of the groups is short when the link is cut, and long otherwise, because a process may start late.

Each batch has four parts, whatever the number of ranks. So two ranks train with the same values as four.

On one machine (``TWO_MACHINES_LINK`` is not set), there is no link, and nothing is cut.

With a link, each run of a rank writes its standard error to its own file. torchrun would replace the file of an
attempt when it starts the ranks again without counting a failure.

Spec: MACHINES-07 to MACHINES-10.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tutorials"), str(ROOT)]

import train_gpt  # noqa: E402

from spec_tools.kills.moments import after_call, resumed_training  # noqa: E402
from spec_tools.two_machines.machines import SOCKET, LinkControl  # noqa: E402

CUT_IN = 4
PARTS = 4  # of a batch
TIMEOUT, TIMEOUT_AT_START = 5.0, 90.0  # seconds, of all groups
CUT_BY = 2  # the rank that cuts the link
NUM_CUTS = 2
ERRORS = "errors"  # folder of the standard errors


def shorten_timeouts() -> None:
    """Every rank calls it in the step before the cut, because a rank may start late, but must not wait long then."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), group)


def write_errors_to(folder: Path, rank: int) -> None:
    """Redirects the standard error of this process, also that of its C++ code, to a file in ``folder``.

    The name of the file starts with the number of cuts before this start and the rank.
    """
    folder.mkdir(exist_ok=True)
    file = os.open(folder / f"{num_cuts(folder.parent)}-{rank}-{time.time_ns()}", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, sys.stderr.fileno())


def num_cuts(folder: Path) -> int:
    return sum((folder / f"cut-{number}").exists() for number in range(NUM_CUTS))


def cut(marker: Path) -> None:
    marker.touch()
    LinkControl(os.environ[SOCKET]).cut()


def prepare_cut(folder: Path) -> None:
    """Lets rank 2 cut the link in this run, if it must be cut."""
    number = num_cuts(folder)
    if SOCKET not in os.environ or number == NUM_CUTS:
        return
    after_call(train_gpt.F, "cross_entropy", (CUT_IN - 1, 1)[number], shorten_timeouts)
    if int(os.environ["RANK"]) == CUT_BY:
        owner, name, nth = ((train_gpt.F, "cross_entropy", CUT_IN), (dcp.FileSystemWriter, "write_data", 1))[number]
        after_call(owner, name, nth, lambda: cut(folder / f"cut-{number}"))


def main() -> None:
    torch.set_num_threads(1)
    folder, *options = sys.argv[1:]
    if SOCKET in os.environ:
        write_errors_to(Path(folder) / ERRORS, int(os.environ["RANK"]))
    dist.distributed_c10d._get_default_timeout = lambda backend: timedelta(seconds=TIMEOUT_AT_START)
    prepare_cut(Path(folder))
    batch_of = train_gpt.batch_of

    def parts_of(*arguments: Any, rank: int, **options: Any) -> tuple[torch.Tensor, ...]:
        num_parts = PARTS // int(os.environ["WORLD_SIZE"])
        parts = [batch_of(*arguments, rank=rank * num_parts + part, **options) for part in range(num_parts)]
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

    train_gpt.batch_of = parts_of
    reported = resumed_training(train_gpt, Path(folder), options)
    if os.environ["RANK"] == "0":
        (Path(folder) / "result").write_text(json.dumps(reported))


if __name__ == "__main__":
    main()
