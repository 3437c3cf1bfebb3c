"""Times of an AdamW step and of clipping by the norm of all gradients, for each kind of FSDP.

    python -m spec_tools.benchmarks.optimizer

The command prints a table. ``--record`` also writes ``docs/data/optimizer.json``, the source of the table in
``docs/choosing.md``. Two ranks on gloo use a model with many small parameters, `MODEL`, because the cost of DTensors
depends on their number and not on their size. AdamW runs in three modes: torch's own choice (*default*), all parameters
in one call (``foreach``), or one kernel for everything (``fused``)::

    a round, in a new random order               flat, default     torch's flat, fused    fully_shard, clipping   ...
    a barrier before each action                 3.4 ms            0.9 ms                 4.1 ms

The results are medians over the rounds, of wall-clock time and of the CPU time of the Python thread, which hardly
depends on the load of the machine. Clipping is a method of FSDP1, or a function of torch for `fully_shard`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from spec_tools.benchmarks.contenders import CONTENDERS
from spec_tools.benchmarks.page import circumstances
from spec_tools.benchmarks.race import Times
from spec_tools.benchmarks.workloads import WORKLOADS, Workload

__all__ = ["ACTIONS", "MODEL", "RECORD", "measure"]

RECORD = Path(__file__).resolve().parents[2] / "docs" / "data" / "optimizer.json"
NUM_RANKS, NUM_WARM = 2, 3
NUM_UNITS = 72
MODEL = f"{NUM_UNITS} x Linear(32, 32), each a unit: {2 * NUM_UNITS} parameters"
VARIANTS: dict[str, dict[str, bool]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
ACTIONS = (*VARIANTS, "clipping")


def _workload() -> Workload:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(32, 32) for _ in range(NUM_UNITS)))

    return replace(WORKLOADS["tiny"], build=build)


def _actions(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """The actions by name; they need gradients and keep them."""
    optimizers = {name: torch.optim.AdamW(model.parameters(), **options) for name, options in VARIANTS.items()}
    actions: dict[str, Callable[[], Any]] = {name: made.step for name, made in optimizers.items()}
    method: Any = getattr(model, "clip_grad_norm_", None)
    actions["clipping"] = lambda: (
        method(1.0) if method is not None else nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    )
    return actions


def measure(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Measures all contenders. Every rank must call it.

    Returns:
        ``wall`` and ``cpu`` in milliseconds, by contender and action.
    """
    workload, rank = _workload(), dist.get_rank()
    (inputs, targets), *_ = workload.batches(0, rank)
    actions: dict[tuple[str, str], Callable[[], Any]] = {}
    for contender in CONTENDERS:
        if contender.shards or contender.name == "single":
            model = contender.take(workload.model(), workload).model
            workload.loss(model(inputs), targets).backward()
            actions |= {(contender.name, name): action for name, action in _actions(model).items()}
    laps: dict[tuple[str, str], list[Times]] = {which: [] for which in actions}
    gc.collect()
    gc.disable()
    for number in range(NUM_WARM + rounds):
        order = list(actions)
        random.Random(number).shuffle(order)
        for which in order:
            dist.barrier()
            begin = Times.now()
            actions[which]()
            laps[which].append(begin.until(Times.now()))
    gc.enable()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (contender_name, name), times in laps.items():
        found.setdefault(contender_name, {})[name] = {
            "wall": round(1000 * statistics.median(one.wall for one in times[NUM_WARM:]), 2),
            "cpu": round(1000 * statistics.median(one.thread for one in times[NUM_WARM:]), 2),
        }
    return found


def table(found: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """A table for the terminal: milliseconds of wall-clock time and of CPU time."""
    lines = [f"{'':18}" + "".join(f"{name:>18}" for name in ACTIONS)]
    for contender, by_action in found.items():
        cells = [f"{by_action[name]['wall']:.2f} ({by_action[name]['cpu']:.2f})" for name in ACTIONS]
        lines.append(f"{contender:18}" + "".join(f"{cell:>18}" for cell in cells))
    return lines


def _rank(rank: int, folder: str, rounds: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    found = measure(rounds)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m spec_tools.benchmarks.optimizer")
    parser.add_argument("--rounds", type=int, default=25, help="how often each action is taken")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="optimizer-") as folder:
        mp.spawn(_rank, (folder, asked.rounds), nprocs=NUM_RANKS)
        found = json.loads(Path(folder, "found.json").read_text())
    print("\n".join(table(found)))
    if asked.record:
        reported = circumstances(time.monotonic() - begin)
        head = {
            "date": str(datetime.now(UTC).date()),
            "circumstances": reported,
            "model": MODEL,
            "rounds": asked.rounds,
        }
        RECORD.write_text(json.dumps({**head, "contenders": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
