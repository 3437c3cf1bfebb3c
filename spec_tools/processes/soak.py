"""A long training run in which the process must not grow.

If a step leaks even a hundred bytes, the job fails after a week. A tiny version of the tutorial's GPT is trained on two
ranks, in equal rounds. A round consists of some training steps, an evaluation, and a full and a sharded checkpoint of
model and optimizer. Both are written to disk, where older ones are removed, and the newest is loaded. The objects of
the process are counted at the end of each round::

    step    tensors   their bytes   descriptors   threads   our objects   in queues   Python's bytes   resident
      500       214       381,532            41        14           198           0          912,344     412 MB
    2,000       214       381,532            41        14           198           0          912,608     412 MB

``python -m spec_tools.processes.soak`` trains 2,000 steps with each API, 100 in a round, and prints the last counts.

A count must not be larger at the end than after the warm-up. A size in bytes can be slightly larger, because allocators
and caches round.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import tempfile
import threading
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from minifsdp.checks import collective_log
from minifsdp.checks.collective_log import log
from minifsdp_gloo import transport as gloo
from spec_tests.harness import pool
from spec_tools.processes.ranks import ROOT

APIS = ("wrapper", "fully_shard")
TINY = ["--device=cpu", "--blocks=2", "--width=16", "--heads=2", "--context=16", "--batch=2", "--lr=0.01"]
# Allowed growth in bytes after the warm-up, because allocators round, and caches of torch and of Python fill slowly.
# A leak of 100 bytes in each of 2,000 steps exceeds the first limit.
MOST_MORE = {"python_bytes": 150_000, "resident_bytes": 16 * 2**20}

# The counts after a step, by name. `kinds` has the objects of minifsdp by class.
Sample = dict[str, Any]


def soak(api: str, num_steps: int, num_warm: int, folder: str, round_of: int = 25) -> None:
    """Trains and counts. Every rank must call it; rank 0 writes the counts into ``folder``.

    Args:
        api: one of `APIS`.
        num_steps: number of training steps, some rounds.
        num_warm: number of steps before the first count.
        folder: for the counts, and for checkpoints.
        round_of: number of steps in a round.

    Raises:
        AssertionError: something has grown.
    """
    tracemalloc.start()
    # A short log is full before the first count.
    with mock.patch.object(collective_log, "MOST_ENTRIES", 64):
        samples = _train(api, num_steps, num_warm, Path(folder, "runs"), round_of)
    tracemalloc.stop()
    if dist.get_rank() == 0:
        Path(folder, "samples.json").write_text(json.dumps(samples))
    # On all ranks, so that none waits for another.
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, grown(samples))
    assert not any(all_ranks), f"has grown, by rank: {all_ranks}"


# The pool uses this name for the undecorated body of a test.
soak.body_on_a_rank = soak  # type: ignore[attr-defined]


def _train(api: str, num_steps: int, num_warm: int, runs: Path, round_of: int) -> list[Sample]:
    sys.path.insert(0, str(ROOT / "tutorials"))
    import train_gpt
    from gpt.ranks import Place

    checkpoints = train_gpt.CheckpointFolder(runs, keep=2)
    options = train_gpt.parse([*TINY, f"--api={api}", f"--steps={num_steps}"])
    place = Place(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo")
    text = torch.randint(0, 256, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    training = train_gpt.start(train_gpt.build(options, place), options, place)
    samples = []
    for step in range(1, num_steps + 1):
        inputs, targets = train_gpt.next_batch(text, step, options, place)
        train_gpt.train_step(training.model, training.optimizer, inputs, targets)
        # Not `finish_step`: it also extends the list of losses, which grows intentionally.
        training.step += 1
        if step % round_of == 0:
            train_gpt.evaluate(training.model, text, options, place)
            for full in (True, False):
                train_gpt.save(checkpoints, training, fixed={}, noted={}, full=full)
            train_gpt.resume(checkpoints.newest(print), training, fixed={}, noted={})
            if step >= num_warm:
                samples.append(taken(step, runs))
    return samples


def taken(step: int, runs: Path) -> Sample:
    """Collects garbage and counts. Bytes of Python are those since the counting began."""
    gc.collect()
    everything = gc.get_objects()
    tensors = [one for one in everything if issubclass(type(one), torch.Tensor)]
    # For a DTensor only the local shard is counted, which is a tensor of its own.
    plain = [one for one in tensors if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu"]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in plain}
    # For some classes `__module__` is not a string.
    ours = [one for one in everything if str(type(one).__module__).partition(".")[0] == "minifsdp"]
    transports = gloo._transports.values()
    entries = sum(len(one.entries) for one in log.sequences.values())
    return {
        "step": step,
        "tensors": len(tensors),
        "tensor_bytes": sum(storages.values()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": max(threading.active_count(), len(os.listdir("/proc/self/task"))),
        "objects": len(ours),
        # Messages that the transport between CPUs keeps until they have arrived.
        "queued": sum(len(transport._in_flight) for transport in transports),
        # Entries of the collective log, and the sizes that transports store.
        "ledger": entries + sum(len(transport._known) for transport in transports),
        "on_disk": len([*runs.rglob("*")]),
        "python_bytes": tracemalloc.get_traced_memory()[0],
        "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "kinds": dict(Counter(type(one).__qualname__ for one in ours)),
    }


def grown(samples: Sequence[Sample]) -> list[str]:
    """Describes the growth in ``samples``, at least two, in the order in which they were taken.

    A leak is a growth in each round. A dict of Python that grows is copied once, into a table of twice its size. For
    this reason, numbers of bytes are compared without the round in which they grew most, if there are several rounds.
    """
    found = []
    for name in samples[0].keys() - {"step", "kinds"}:
        values = [sample[name] for sample in samples]
        growth = values[-1] - values[0]
        if name in MOST_MORE and len(values) > 2:
            growth -= max(0, *(after - before for before, after in itertools.pairwise(values)))
        if growth > MOST_MORE.get(name, 0):
            found.append(f"{name}: {values} after steps {[sample['step'] for sample in samples]}")
    if more := Counter(samples[-1]["kinds"]) - Counter(samples[0]["kinds"]):
        found.append(f"kinds: {dict(more)} more")
    return found


def main() -> None:
    for api in APIS:
        with tempfile.TemporaryDirectory() as folder:
            arguments = {"api": api, "num_steps": 2000, "num_warm": 500, "folder": folder, "round_of": 100}
            pool.run(2, "spec_tools.processes.soak", "soak", arguments, 3600.0)
            print(api, json.loads(Path(folder, "samples.json").read_text())[-1])


if __name__ == "__main__":
    main()
