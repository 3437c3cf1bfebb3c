"""A small training on two or four ranks. In the third iteration one rank, usually rank 1, does something else.

    python -m spec_tools.faults.deviate API WHAT

The groups' time-out is minutes, so a rank that waits for it exceeds the test's limit.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp.checks.collective_log import log
from minifsdp.engine.events import events
from minifsdp.watchdog.watchdog import PATIENCE
from spec_tests.subject import FullyShardedDataParallel as FSDP
from spec_tests.subject import ShardingStrategy, StateDictType, fully_shard
from spec_tools.faults.ends import ends_as_python_does

TIMEOUT = timedelta(minutes=5)
# Also on a machine with GPUs, where a model on the CPU would be sharded on one.
CPU = torch.device("cpu")


class Pair(nn.Module):
    """Two layers, which run in the given order."""

    def __init__(self, are_equal: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=are_equal)

    def forward(self, x: Tensor, order: str = "ab") -> Tensor:
        for name in order:
            x = getattr(self, name)(x)
        return x


def sharded(api: str, keeps: bool, are_equal: bool) -> Any:
    """Shards the model; four ranks use a mesh of 2 x 2."""
    torch.manual_seed(0)
    model: Any = Pair(are_equal)
    mesh = dist.init_device_mesh("cpu", (2, 2)) if dist.get_world_size() == 4 else None
    if api == "function":
        for part in (model.a, model.b, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=not keeps)
        return model
    if mesh is not None:
        strategy = ShardingStrategy._HYBRID_SHARD_ZERO2 if keeps else ShardingStrategy.HYBRID_SHARD
    else:
        strategy = ShardingStrategy.SHARD_GRAD_OP if keeps else ShardingStrategy.FULL_SHARD
    model.a, model.b = (
        FSDP(layer, sharding_strategy=strategy, device_mesh=mesh, device_id=CPU) for layer in (model.a, model.b)
    )
    return FSDP(model, sharding_strategy=strategy, device_mesh=mesh, device_id=CPU)


def micro_batch(model: Any, api: str, syncs: bool, order: str) -> None:
    x = torch.ones(2, 8)
    if api == "function":
        model.set_requires_gradient_sync(syncs)
    elif not syncs:
        with model.no_sync():
            model(x, order).sum().backward()
        return
    model(x, order).sum().backward()


def main() -> None:
    torch.set_num_threads(1)
    # A fork of a process that has imported torch has not read this variable.
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo", timeout=TIMEOUT)
    api, what = sys.argv[1:]
    model = sharded(api, keeps=what == "keeps and no_sync", are_equal="of other sizes" not in what)
    # Late enough that all collectives have been issued before.
    last = 11 if what.endswith("late") else 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(last + 1):
        deviates = step == last - 1 and dist.get_rank() == (0 if "host" in what else 1)
        if what in ("ends", "is the host and ends") and deviates:
            return
        if what == "is the host and killed" and deviates:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "fails" and deviates:
            raise LookupError("no such picture")
        if what == "is stuck" and step == 2:
            # In a C++ wait that no Python signal handler can interrupt.
            print("waits", flush=True)
            dist.recv(torch.zeros(1), 1 - dist.get_rank()) if dist.get_rank() else model(torch.ones(2, 8))
        if what == "is stuck in a barrier" and step == 2:
            print("waits", flush=True)
            time.sleep(60) if dist.get_rank() else dist.barrier()
        if what == "asks for a state dict" and deviates:
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
                model.state_dict()
        if what == "is killed before a state dict" and step == last - 1:
            if deviates:
                os.kill(os.getpid(), signal.SIGKILL)
            # No connection of gloo breaks: ranks first synchronize through the store.
            model.state_dict()
        if what == "has a stuck device" and deviates:
            return
        if what == "has a stuck device" and step == 2:
            # An event of an accelerator that never completes, while the CPU continues.
            events.last_event = SimpleNamespace(query=lambda: False)
            while not log.fatal_error:
                time.sleep(0.1)
        if what == "reads a DTensor" and step == 2 and not deviates:
            model.a.weight.full_tensor()
        if what == "reads a DTensor" and deviates:
            os.kill(os.getpid(), signal.SIGKILL)
        if what.startswith("catches") and step == last - 1:
            try:
                # The second layer is new on both ranks, so both check with the other rank first.
                micro_batch(model, api, True, "ba" if deviates else "bb")
            except RuntimeError as error:
                print(error)
            # Longer than the watchdog waits before it queries the other ranks.
            time.sleep(2 * PATIENCE)
            optimizer.zero_grad()
        for number in range(2):
            no_sync = "no_sync" in what and deviates and number == 0
            order = {"leaves out": "b", "swaps layers": "ba"}.get(what.partition(" of ")[0], "ab") if deviates else "ab"
            micro_batch(model, api, not no_sync, order)
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(0.1)
    print("done", flush=True)


if __name__ == "__main__":
    ends_as_python_does(main)
