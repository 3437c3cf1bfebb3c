"""Measures the checkpoints of a small model with both APIs.

    python -m torch.distributed.run --standalone --nproc-per-node 4 -m spec_tools.processes.checkpoint_costs FOLDER FILE

Every rank runs it. Checkpoints are written to new folders in ``FOLDER``, and rank 0 writes the results to ``FILE``.

* ``seconds`` are medians of `REPEATS` runs, from a barrier to the end of the slowest rank.
* ``memory`` is the largest number of bytes that a rank needs during the call, in addition to those before it. It is
  measured in another run, because counting slows every operator.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

import minifsdp
from minifsdp.wrap import ModuleWrapPolicy
from spec_tests.live_bytes import LiveBytes
from spec_tools.processes.checkpoint_sizes import Checkpoint

WIDTH, NUM_BLOCKS = 512, 8
REPEATS = 3
APIS = ("FullyShardedDataParallel", "fully_shard")
CALLS = ("save", "load", "begin_async_save", "save_full")


class Block(nn.Sequential):
    """One unit: two matrices and a nonlinearity."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def trained(api: str, width: int, num_blocks: int) -> tuple[Any, torch.optim.Optimizer]:
    """A sharded model and its optimizer after one step."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block(width) for _ in range(num_blocks)), nn.Linear(width, 8))
    if api == "fully_shard":
        for block in model[:-1]:
            minifsdp.fully_shard(block)
        minifsdp.fully_shard(model)
    else:
        policy = ModuleWrapPolicy({Block})
        model = minifsdp.FullyShardedDataParallel(model, auto_wrap_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(torch.randn(2, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def checkpoint(num_ranks: int, width: int = WIDTH, num_blocks: int = NUM_BLOCKS) -> Checkpoint:
    """The formulas for this model."""
    block = [(width, width), (width,), (width, width), (width,)]
    return Checkpoint([block] * num_blocks + [[(8, width), (8,)]], num_ranks)


class Calls:
    """The measured calls on one sharded model. Each call writes to a new folder, or reads the newest one."""

    def __init__(self, api: str, folder: Path, width: int, num_blocks: int) -> None:
        self.model, self.optimizer = trained(api, width, num_blocks)
        self._folder, self._numbers, self.newest = folder / api, itertools.count(), folder
        # An asynchronous save communicates in a thread, so it needs a group of its own.
        self._group, self._saving = dist.new_group(backend="gloo"), cast(Any, None)

    def save(self) -> None:
        """Sharded state dicts, and a file for each rank."""
        weights, states = minifsdp.get_state_dict(self.model, self.optimizer)
        self.newest = self._folder / str(next(self._numbers))
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=self.newest)

    def load(self) -> None:
        """Reads the files of `save`."""
        weights, states = minifsdp.get_state_dict(self.model, self.optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=self.newest)
        minifsdp.set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=states)

    def begin_async_save(self) -> None:
        """As `save`, until training can continue."""
        weights, states = minifsdp.get_state_dict(self.model, self.optimizer)
        # The writer also copies the state dicts. Without it, torch 2.13 cannot copy a `ShardedTensor`.
        writer = dcp.FileSystemWriter(self._folder / f"async-{next(self._numbers)}")
        both = {"model": weights, "optimizer": states}
        self._saving = dcp.async_save(both, storage_writer=writer, process_group=self._group)

    def finish_async_save(self) -> None:
        """Waits for the files; not measured."""
        if self._saving is not None:
            self._saving.result(timeout=120)
        self._saving = None

    def save_full(self) -> None:
        """Full state dicts on rank 0, and one file."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        both = minifsdp.get_state_dict(self.model, self.optimizer, options=options)
        if dist.get_rank() == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.save(both, self._folder / "full")


def largest(value: float) -> float:
    """The largest value of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return float(max(values))


def seconds_of(calls: Calls, name: str) -> float:
    dist.barrier()
    began = time.perf_counter()
    getattr(calls, name)()
    seconds = largest(time.perf_counter() - began)
    calls.finish_async_save()
    return round(seconds, 4)


def bytes_of(calls: Calls, name: str, live: LiveBytes) -> int:
    """Bytes during a call, in addition to those before it."""
    before = live.now()
    live.forget_peak()
    getattr(calls, name)()
    mine = live.peak - before
    calls.finish_async_save()
    return int(largest(mine))


def measure(folder: Path, width: int = WIDTH, num_blocks: int = NUM_BLOCKS, repeats: int = REPEATS) -> dict[str, Any]:
    """All measurements of both APIs. All ranks must call it."""
    found: dict[str, Any] = {}
    for api in APIS:
        calls = Calls(api, folder, width, num_blocks)
        # The calls take turns, so that another load on the machine affects all of them.
        seconds = [{name: seconds_of(calls, name) for name in CALLS} for _ in range(repeats)]
        dist.barrier()
        sizes = {path.name: path.stat().st_size for path in calls.newest.iterdir()}
        with LiveBytes() as live:
            counted = Calls(api, folder / "counted", width, num_blocks)
            memory = {name: bytes_of(counted, name, live) for name in CALLS}
        found[api] = {
            "seconds": {name: statistics.median(times[name] for times in seconds) for name in CALLS},
            "memory": memory,
            "num_files": len(sizes),
            "metadata_bytes": sizes.pop(".metadata"),
            "file_bytes": max(sizes.values()),
        }
    return found


def main(folder: str, file: str) -> None:
    """Measures, and writes the results."""
    warnings.simplefilter("ignore", FutureWarning)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    found = measure(Path(folder))
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
