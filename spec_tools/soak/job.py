"""The run on the ranks: the tutorial's model, APIs, steps and checkpoints, in equal rounds.

A round consists of some training steps, an evaluation, and a full and a sharded checkpoint of model and optimizer.
Both are written to disk, where older ones are removed, and the newest is loaded. Counts at the end of a round are
comparable.
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

from minifsdp.checks import collective_log
from minifsdp.engine.comm_streams import CommStreams
from minifsdp_gloo import transport as gloo
from spec_tools.soak import watch

__all__ = ["LEAKS", "ROUND", "soak"]

ROUND = 25  # steps
TUTORIALS = pathlib.Path(__file__).resolve().parents[2] / "tutorials"
TINY = ["--device=cpu", "--blocks=2", "--width=16", "--heads=2", "--context=16", "--batch=2", "--lr=0.01"]

# Objects that a leak in a program or in the package would keep in each step.
_kept: list[Any] = []
LEAKS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "tensors": lambda: _kept.append(torch.zeros(1)),
    "descriptors": lambda: _kept.append(os.open(os.devnull, os.O_RDONLY)),
    "threads": lambda: threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start(),
    "objects": lambda: _kept.append(CommStreams(torch.device("cpu"))),
    "python_bytes": lambda: _kept.append(bytearray(40_000)),
    "resident_bytes": lambda: _kept.append(bytearray(1_500_000)),
    # Inserted by `soak`.
    "queued": lambda: None,
    "ledger": lambda: None,
    "on_disk": lambda: None,
}


def soak(
    api: str, strategy: str, num_steps: int, num_warm: int, folder: str, leak: str = "none", round_of: int = ROUND
) -> None:
    """Trains and counts. Every rank must call it; rank 0 writes the counts into ``folder``.

    Args:
        api: ``"wrapper"`` or ``"fully_shard"``.
        strategy: as in the tutorial.
        num_steps: number of training steps, some rounds.
        num_warm: number of steps before the first count.
        folder: for the counts, and for checkpoints.
        leak: the leak to insert in each step, a key of `LEAKS`.
        round_of: number of steps in a round.

    Raises:
        AssertionError: something has grown.
    """
    if str(TUTORIALS) not in sys.path:
        sys.path.insert(0, str(TUTORIALS))
    from gpt.checkpoint import CheckpointFolder

    checkpoints = CheckpointFolder(pathlib.Path(folder, "runs"), keep=1000 if leak == "on_disk" else 2)
    tracemalloc.start()
    if leak == "queued":
        os.environ["MINIFSDP_TRANSPORT"] = "messages"
        mock.patch.object(gloo._Exchange, "wait", _wait_without_removal).start()
    # A short log is full before the first count. A log without a limit grows.
    mock.patch.object(collective_log, "MOST_ENTRIES", None if leak == "ledger" else 64).start()
    try:
        samples = _train(api, strategy, num_steps, num_warm, checkpoints, LEAKS[leak], round_of)
    finally:
        tracemalloc.stop()
        mock.patch.stopall()
        for one in _kept:
            if leak == "descriptors":
                os.close(one)
        _kept.clear()
    if dist.get_rank() == 0:
        pathlib.Path(folder, "samples.json").write_text(json.dumps([asdict(sample) for sample in samples]))
    found = watch.grown(samples)
    # On all ranks, so that none waits for another.
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, found)
    assert not any(all_ranks), f"has grown, by rank: {all_ranks}"


# The pool uses this name for the undecorated body of a test.
soak.body_on_a_rank = soak  # type: ignore[attr-defined]


def _wait_without_removal(exchange: Any) -> None:
    for message in exchange._messages:
        message.wait()


def _train(
    api: str,
    strategy: str,
    num_steps: int,
    num_warm: int,
    checkpoints: Any,
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
        # Not `finish_step`: it also extends the list of losses, which grows intentionally.
        training.step += 1
        leaks()
        if (step + 1) % round_of == 0:
            train_gpt.evaluate(training.model, text, options, place)
            for full in (True, False):
                train_gpt.save(checkpoints, training, fixed={}, noted={}, full=full)
            train_gpt.resume(checkpoints.newest(print), training, fixed={}, noted={})
            if step + 1 >= num_warm:
                samples.append(watch.taken(step + 1, checkpoints.root))
    return samples
