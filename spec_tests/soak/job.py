"""The run on the ranks: the tutorial's own model, doors, steps and checkpoints, in rounds that are all alike.

A round is some steps of training, an evaluation, a checkpoint of model and optimizer that is whole, one in rows, both
on the disk, where older ones are removed, and the newest read again. Counting at the end of a round compares like with
like.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import threading
import tracemalloc
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from minifsdp.engine import gloo, ledger
from minifsdp.engine.lanes import Lanes
from spec_tests.soak import watch

__all__ = ["LEAKS", "ROUND", "soak"]

ROUND = 25  # steps
TUTORIALS = pathlib.Path(__file__).resolve().parents[2] / "tutorials"
TINY = ["--device=cpu", "--blocks=2", "--width=16", "--heads=2", "--context=16", "--batch=2", "--lr=0.01"]

# What a careless program, or a careless package, would keep in each step.
_kept: list[Any] = []
LEAKS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "tensors": lambda: _kept.append(torch.zeros(1)),
    "descriptors": lambda: _kept.append(os.open(os.devnull, os.O_RDONLY)),
    "threads": lambda: threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start(),
    "objects": lambda: _kept.append(Lanes(torch.device("cpu"))),
    "python_bytes": lambda: _kept.append(bytearray(40_000)),
    "resident_bytes": lambda: _kept.append(bytearray(1_500_000)),
    # Planted in `soak`.
    "queued": lambda: None,
    "ledger": lambda: None,
    "on_disk": lambda: None,
}


def soak(
    api: str, strategy: str, num_steps: int, num_warm: int, folder: str, leak: str = "none", round_of: int = ROUND
) -> None:
    """Trains and counts. Every rank must call it; rank 0 writes what it has counted into ``folder``.

    Args:
        api: ``"wrapper"`` or ``"fully_shard"``.
        strategy: as the tutorial names it.
        num_steps: to train, some rounds.
        num_warm: of them, before the first count.
        folder: for the counts, and for checkpoints.
        leak: what to leak in each step, of `LEAKS`.
        round_of: how many steps.

    Raises:
        AssertionError: something has grown.
    """
    if str(TUTORIALS) not in sys.path:
        sys.path.insert(0, str(TUTORIALS))
    from gpt.checkpoint import Shelf

    shelf = Shelf(pathlib.Path(folder, "runs"), keep=1000 if leak == "on_disk" else 2)
    tracemalloc.start()
    if leak == "queued":
        os.environ["MINIFSDP_TRANSPORT"] = "messages"
        mock.patch.object(gloo._Queue, "drop_until").start()
    if leak == "ledger":
        mock.patch.object(ledger, "entries", deque(ledger.entries)).start()
    try:
        samples = _train(api, strategy, num_steps, num_warm, shelf, LEAKS[leak], round_of)
    finally:
        tracemalloc.stop()
        mock.patch.stopall()
        for one in _kept:
            if leak == "descriptors":
                os.close(one)
        _kept.clear()
    if dist.get_rank() == 0:
        pathlib.Path(folder, "samples.json").write_text(json.dumps([asdict(sample) for sample in samples]))
    found = watch.grown(samples[0], samples[-1])
    # On all ranks, so that none waits for another.
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, found)
    assert not any(everybody), f"has grown, by rank: {everybody}"


# The pool looks for the undecorated body of a test under this name.
soak.body_on_a_rank = soak  # type: ignore[attr-defined]


def _fill_the_ledger() -> None:
    """It holds the last collectives, so many and no more; it is full before anything is counted."""
    entries = ledger.entries
    while len(entries) < (entries.maxlen or 0):
        entries.appendleft((*entries[-1],))


def _train(
    api: str,
    strategy: str,
    num_steps: int,
    num_warm: int,
    shelf: Any,
    leaks: Callable[[], object],
    round_of: int,
) -> list[watch.Sample]:
    import train_gpt
    from gpt.options import parse
    from gpt.ranks import Place

    options = parse([*TINY, f"--api={api}", f"--strategy={strategy}", f"--steps={num_steps}"])
    place = Place(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo")
    text = torch.randint(0, 256, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    training = train_gpt.start(train_gpt.build(options, place), options, place)
    samples = []
    for step in range(num_steps):
        inputs, targets = train_gpt.next_batch(text, step, options, place)
        train_gpt.train_step(training.model, training.optimizer, inputs, targets)
        # Without its list of losses, which grows as it should.
        training.step += 1
        leaks()
        if step == ROUND:
            _fill_the_ledger()
        if (step + 1) % round_of == 0:
            train_gpt.evaluate(training.model, text, options, place)
            for full in (True, False):
                train_gpt.save(shelf, training, fixed={}, noted={}, full=full)
            train_gpt.resume(shelf.newest(print), training, fixed={}, noted={})
            if step + 1 >= num_warm:
                samples.append(watch.taken(step + 1, shelf.root))
    return samples
