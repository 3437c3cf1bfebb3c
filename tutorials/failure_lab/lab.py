"""Starts and ends the experiments of the failure lab, so that a script contains only its experiment.

A script passes three functions: the ``experiment``, its ``broken`` part, and the ``fixed`` part. With ``--fixed``, the
experiment uses the fixed part. Two ranks run it on the CPU with gloo.

The timeout of the ranks is only 3 seconds. In a real job it is 10 to 30 minutes, and the error is the same. If a rank
raises an exception, it prints the error and the lines of the script in the traceback. The ranks print in rank order.
Each rank waits until the other rank has printed, too. Otherwise the launcher would end the second rank when the first
one fails, and only one of the two errors would be visible::

    rank 0 says:
      optimizer_too_early.py:37: raise WrongAnswerError("the loss has not fallen"), in experiment
    WrongAnswerError: the loss has not fallen

*Difference from a real job:* the connections of a failed rank stay open, so the other rank waits longer. In a real job,
the process ends, and the other rank fails immediately with "Connection closed by peer". When a program ends with an
error, minifsdp writes an exit record for the other ranks (``watchdog/watchdog.py``). The lab calls the same function.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import gpt  # noqa: F401  (first, since it silences a warning that torch's import gives without NumPy)
import torch
import torch.distributed as dist
from gpt.ranks import from_all_ranks, start_ranks, started_by_torchrun
from torch import Tensor, nn

import minifsdp
from minifsdp.watchdog import process

__all__ = ["LIMIT", "WrongAnswerError", "batch", "from_all_ranks", "layers", "on_two_ranks"]

LIMIT = timedelta(seconds=3)
STARTING = timedelta(seconds=60)  # the ranks can need different times to import torch
# The lab prints errors itself.
sys.excepthook = lambda kind, error, trace: None


class WrongAnswerError(Exception):
    """There is no error and no hang, but the result differs from that of a single process."""


def on_two_ranks(experiment: Callable[[Any, int], None], broken: Callable[..., Any], fixed: Callable[..., Any]) -> None:
    """Runs the experiment on two ranks, and ends the process with status 1 if it failed on this rank.

    Args:
        experiment: the experiment; its arguments are the broken or the fixed part, and the rank.
        broken: the part that causes the failure.
        fixed: a part that works.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true", help="run the fixed version at the end of the file")
    parser.add_argument("--debug", action="store_true", help="turn on all checks with minifsdp.debug()")
    options = parser.parse_args()
    part = fixed if options.fixed else broken
    if not started_by_torchrun():
        sys.exit(start_ranks(sys.argv[0], 2, sys.argv[1:]))
    store, rank, num_ranks = next(dist.rendezvous("env://", timeout=STARTING))
    if num_ranks != 2:
        sys.exit(f"an experiment needs 2 ranks, and was started with {num_ranks}")
    if options.debug:
        minifsdp.debug()
    meet(store, "begin", rank, range(2), STARTING)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=LIMIT)
    # Each rank connects to the store a second time. This can need seconds, because torch resolves host names.
    process.start()
    meet(store, "connected", rank, range(2), STARTING)
    failed, text = run(experiment, part, rank)
    # The ranks print one after the other. If a rank hangs, the other rank waits at most until the limit.
    meet(store, "end", None, range(rank), 3 * LIMIT)
    print(text, flush=True)
    meet(store, "end", rank, range(2), 3 * LIMIT)
    # Rank 0 can host the store that both ranks use, so it exits last.
    meet(store, "gone", rank, range(2 if rank == 0 else 0), 3 * LIMIT)
    sys.exit(failed)


def run(experiment: Callable[[Any, int], None], part: Callable[..., Any], rank: int) -> tuple[bool, str]:
    """Whether the experiment has failed on this rank, and the text to print."""
    try:
        experiment(part, rank)
    except Exception as error:
        here = Path(__file__).parent
        frames = [one for one in traceback.extract_tb(error.__traceback__) if Path(one.filename).parent == here][1:]
        lines = [f"  {Path(one.filename).name}:{one.lineno}: {one.line}, in {one.name}" for one in frames]
        if rank == 1 or "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
            # Run the exit hooks. If rank 0 hosts the store, they would wait for seconds, so skip them there.
            sys.last_value = error
            sys.excepthook(type(error), error, error.__traceback__)
            process.at_exit()
        words = "".join(traceback.format_exception_only(error)).rstrip().removeprefix("lab.")
        return True, "\n".join([f"rank {rank} says:", *lines, words])
    return False, f"rank {rank} has ended well"


def meet(store: dist.Store, where: str, mine: int | None, others: range, limit: timedelta) -> None:
    """Sets a key in the store for rank ``mine``, and waits at most ``limit`` for the keys of the ranks ``others``."""
    if mine is not None:
        store.set(f"failure lab/{where}/{mine}", "here")
    try:
        for rank in others:
            store.wait([f"failure lab/{where}/{rank}"], limit)
    except dist.DistStoreError:
        if where in ("begin", "connected"):
            raise


def layers(num_layers: int = 2, width: int = 8) -> nn.Sequential:
    """Linear layers with the same initial values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(num_layers)])


def batch(number: int, rows: int = 4, width: int = 8) -> Tensor:
    """A batch of ``rows`` inputs; the same number gives the same values."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(number))
