"""The run on the ranks: the tutorial's own model, doors and steps, in rounds that are all alike.

A round is 25 steps of training, an evaluation, a state dict of model and optimizer that is whole, one in rows, and one
of them loaded again. Counting at the end of a round compares like with like.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import threading
import tracemalloc
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
    "queued": lambda: None,
}


def soak(api: str, strategy: str, num_steps: int, num_warm: int, folder: str, leak: str = "none") -> None:
    """Trains and counts. Every rank must call it; rank 0 writes what it has counted into ``folder``.

    Args:
        api: ``"wrapper"`` or ``"fully_shard"``.
        strategy: as the tutorial names it.
        num_steps: to train, some rounds.
        num_warm: of them, before the first count.
        folder: for the counts.
        leak: what to leak in each step, of `LEAKS`.

    Raises:
        AssertionError: something has grown.
    """
    keeps = mock.patch.object(gloo._Queue, "drop_until")
    tracemalloc.start()
    if leak == "queued":
        keeps.start()
    try:
        samples = _train(api, strategy, num_steps, num_warm, LEAKS[leak])
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


def _train(api: str, strategy: str, num_steps: int, num_warm: int, leaks: Callable[[], object]) -> list[watch.Sample]:
    if str(TUTORIALS) not in sys.path:
        sys.path.insert(0, str(TUTORIALS))
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
        leaks()
        if step == ROUND:
            _fill_the_ledger()
        if (step + 1) % ROUND == 0:
            train_gpt.evaluate(training.model, text, options, place)
            for full in (True, False):
                state = training.door.state_of(training.model, training.optimizer, full=full)
            training.door.give_back(training.model, training.optimizer, state, full=False)
            del state
            if step + 1 >= num_warm:
                samples.append(watch.taken(step + 1))
    return samples
