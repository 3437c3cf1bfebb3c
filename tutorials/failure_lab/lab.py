"""How an experiment of the failure lab begins and ends, so that a script shows only what it is about.

A script hands over three functions: the ``experiment``, the ``broken`` part of it, and the ``mended`` one. With
``--mended`` the experiment is given the latter. Both ranks run it, on the CPU, with messages carried by gloo.

The ranks may wait for each other for 3 seconds only. A real job has 10 to 30 minutes there; what is said in the end is
the same. A rank that has raised shows its error and the lines of the script that led to it, in the order of ranks, and
stays until the others have spoken, too. Without that the launcher would end them as soon as the first one has failed,
and a reader would see one error out of two::

    rank 0 says:
      optimizer_too_early.py:37: raise WrongAnswerError("the loss has not fallen"), in experiment
    WrongAnswerError: the loss has not fallen

*Price:* the connections of a rank that has failed stay open, so the others wait a while longer. Of a process that has
died they would hear at once: "Connection closed by peer". The last words that minifsdp leaves for other ranks when a
program ends by an error (``ledger/watcher.py``) are left here, too.
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

__all__ = ["LIMIT", "WrongAnswerError", "batch", "from_all_ranks", "layers", "on_two_ranks"]

LIMIT = timedelta(seconds=3)
STARTING = timedelta(seconds=60)  # for a rank that imports torch more slowly than the other
# The lab prints errors itself.
sys.excepthook = lambda kind, error, trace: None


class WrongAnswerError(Exception):
    """Nothing has raised and nothing hangs, but the result is not the one that a single process gets."""


def on_two_ranks(
    experiment: Callable[[Any, int], None], broken: Callable[..., Any], mended: Callable[..., Any]
) -> None:
    """Runs the experiment on two ranks, and ends the process with status 1 if it has failed on this one.

    Args:
        experiment: is given the broken or the mended part, and the rank.
        broken: what is there to be mended.
        mended: a form that ends well.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--mended", action="store_true", help="run the form at the end of the file, which ends well")
    parser.add_argument("--debug", action="store_true", help="look for more, at a cost: minifsdp.debug()")
    options = parser.parse_args()
    part = mended if options.mended else broken
    if not started_by_torchrun():
        sys.exit(start_ranks(sys.argv[0], 2, sys.argv[1:]))
    store, rank, num_ranks = next(dist.rendezvous("env://", timeout=STARTING))
    if num_ranks != 2:
        sys.exit(f"an experiment has 2 ranks and was started with {num_ranks}")
    if options.debug:
        import minifsdp

        minifsdp.debug()
    meet(store, "begin", rank, range(2), STARTING)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=LIMIT)
    failed, story = run(experiment, part, rank)
    # In turn, so that nothing is mixed up; a rank that hangs longer than it may is not waited for.
    meet(store, "end", None, range(rank), 3 * LIMIT)
    print(story, flush=True)
    meet(store, "end", rank, range(2), 3 * LIMIT)
    # Rank 0 may be the one that keeps the store, in which all of them meet.
    meet(store, "gone", rank, range(2 if rank == 0 else 0), 3 * LIMIT)
    sys.exit(failed)


def run(experiment: Callable[[Any, int], None], part: Callable[..., Any], rank: int) -> tuple[bool, str]:
    """Whether the experiment has failed on this rank, and what is to be said of it in the end."""
    try:
        experiment(part, rank)
    except Exception as error:
        here = Path(__file__).parent
        frames = [one for one in traceback.extract_tb(error.__traceback__) if Path(one.filename).parent == here][1:]
        lines = [f"  {Path(one.filename).name}:{one.lineno}: {one.line}, in {one.name}" for one in frames]
        if rank == 1 or "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
            # As at the end of any program. Where rank 0 keeps the store it would stay for seconds, as it does below.
            sys.last_value = error
            sys.excepthook(type(error), error, error.__traceback__)
            if "minifsdp" in sys.modules:
                from minifsdp.ledger import process

                process.at_exit()
        words = "".join(traceback.format_exception_only(error)).rstrip().removeprefix("lab.")
        return True, "\n".join([f"rank {rank} says:", *lines, words])
    return False, f"rank {rank} has ended well"


def meet(store: dist.Store, where: str, mine: int | None, whom: range, limit: timedelta) -> None:
    """Waits until the ranks ``whom`` have come to a place, or until the limit; ``mine`` has come as well."""
    if mine is not None:
        store.set(f"failure lab/{where}/{mine}", "here")
    try:
        for rank in whom:
            store.wait([f"failure lab/{where}/{rank}"], limit)
    except dist.DistStoreError:
        if where == "begin":
            raise


def layers(num_layers: int = 2, width: int = 8) -> nn.Sequential:
    """A few linear layers, on every rank with the same values."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(num_layers)])


def batch(number: int, rows: int = 4, width: int = 8) -> Tensor:
    """Some rows of input; the same number gives the same rows."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(number))
